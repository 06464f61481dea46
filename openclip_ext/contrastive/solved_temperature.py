"""A temperature without a learning rate: solved for, over a queue of recent embeddings.

The regularised objective ``τ·log mean_j exp((s_ij − s_ii)/τ) + τ·ρ`` has the derivative ``ρ − KL_i(τ)`` in τ, where
``KL_i(τ)`` is the divergence from uniform of the anchor's softmax over its negatives. It is the dual of a bound on that
divergence [NeuCLIP 1; Qiu et al., ICML 2023], so at the optimum it equals ρ: some ``exp(−ρ)`` of the data counts as hard.
A batch has too few negatives to find this τ: of ``m`` the divergence is below ``log m``. A queue of recent embeddings has
enough.

Naive float64 version: ``Solved`` in ``tests/references/contrastive.py``. Page: ``docs/methods/solved-temperature.md``.
"""

import math
import warnings

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import Contrast, GatheredBatch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue
from openclip_ext.contrastive.similarities import anchor_chunks
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds, global_temperatures, log_inverse

# The embeddings of an untrained model say nothing about the temperature.
_STEPS_BEFORE = 100
# Share of the way to the solution that log τ goes in a step, and the longest way.
_RATE = 0.01
_LONGEST = math.log(2)
# The divergence is a mean over at most so many anchors of each side: enough, as a step is short.
_ANCHORS = 64
# log τ of the bounds is halved so often: to 1e-5 of it.
_BISECTIONS = 18
_SMALLEST_VARIANCE = 1e-6


class SolvedTemperature(TemperatureScheme):
    """τ at which the anchors' softmax over recent embeddings has a divergence of ρ from uniform, in their mean.

    A step takes a hundredth of a Newton step of ``log τ``, once the queue is full, and not in the first 100 steps. The queue
    does not yet hold the batch then, so no anchor meets its own pair, unless the queue is longer than the data set. The
    model's ``logit_scale`` follows where the loop calls ``finish_logit_scale_step``.

    Args:
        embed_dim: width ``d`` of the embeddings.
        rho: ρ.
        temperature_queue: length ``m`` of the queue.
        solve_per_sample: solve for each anchor in every step, to the end. Without state of its own.
        temperature: start value; None: the model's.
        temperature_min, temperature_max: bounds.
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
        """One for all anchors; with ``solve_per_sample`` each anchor's own, as soon as there is enough to solve it."""
        stored = self.log_tau.exp().to(batch.features.dtype)
        tau = torch.where(stored.isnan(), global_temperatures(batch), stored)
        if not self.solve_per_sample:
            return tau
        own = batch.gather_local(self._solve_each(batch))
        return torch.where(self._is_ready() & batch.valid, own, tau)

    @torch.no_grad()
    def solve(self, contrast: Contrast) -> None:
        """Move ``log τ`` towards the solution for this batch, then put the batch into the queue."""
        batch = contrast.batch
        log_tau = torch.where(self.log_tau.isnan(), -batch.logit_scale.log(), self.log_tau)
        divergence, variance = self._moments(batch, log_tau)
        way = ((divergence - self.target) / variance.clamp(min=_SMALLEST_VARIANCE)).clamp(-_LONGEST, _LONGEST)
        moves = self._is_ready() & batch.ok
        log_tau = torch.where(moves, log_tau + _RATE * way, log_tau).clamp(*self.bounds)
        self.log_tau.copy_(torch.where(batch.ok, log_tau, self.log_tau))
        self.divergence.copy_(torch.where(moves, divergence, self.divergence))
        self.steps += batch.ok
        self.queue.push(batch)

    def _is_ready(self) -> Tensor:
        return (self.queue.filled == self.queue.capacity) & (self.steps >= _STEPS_BEFORE)

    def _moments(self, batch: GatheredBatch, log_tau: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over some anchors of the divergence at τ, and of its derivative in ``−log τ``, the variance of ``s/τ``."""
        similarities = batch.features[:, :_ANCHORS] @ self.queue.rows.transpose(1, 2)
        divergence, variance = _divergence(similarities, log_tau)
        valid = batch.valid[:_ANCHORS]
        count = 2 * valid.sum().clamp(min=1)
        return torch.where(valid, divergence, 0).sum() / count, torch.where(valid, variance, 0).sum() / count

    def _solve_each(self, batch: GatheredBatch) -> Tensor:
        """τ of this process's anchors by bisection, ``(2, B_local)``."""
        parts = []
        for anchors in anchor_chunks(batch.local, self.queue.capacity):
            similarities = batch.features[:, anchors] @ self.queue.rows.transpose(1, 2)
            low, high = (torch.full_like(batch.features[:, anchors, 0], bound) for bound in self.bounds)
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                too_small = _divergence(similarities, middle)[0] > self.target
                low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
            parts.append(((low + high) / 2).exp())
        return torch.cat(parts, dim=1)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """Let the model's parameter follow, for its checkpoints."""
        parameter.copy_(torch.where(self.log_tau.isnan(), parameter, -self.log_tau))

    def metrics(self, epoch: int) -> dict[str, float]:
        """ρ, and the divergence that the last step found, once there is one. Waits for the device."""
        divergence = self.divergence.item()
        return {"rho": self.target} | ({} if math.isnan(divergence) else {"divergence": divergence})


def _divergence(similarities: Tensor, log_tau: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(softmax(s/τ) ‖ uniform)`` over the last dimension, and its derivative in ``−log τ``.

    Args:
        similarities: ``(2, b, m)``.
        log_tau: 0-d or ``(2, b)``.
    """
    scaled = similarities * torch.exp(-log_tau)[..., None]
    log_share = nn.functional.log_softmax(scaled, dim=-1)
    share = log_share.exp()
    divergence = torch.linalg.vecdot(share, log_share) + math.log(similarities.shape[-1])
    mean = torch.linalg.vecdot(share, scaled)
    variance = torch.linalg.vecdot(share, scaled.square_()) - mean.square()
    return divergence, variance
