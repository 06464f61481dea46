"""Objectives: what a loss minimizes for given log-normalizers ``α``, and which quantity ``α`` estimates.

Every objective is ``L = ½ Σ_k mean_i value_k,i + regularizer(ρ)`` with ``α`` constant, over weights
``w_ij = exp((s_ij − s_ii)/τ_i − α_i)/divisor``. Objectives differ in a factor, in the positive pair and in the gradient of
the temperature. The gradient defines an objective. The value is only logged. Equation numbers in [brackets] are from the
papers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import BatchAtTemperature


@dataclass(frozen=True, eq=False)
class Estimand:
    """What ``α`` is the logarithm of. Estimates are not interchangeable, so each objective declares its own.

    Attributes:
        formula: for messages.
        from_batch: mini-batch estimate of ``α``, ``(2, B)``, without ε.
        log_divisor: log of the divisor of ``Σ_j exp((s_ij − s_ii)/τ_i)``; 0-d or ``(2, B)``.
        includes_positive: whether the positive pair is one of the terms.
    """

    formula: str
    from_batch: Callable[[BatchAtTemperature], Tensor]
    log_divisor: Callable[[BatchAtTemperature], Tensor]
    includes_positive: bool = False


# ε + g_i, g_i the mean of exp((s_ij − s_ii)/τ) over the negatives [NeuCLIP 9].
NEGATIVES_MEAN = Estimand(
    "log(ε + g), the mean over the negatives",
    from_batch=lambda batch_at_tau: batch_at_tau.log_g,
    log_divisor=lambda batch_at_tau: batch_at_tau.batch.log_negatives,
)
# Z_i·exp(−c·s_ii), the mean over all B pairs of an anchor.
PARTITION_MEAN = Estimand(
    "log((1 + (B−1)·g)/B), the mean over all pairs, the positive one included",
    from_batch=lambda batch_at_tau: batch_at_tau.infonce - batch_at_tau.batch.log_pairs,
    log_divisor=lambda batch_at_tau: batch_at_tau.batch.log_pairs,
    includes_positive=True,
)


class Objective(ABC):
    """What is minimized for given log-normalizers.

    Tensors have one value per anchor of both sides, ``(2, B)``. Arguments are finite also for masked samples, and results must
    be finite, too: a weight of 0 removes them. ``weight_ratio`` is ``exp(mini-batch estimate − α)``, 1 if the two agree.

    Attributes:
        estimand: what ``α`` estimates. A subclass must declare it.
        regularized: whether there is a regularizer with the weight ``ρ``. A subclass must declare it.
        differentiates_alpha: whether the derivative in ``α`` is ``τ(1 − weight_ratio)``, so that the gradient of an estimate
            can reach the encoders.
        eps: ε, added to the estimand.
    """

    estimand: Estimand
    regularized: ClassVar[bool]
    differentiates_alpha: ClassVar[bool] = False
    eps: float = 0.0

    def log_estimate(self, batch_at_tau: BatchAtTemperature) -> Tensor:
        """Return the mini-batch estimate of ``α``, ``(2, B)``."""
        return log_math.log_add(self.estimand.from_batch(batch_at_tau), self.eps)

    def pair_factor(self, tau: Tensor) -> Tensor | float:
        """Return the factor of ``w_ij`` in the derivative in ``s_ij``: a number, or ``(2, B)``."""
        return 1.0

    def positive_pair(self, batch_at_tau: BatchAtTemperature, alpha: Tensor, weight_sum: Tensor) -> Tensor:
        """Return the derivative in ``s_ii`` divided by :meth:`pair_factor`, ``(2, B)``; ``weight_sum`` is ``Σ_j w_ij``.

        The default is for a value that depends only on the gaps ``s_ij − s_ii``.
        """
        return -weight_sum

    @abstractmethod
    def value(self, batch_at_tau: BatchAtTemperature, alpha: Tensor, weight_ratio: Tensor) -> Tensor:
        """Return the value per anchor, without the regularizer."""

    @abstractmethod
    def tau_gradient(self, tau: Tensor, alpha: Tensor, weight_ratio: Tensor, positive: Tensor, gap: Tensor) -> Tensor:
        """Return the derivative in ``τ_i`` without the regularizer, ``(2, B_local)``.

        Args:
            tau, alpha, weight_ratio: ``(2, B_local)``.
            positive: ``s_ii``, ``(B_local,)`` or ``(2, B_local)``.
            gap: ``Σ_j w_ij (s_ij − s_ii)``, ``(2, B_local)``.
        """

    def regularizer(self, rho: float | Tensor) -> float | Tensor:
        """Return the factor of ``mean τ`` in the regularizer."""
        return 0.0


class FastCLIPObjective(Objective):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 4, 12] with the temperature's gradient of [NeuCLIP 13].

    [13] is [12] with ``exp(−α)(ε+g)`` set to 1, which is true for a moving average α of ``log(ε+g)``.
    """

    estimand = NEGATIVES_MEAN
    regularized = True
    differentiates_alpha = True

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def value(self, batch_at_tau: BatchAtTemperature, alpha: Tensor, weight_ratio: Tensor) -> Tensor:
        return batch_at_tau.tau * (weight_ratio + alpha)

    def tau_gradient(self, tau: Tensor, alpha: Tensor, weight_ratio: Tensor, positive: Tensor, gap: Tensor) -> Tensor:
        return alpha + 1 - gap / tau

    def regularizer(self, rho: float | Tensor) -> float | Tensor:
        return rho - 1


class NeuCLIPObjective(FastCLIPObjective):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 12]; its gradient in τ has ``exp(−α)(ε+g)`` where [13] has 1.

    α is treated as constant. Its dependence on τ would add ``τ(1 − exp(−α)(ε+g))·∂α/∂τ`` (``Estimate.tau_slope``).
    """

    def tau_gradient(self, tau: Tensor, alpha: Tensor, weight_ratio: Tensor, positive: Tensor, gap: Tensor) -> Tensor:
        return alpha + weight_ratio - gap / tau


class Unscaled(Objective):
    """Base of objectives of the gaps divided by τ, without the factor τ and without a regularizer."""

    regularized = False

    def pair_factor(self, tau: Tensor) -> Tensor:
        return tau.reciprocal()

    def tau_gradient(self, tau: Tensor, alpha: Tensor, weight_ratio: Tensor, positive: Tensor, gap: Tensor) -> Tensor:
        return -gap / tau.square()
