"""A temperature without a learning rate: it is computed from a queue of recent embeddings.

The regularized objective ``τ·log mean_j exp((s_ij − s_ii)/τ) + τ·ρ`` has the derivative ``ρ − KL_i(τ)`` with respect to τ.
``KL_i(τ)`` is the divergence of the anchor's softmax over its negatives from the uniform distribution. The objective is the
dual of a worst-case mean over weights of the negatives whose divergence is at most ρ [NeuCLIP 1; Qiu et al., ICML 2023]. So at
the optimal τ the divergence equals ρ, and about ``exp(−ρ)`` of the data counts as hard. A batch has too few negatives to find
this τ, because with ``m`` negatives the divergence is below ``log m``. A queue of recent embeddings has enough negatives.

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
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue
from openclip_ext.contrastive.similarities import MASKED_SIMILARITY
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds, global_temperatures, log_inverse

# Steps before τ first moves, because the embeddings of an untrained model contain no information about the temperature.
_WARMUP_STEPS = 100
# Fraction of the distance to the solution by which log τ moves per step.
_RATE = 0.01
# Maximum number of anchors per side that one solution uses. Few are enough, because log τ moves slowly.
_ANCHORS = 32
# Number of intervals between the bounds of log τ, for a precision of 0.1 % of τ. Each iteration splits an interval into parts.
# More parts mean more arithmetic, which is slow on a CPU, but fewer kernel launches, which is fast on a GPU.
_INTERVALS = 2**12
_PARTS = {"cpu": 2, "cuda": 16}


class SolvedTemperature(TemperatureScheme):
    """The τ at which the anchors' softmax over recent embeddings has, on average, a divergence of ρ from uniform.

    After the first 100 steps, and once the queue is full, each step moves ``log τ`` by a hundredth of its distance to the
    solution. The batch is added to the queue afterwards. So an anchor is not compared with its own positive if the queue is
    shorter than the data set. With ``equal_captions``, an anchor is not compared with samples that share one of its labels.
    ``finish_logit_scale_step`` sets the model's parameter to ``log(1/τ)``.
    """

    solves = True
    log_tau: Tensor
    steps: Tensor

    def __init__(
        self,
        *,
        embed_dim: int,
        rho: float,
        temperature_queue: int,
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
        self.bounds = (math.log(temperature_min), math.log(temperature_max))
        self.uses_logit_scale = temperature is None
        self.initial_logit_scale = log_inverse(temperature)
        self.queue = EmbeddingQueue(temperature_queue, embed_dim)
        # If no temperature is given, log τ is NaN before the first step, which uses the model's temperature.
        self.register_buffer("log_tau", torch.tensor(math.nan if temperature is None else math.log(temperature)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        # Of the last step: whether log τ moved (0-d bool), the function of its divergence, and log τ before the move.
        self._last_move: tuple[Tensor, Callable[[Tensor], Tensor], Tensor] | None = None

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        stored = self.log_tau.exp().to(batch.features.dtype)
        return torch.where(stored.isnan(), global_temperatures(batch), stored)

    def keep_labels(self) -> None:
        self.queue.keep_labels()

    def keep_reference(self, width: int) -> None:
        self.queue.keep_reference(width)

    def solve(self, stats: ContrastStats) -> None:
        """Move ``log τ`` towards the solution for this batch, then push the batch into the queue."""
        batch = stats.batch
        log_tau = torch.where(self.log_tau.isnan(), -batch.logit_scale.log(), self.log_tau)
        # Reading ``steps`` would need a sync. There are never more steps than calls, so this check of ``call`` is enough.
        if isinstance(batch.call, Tensor) or batch.call >= _WARMUP_STEPS:
            log_tau = self._move(log_tau, batch)
        torch.where(batch.ok, log_tau.clamp(*self.bounds), self.log_tau, out=self.log_tau)
        self.steps += batch.ok
        self.queue.push(batch)

    def _move(self, log_tau: Tensor, batch: GatheredBatch) -> Tensor:
        similarities = (batch.features[:, :_ANCHORS] @ self.queue.rows.transpose(1, 2)).flatten(0, 1)
        weights, negatives = batch.sample_weight[:_ANCHORS].repeat(2), None
        if self.queue.compares:
            excluded = self.queue.equal(batch, slice(0, _ANCHORS)).repeat(2, 1)
            similarities.masked_fill_(excluded, MASKED_SIMILARITY)
            negatives = (~excluded).sum(dim=1)
            weights = weights * (negatives > 0)
        total = weights.sum()
        # Without a valid anchor, the divergence is NaN. This can happen although later samples of the batch are valid.
        divergence = partial(_mean_divergence, similarities, weights / total, negatives)
        moves = (self.queue.filled == self.queue.capacity) & (self.steps >= _WARMUP_STEPS) & (total > 0)
        self._last_move = moves, divergence, log_tau
        return torch.where(moves, log_tau.lerp(self._solution(divergence, log_tau), _RATE), log_tau)

    def _solution(self, divergence: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Return the ``log τ`` at which the divergence is ρ, 0-d like ``like``. The divergence decreases with τ."""
        lowest, highest = self.bounds
        low, width = torch.full_like(like, lowest), highest - lowest
        parts = _PARTS.get(like.device.type, _PARTS["cuda"])
        numbers = torch.arange(1, parts, dtype=like.dtype, device=like.device)
        for _ in range(round(math.log(_INTERVALS, parts))):
            width /= parts
            is_low = divergence(torch.add(low, numbers, alpha=width)) > self.target
            low = torch.add(low, is_low.sum(dim=0, dtype=like.dtype), alpha=width)
        return low + width / 2

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        parameter.copy_(torch.where(self.log_tau.isnan(), parameter, -self.log_tau))

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return ρ and, if the last step moved ``log τ``, the divergence before the move. Synchronizes with the device."""
        found = {"rho": self.target}
        if self._last_move is not None:
            moves, divergence, log_tau = self._last_move
            if moves:
                found["divergence"] = divergence(log_tau).item()
        return found


def _mean_divergence(similarities: Tensor, weights: Tensor, negatives: Tensor | None, log_tau: Tensor) -> Tensor:
    """Return the weighted mean of ``KL(softmax(s_i/τ) ‖ uniform)`` over all anchors, shaped like ``log_tau``.

    Args:
        similarities: ``s`` of the anchors of both sides with the queue, ``(b, m)``.
        weights: ``(b,)`` weights of the anchors. They sum to 1.
        negatives: ``(b,)`` number of each anchor's samples in the queue that are not masked. None means all ``m``.
        log_tau: 0-d or ``(parts,)``.
    """
    inverse = torch.exp(-log_tau[..., None])
    has_masked = negatives is not None
    terms, scale, log_sum = log_math.softmax_terms(similarities * inverse[..., None], dim=-1, has_masked=has_masked)
    mean = torch.linalg.vecdot(terms, similarities)
    if scale is not None:
        mean = mean * scale
    log_number = math.log(similarities.shape[-1]) if negatives is None else negatives.clamp(min=1).log()
    return torch.addcmul(log_number - log_sum, mean, inverse) @ weights
