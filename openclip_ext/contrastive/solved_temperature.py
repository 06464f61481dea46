"""A temperature without a learning rate: it is computed from a queue of recent embeddings.

The regularized objective ``τ·log mean_j exp((s_ij − s_ii)/τ) + τ·ρ`` has the derivative ``ρ − KL_i(τ)`` with respect to τ.
``KL_i(τ)`` is the divergence of the anchor's softmax over its negatives from the uniform distribution. The objective is the
dual of a bound on this divergence [NeuCLIP 1; Qiu et al., ICML 2023]. So at the optimal τ the divergence equals ρ, and about
``exp(−ρ)`` of the data counts as hard. A batch has too few negatives to find this τ, because with ``m`` negatives the
divergence is below ``log m``. A queue of recent embeddings has enough.

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

# Steps before τ first moves, because the embeddings of an untrained model contain no information about the temperature.
_WARMUP_STEPS = 100
# Fraction of the distance to the solution by which log τ moves per step.
_RATE = 0.01
# Maximum anchors per side to solve for; enough, because steps are small.
_ANCHORS = 32
# Number of intervals between the bounds of log τ, for a precision of 0.1 % of τ. Each iteration splits an interval into parts.
# More parts need more arithmetic, which is slow on a CPU, but fewer kernels, which is fast on a GPU.
_INTERVALS = 2**12
_PARTS = {"cpu": 2, "cuda": 8}


class SolvedTemperature(TemperatureScheme):
    """The τ at which the anchors' softmax over recent embeddings has, on average, a divergence of ρ from uniform.

    After the first 100 steps, and once the queue is full, each step moves ``log τ`` by a hundredth of its distance to the
    solution. The batch is added to the queue afterwards, so an anchor is not compared with its own pair, unless the queue is
    longer than the data set. If the loop calls ``finish_logit_scale_step``, the model's ``logit_scale`` is set to ``1/τ``.
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
                "rho",
                f"rho={rho:g}: expected at least 0, because the divergence of a solved temperature is never negative",
            )
        if rho >= math.log(temperature_queue):
            warnings.warn(
                f"rho={rho:g}: the divergence over {temperature_queue} embeddings is at most "
                f"{math.log(temperature_queue):.2f}, so the temperature will reach temperature_min={temperature_min:g}. Use a "
                "smaller rho (a larger hard share) or a longer temperature_queue",
                stacklevel=2,
            )
        self.target = rho
        self.solve_per_sample = solve_per_sample
        self.bounds = (math.log(temperature_min), math.log(temperature_max))
        self.uses_logit_scale = temperature is None
        self.initial_logit_scale = log_inverse(temperature)
        self.queue = EmbeddingQueue(temperature_queue, embed_dim)
        # NaN before the first step. The model's temperature is then used.
        self.register_buffer("log_tau", torch.tensor(math.nan if temperature is None else math.log(temperature)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("divergence", torch.tensor(math.nan), persistent=False)

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Return one temperature for all anchors; with ``solve_per_sample``, one per anchor once the queue is full."""
        stored = self.log_tau.exp().to(batch.features.dtype)
        tau = torch.where(stored.isnan(), global_temperatures(batch), stored)
        if not (self.solve_per_sample and _may_be_ready(batch)):
            return tau
        own = batch.gather_local(self._solve_each(batch))
        return torch.where(self._is_ready() & batch.valid, own, tau)

    @torch.no_grad()
    def solve(self, batch_at_tau: BatchAtTemperature) -> None:
        """Move ``log τ`` towards the solution for this batch, then push the batch into the queue."""
        batch = batch_at_tau.batch
        log_tau = torch.where(self.log_tau.isnan(), -batch.logit_scale.log(), self.log_tau)
        if _may_be_ready(batch):
            log_tau = self._move(log_tau, batch)
        self.log_tau.copy_(torch.where(batch.ok, log_tau.clamp(*self.bounds), self.log_tau))
        self.steps += batch.ok
        self.queue.push(batch)

    def _move(self, log_tau: Tensor, batch: GatheredBatch) -> Tensor:
        some = slice(0, min(batch.size, _ANCHORS))
        similarities = self._similarities(batch, some)
        valid = batch.valid[some].to(similarities.dtype)
        divergence = partial(_mean_divergence, similarities, valid / (2 * valid.sum()).clamp(min=1))
        moves = self._is_ready() & batch.ok
        self.divergence.copy_(torch.where(moves, divergence(log_tau), self.divergence))
        return torch.where(moves, log_tau.lerp(self._solution(divergence, log_tau), _RATE), log_tau)

    def _is_ready(self) -> Tensor:
        return (self.queue.filled == self.queue.capacity) & (self.steps >= _WARMUP_STEPS)

    def _similarities(self, batch: GatheredBatch, anchors: slice) -> Tensor:
        """Return similarities of some anchors of both sides with the queue, ``(2, b, m)``."""
        return batch.features[:, anchors] @ self.queue.rows.transpose(1, 2)

    def _solution(self, divergence: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Return the ``log τ`` at which the divergence is ρ, shaped like ``like``. The divergence decreases with τ."""
        lowest, highest = self.bounds
        low, width = torch.full_like(like, lowest), highest - lowest
        parts = _parts(like.device)
        numbers = torch.arange(1, parts, dtype=like.dtype, device=like.device).view(-1, *(1 for _ in like.shape))
        for _ in range(round(math.log(_INTERVALS, parts))):
            width /= parts
            low = low + width * (divergence(low + width * numbers) > self.target).sum(dim=0, dtype=like.dtype)
        return low + width / 2

    def _solve_each(self, batch: GatheredBatch) -> Tensor:
        """Return τ of this process's anchors, ``(2, B_local)``."""
        parts = []
        for anchors in anchor_chunks(batch.local, _parts(batch.features.device) * self.queue.capacity):
            similarities = self._similarities(batch, anchors)
            parts.append(self._solution(partial(_divergence, similarities), similarities[..., 0]).exp())
        return torch.cat(parts, dim=1)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        parameter.copy_(torch.where(self.log_tau.isnan(), parameter, -self.log_tau))

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return ρ and, once ``log τ`` has moved, the divergence before its last move. Synchronizes with the device."""
        divergence = self.divergence.item()
        return {"rho": self.target} | ({} if math.isnan(divergence) else {"divergence": divergence})


def _may_be_ready(batch: GatheredBatch) -> bool:
    """Return False before ``_WARMUP_STEPS`` calls. This check needs no sync. There are never more steps than calls."""
    return isinstance(batch.call, Tensor) or batch.call >= _WARMUP_STEPS


def _parts(device: torch.device) -> int:
    return _PARTS.get(device.type, _PARTS["cuda"])


def _divergence(similarities: Tensor, log_tau: Tensor) -> Tensor:
    """Return ``KL(softmax(s/τ) ‖ uniform)`` over the last dimension of ``s`` ``(2, b, m)``, shaped like ``log_tau``."""
    inverse = torch.exp(-log_tau)
    terms = similarities * inverse[..., None]
    largest = log_math.shifted_exp_(terms, dim=-1)
    total = terms.sum(dim=-1)
    mean = torch.linalg.vecdot(terms, similarities) / total
    return mean * inverse - largest - total.log() + math.log(similarities.shape[-1])


def _mean_divergence(similarities: Tensor, weights: Tensor, log_tau: Tensor) -> Tensor:
    """Return the weighted mean of :func:`_divergence` over all anchors, shaped like ``log_tau``."""
    return (_divergence(similarities, log_tau[..., None, None]) * weights).sum(dim=(-2, -1))
