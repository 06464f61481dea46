"""The surrogates: what is minimised once the log-normalizers ``α`` are given.

All are ``L = ½ Σ_k mean_i value_k,i + regulariser(ρ)`` with ``α`` constant, over the same weights
``w_ij = exp((s_ij − s_ii)/τ_i − α_i)/divisor``; they differ in a factor, in the positive pair and in the gradient of the
temperature. What is defined is the gradient; the value is for the logs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch


@dataclass
class Anchors:
    """Per-anchor quantities of one side or both, ``(2, N)`` each.

    Attributes:
        tau: temperature.
        alpha: estimated log-normalizer.
        log_g: see :mod:`functional`.
        error: ``exp(log_estimate − α)``: 1 where α is the batch's own estimate, ``E`` below.
        positive: ``s_ii``, ``(N,)``.
        tilt: ``Σ_j w_ij (s_ij − s_ii)``, or None where no temperature needs a gradient.
    """

    tau: Tensor
    alpha: Tensor
    log_g: Tensor
    error: Tensor
    positive: Tensor
    tilt: Tensor | None = None


class Contrastive:
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 4, 12] with the temperature's gradient of FastCLIP [13].

    [13] is [12] with ``exp(−α)(ε+g)`` taken as 1: right where α is a moving average that follows ``log(ε+g)``.
    """

    includes_positive = False

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def log_estimate(self, log_g: Tensor, block: GatheredBatch) -> Tensor:
        """The batch's own estimate of α: ``log(ε + g)``."""
        return F.log_add(log_g, self.eps)

    def log_divisor(self, block: GatheredBatch) -> Tensor:
        """Log of what the sum over pairs is divided by."""
        return torch.log(block.negatives)

    def pair_factor(self, tau: Tensor) -> Tensor:
        """Factor of ``w_ij`` in the derivative in ``s_ij``."""
        return torch.ones_like(tau)

    def own_pair(self, anchors: Anchors, weight_sum: Tensor, block: GatheredBatch) -> Tensor:
        """Derivative in ``s_ii``, over :meth:`pair_factor`."""
        return -weight_sum

    def value(self, anchors: Anchors) -> Tensor:
        """The surrogate without the regulariser, per anchor."""
        return anchors.tau * (anchors.error + anchors.alpha)

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        """Derivative in ``τ_i`` without the regulariser, per anchor."""
        return anchors.alpha + 1 - anchors.tilt / anchors.tau

    def regularizer(self, rho: float) -> float:
        """Factor of ``mean τ`` in the regulariser."""
        return rho - 1


class Unified(Contrastive):
    """NeuCLIP's objective [12], read literally also for the temperature."""

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        """Derivative in ``τ_i`` without the regulariser, per anchor."""
        return anchors.alpha + anchors.error - anchors.tilt / anchors.tau


class Unscaled(Contrastive):
    """FastCLIP-v0: ``g/u`` with ``u = exp(α)``, not multiplied by τ, no regulariser."""

    def pair_factor(self, tau: Tensor) -> Tensor:
        """Factor of ``w_ij`` in the derivative in ``s_ij``."""
        return 1 / tau

    def value(self, anchors: Anchors) -> Tensor:
        """The surrogate without the regulariser, per anchor."""
        return F.saturating_exp(anchors.log_g - anchors.alpha)

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        """Derivative in ``τ_i``, per anchor: ``∂g/∂τ / u``."""
        return -anchors.tilt / anchors.tau.square()

    def regularizer(self, rho: float) -> float:
        """No regulariser."""
        return 0.0


class Partition:
    """AmorLIP's second stage [6], as used: ``½(ℓ/c + ρ/c)`` with ``c = 1/τ`` and ``α = log λ − c·s_ii``.

    The positive pair is one of the ``B`` terms of the mean, and its attraction has coefficient exactly 1. ``λ`` is constant
    for the temperature, too.
    """

    includes_positive = True

    def log_estimate(self, log_g: Tensor, block: GatheredBatch) -> Tensor:
        """The batch's own estimate of α: ``log Z − c·s_ii = log((1 + (B−1)·g)/B)``."""
        return F.infonce(log_g, block.negatives) - torch.log(block.count)

    def log_divisor(self, block: GatheredBatch) -> Tensor:
        """Log of what the sum over pairs is divided by."""
        return torch.log(block.count)

    def pair_factor(self, tau: Tensor) -> Tensor:
        """Factor of ``w_ij`` in the derivative in ``s_ij``."""
        return torch.ones_like(tau)

    def own_pair(self, anchors: Anchors, weight_sum: Tensor, block: GatheredBatch) -> Tensor:
        """Derivative in ``s_ii``."""
        return F.saturating_exp(-anchors.alpha) / block.count - 1

    def value(self, anchors: Anchors) -> Tensor:
        """The surrogate without the regulariser, per anchor."""
        return anchors.tau * anchors.error - anchors.positive

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        """Derivative in ``τ_i`` without the regulariser, per anchor."""
        return -(anchors.tilt + anchors.positive * (anchors.error - 1)) / anchors.tau

    def regularizer(self, rho: float) -> float:
        """Factor of ``mean τ`` in the regulariser."""
        return 0.5 * rho


class InfoNce(Unscaled):
    """SimCLR's NT-Xent: ``log(1 + N·g)`` over the ``N`` negatives of the batch, not multiplied by τ, no regulariser.

    Here ``α`` is this value, so that the weights of the negatives are the softmax's.
    """

    def __init__(self) -> None:
        super().__init__(eps=0.0)

    def log_estimate(self, log_g: Tensor, block: GatheredBatch) -> Tensor:
        """The value itself."""
        return F.infonce(log_g, block.negatives)

    def log_divisor(self, block: GatheredBatch) -> Tensor:
        """The sum over pairs is not divided."""
        return torch.zeros_like(block.tau)

    def value(self, anchors: Anchors) -> Tensor:
        """The surrogate, per anchor."""
        return anchors.alpha


class Decoupled(Contrastive):
    """``−s_ii + τ·log(ε + u)`` with ``u ≈ mean_j exp(s_ij/τ)``: SogCLR as in the chapter's Algorithm 34.

    The positive pair is in neither ``u`` nor its weight: its attraction has coefficient exactly 1. ``α = log(ε + u)``.
    """

    def log_estimate(self, log_g: Tensor, block: GatheredBatch) -> Tensor:
        """The batch's own ``log u``."""
        return log_g + block.positive / block.tau

    def log_divisor(self, block: GatheredBatch) -> Tensor:
        """Log of what the sum over pairs is divided by, and of the positive pair that their weights contain."""
        return torch.log(block.negatives) - block.positive / block.tau

    def own_pair(self, anchors: Anchors, weight_sum: Tensor, block: GatheredBatch) -> Tensor:
        """Derivative in ``s_ii``."""
        return -torch.ones_like(weight_sum)

    def value(self, anchors: Anchors) -> Tensor:
        """The surrogate, per anchor."""
        return anchors.tau * anchors.alpha - anchors.positive


Surrogate = Contrastive | Partition

SURROGATES: dict[str, type] = {
    "contrastive": Contrastive,
    "unified": Unified,
    "unscaled": Unscaled,
    "partition": Partition,
}
