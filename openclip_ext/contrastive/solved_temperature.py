"""A temperature without a learning rate: solved for, over a queue of recent embeddings.

The regularized objective ``τ·log mean_j exp((s_ij − s_ii)/τ) + τ·ρ`` has the derivative ``ρ − KL_i(τ)`` in τ, where
``KL_i(τ)`` is the divergence from uniform of the anchor's softmax over its negatives. It is the dual of a bound on that
divergence [NeuCLIP 1; Qiu et al., ICML 2023], so at the optimum it equals ρ: some ``exp(−ρ)`` of the data counts as hard.
A batch has too few negatives to find this τ: of ``m`` the divergence is below ``log m``. A queue of recent embeddings has
enough.

Naive float64 version: ``Solved`` in ``tests/references/contrastive.py``. Page: ``docs/methods/solved-temperature.md``.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import BatchAtTemperature, GatheredBatch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue
from openclip_ext.contrastive.similarities import anchor_chunks
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds, global_temperatures, log_inverse

# The embeddings of an untrained model say nothing about the temperature.
_STEPS_BEFORE = 100
# Share of the way to the solution that log τ goes in a step.
_RATE = 0.01
# At most so many anchors of each side are solved for: enough, as a step is short.
_ANCHORS = 32
# log τ is found to one of so many intervals between its bounds, 0.1 % of τ, by cutting them into parts again and again.
# More parts at a time take more arithmetic, which counts on a CPU, and fewer kernels, which count elsewhere.
_INTERVALS = 2**12
_PARTS = {"cpu": 2, "cuda": 8}


class SolvedTemperature(TemperatureScheme):
    """τ at which the anchors' softmax over recent embeddings has a divergence of ρ from uniform, in their mean.

    ``log τ`` goes a hundredth of the way in a step, once the queue is full, and not in the first 100 steps. The queue does not
    yet hold the batch then, so no anchor meets its own pair, unless the queue is longer than the data set. The model's
    ``logit_scale`` follows where the loop calls ``finish_logit_scale_step``.

    Keyword arguments are the options of these names (``losses/options.py``).
    """

    solves = True
    log_tau: Tensor
    steps: Tensor
    divergence: Tensor

    def __init__(
        self,
        *,
        embed_dim: int,
        rho: float,
        temperature_queue: int,
        solve_per_sample: bool,
        temperature: float | None,
        temperature_min: float,
        temperature_max: float,
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        if rho < 0:
            raise OptionError(
                "rho", f"rho={rho:g}: a solved temperature has a divergence of rho, which is never negative"
            )
        if rho >= math.log(temperature_queue):
            warnings.warn(
                f"rho={rho:g}: no temperature has this divergence over {temperature_queue} embeddings, at most "
                f"{math.log(temperature_queue):.2f}. It will go to temperature_min={temperature_min:g}. Give a smaller rho "
                "(a larger hard share) or a longer temperature_queue",
                stacklevel=2,
            )
        self.target = rho
        self.solve_per_sample = solve_per_sample
        self.bounds = (math.log(temperature_min), math.log(temperature_max))
        self.uses_logit_scale = temperature is None
        self.initial_logit_scale = log_inverse(temperature)
        self.queue = EmbeddingQueue(temperature_queue, embed_dim)
        # NaN: not known yet, the model's.
        self.register_buffer("log_tau", torch.tensor(math.nan if temperature is None else math.log(temperature)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("divergence", torch.tensor(math.nan), persistent=False)

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Return one for all anchors; with ``solve_per_sample`` each anchor's own, as soon as there is enough to solve it."""
        stored = self.log_tau.exp().to(batch.features.dtype)
        tau = torch.where(stored.isnan(), global_temperatures(batch), stored)
        if not self.solve_per_sample or batch.call < _STEPS_BEFORE:
            return tau
        own = batch.gather_local(self._solve_each(batch))
        return torch.where(self._is_ready() & batch.valid, own, tau)

    @torch.no_grad()
    def solve(self, batch_at_tau: BatchAtTemperature) -> None:
        """Move ``log τ`` towards the solution for this batch, then put the batch into the queue."""
        batch = batch_at_tau.batch
        log_tau = torch.where(self.log_tau.isnan(), -batch.logit_scale.log(), self.log_tau)
        # Known without a wait for the device: there are no more steps than calls.
        if batch.call >= _STEPS_BEFORE:
            log_tau = self._moved(log_tau, batch)
        self.log_tau.copy_(torch.where(batch.ok, log_tau.clamp(*self.bounds), self.log_tau))
        self.steps += batch.ok
        self.queue.push(batch)

    def _moved(self, log_tau: Tensor, batch: GatheredBatch) -> Tensor:
        """Return ``log τ`` after a step towards the solution, if there is enough to solve it."""
        some = slice(0, min(batch.size, _ANCHORS))
        similarities = self._similarities(batch, some)
        valid = batch.valid[some].to(similarities.dtype)
        divergence = partial(_mean_divergence, similarities, valid / (2 * valid.sum()).clamp(min=1))
        moves = self._is_ready() & batch.ok
        self.divergence.copy_(torch.where(moves, divergence(log_tau), self.divergence))
        return torch.where(moves, log_tau.lerp(self._solution(divergence, log_tau), _RATE), log_tau)

    def _is_ready(self) -> Tensor:
        return (self.queue.filled == self.queue.capacity) & (self.steps >= _STEPS_BEFORE)

    def _similarities(self, batch: GatheredBatch, anchors: slice) -> Tensor:
        """Of some anchors of both sides with the queue, ``(2, b, m)``."""
        return batch.features[:, anchors] @ self.queue.rows.transpose(1, 2)

    def _solution(self, divergence: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Return ``log τ`` at which the divergence, which falls with τ, is ρ; shaped as ``like``."""
        lowest, highest = self.bounds
        low, width = torch.full_like(like, lowest), highest - lowest
        parts = _parts(like.device)
        numbers = torch.arange(1, parts, dtype=like.dtype, device=like.device).view(-1, *(1 for _ in like.shape))
        for _ in range(round(math.log(_INTERVALS, parts))):
            width /= parts
            low = low + width * (divergence(low + width * numbers) > self.target).sum(dim=0, dtype=like.dtype)
        return low + width / 2

    def _solve_each(self, batch: GatheredBatch) -> Tensor:
        """τ of this process's anchors, ``(2, B_local)``."""
        parts = []
        for anchors in anchor_chunks(batch.local, _parts(batch.features.device) * self.queue.capacity):
            similarities = self._similarities(batch, anchors)
            parts.append(self._solution(partial(_divergence, similarities), similarities[..., 0]).exp())
        return torch.cat(parts, dim=1)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """Let the model's parameter follow, for its checkpoints."""
        parameter.copy_(torch.where(self.log_tau.isnan(), parameter, -self.log_tau))

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return ρ, and the divergence that the last step found, once there is one. Waits for the device."""
        divergence = self.divergence.item()
        return {"rho": self.target} | ({} if math.isnan(divergence) else {"divergence": divergence})


def _parts(device: torch.device) -> int:
    return _PARTS.get(device.type, _PARTS["cuda"])


def _divergence(similarities: Tensor, log_tau: Tensor) -> Tensor:
    """Return ``KL(softmax(s/τ) ‖ uniform)`` over the last dimension, shaped as ``log_tau``.

    Args:
        similarities: ``(2, b, m)``.
        log_tau: ``(..., 2, b)``, or of shapes that broadcast to it.
    """
    inverse = torch.exp(-log_tau)
    terms = similarities * inverse[..., None]
    largest = log_math.shifted_exp_(terms, dim=-1)
    total = terms.sum(dim=-1)
    mean = torch.linalg.vecdot(terms, similarities) / total
    return mean * inverse - largest - total.log() + math.log(similarities.shape[-1])


def _mean_divergence(similarities: Tensor, weights: Tensor, log_tau: Tensor) -> Tensor:
    """Return the weighted mean of :func:`_divergence` over both sides of the anchors, shaped as ``log_tau``."""
    return (_divergence(similarities, log_tau[..., None, None]) * weights).sum(dim=(-2, -1))
