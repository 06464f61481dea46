"""Objectives: functions that losses minimize for given log-normalizers ``α``. Each declares the quantity that ``α`` estimates.

Every objective is ``L = ½ Σ_k mean_i value_k,i + regularizer(ρ)`` over sides ``k`` and anchors ``i``. ``α`` is treated as
constant, and the pairs have weights ``w_ij = exp((s_ij − s_ii)/τ_i − α_i)/divisor`` (see :class:`Estimand`). Objectives differ
in the factor of these weights and in the gradients for the positive pair and for the temperature. Training uses only the
gradient of an objective. The value is only logged. Equation numbers in [brackets] are from the papers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats


@dataclass(frozen=True, eq=False)
class Estimand:
    """The quantity whose logarithm is ``α``. Objectives need different quantities, so each declares its estimand.

    Attributes:
        formula: Formula of ``α``, for error messages.
        from_batch: Function that returns the mini-batch estimate of ``α``, ``(2, B)``, without ε.
        log_divisor: Function that returns the log of the number by which the estimand divides ``Σ_j exp((s_ij − s_ii)/τ_i)``,
            0-d or ``(2, B)``.
        includes_positive: Whether the positive pair is one of the terms of the estimand.
    """

    formula: str
    from_batch: Callable[[ContrastStats], Tensor]
    log_divisor: Callable[[ContrastStats], Tensor]
    includes_positive: bool = False


# ε + g_i, where g_i is the mean of exp((s_ij − s_ii)/τ) over the negatives [NeuCLIP 9].
NEGATIVES_MEAN = Estimand(
    "log(ε + g), where g is the mean over the negatives",
    from_batch=lambda stats: stats.log_mean_negatives,
    log_divisor=lambda stats: stats.batch.log_negatives,
)
# The mean of exp((s_ij − s_ii)/τ) over all B pairs of an anchor, including the positive pair.
PARTITION_MEAN = Estimand(
    "log((1 + (B−1)·g)/B), the log of the mean over all pairs, including the positive pair",
    from_batch=lambda stats: stats.infonce - stats.batch.log_pairs,
    log_divisor=lambda stats: stats.batch.log_pairs,
    includes_positive=True,
)


class Objective(ABC):
    """The function that a loss minimizes for given log-normalizers.

    Tensors have one value per anchor of both sides, ``(2, B)``. Arguments are finite, even for masked samples. Results must
    also be finite, because masked samples are removed by a weight of 0. ``batch_to_estimate`` is ``exp(mini-batch estimate −
    α)``, which is 1 if the mini-batch estimate equals ``α``.

    Attributes:
        estimand: The quantity that ``α`` estimates. A subclass must declare it.
        regularized: Whether the objective has a regularizer with the weight ``ρ``.
        differentiates_alpha: Whether the derivative with respect to ``α`` is ``τ(1 − batch_to_estimate)``. Only then can a
            normalizer pass the gradient of ``α`` to the encoders.
        depends_on_gaps: Whether the objective depends on similarities only through ``s_ij − s_ii``. If not, a subclass
            declares :meth:`positive_pair`.
        eps: The constant ε that is added to the estimand.
    """

    estimand: Estimand
    depends_on_gaps: ClassVar[bool] = True
    regularized: ClassVar[bool] = False
    differentiates_alpha: ClassVar[bool] = False
    eps: float = 0.0

    def log_estimate(self, stats: ContrastStats) -> Tensor:
        """Return the mini-batch estimate of ``α``, ``(2, B)``."""
        return log_math.log_add(self.estimand.from_batch(stats), self.eps)

    def pair_factor(self, tau: Tensor) -> Tensor | float:
        """Return the factor of ``w_ij`` in the derivative with respect to ``s_ij``: a number, or ``(2, B)``."""
        return 1.0

    def positive_pair(self, stats: ContrastStats, alpha: Tensor, weight_sum: Tensor) -> Tensor:
        """Return the derivative with respect to ``s_ii``, divided by :meth:`pair_factor`: ``(2, B)``.

        ``weight_sum`` is ``Σ_j w_ij``. The default is correct if :attr:`depends_on_gaps`.
        """
        return -weight_sum

    @abstractmethod
    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        """Return the objective's term of each anchor, ``(2, B)``, without the regularizer."""

    @abstractmethod
    def tau_gradient(
        self, tau: Tensor, alpha: Tensor, batch_to_estimate: Tensor, positive: Tensor, gap: Tensor
    ) -> Tensor:
        """Return the derivative with respect to ``τ_i``, without the regularizer: ``(2, B_local)``.

        Args:
            tau, alpha, batch_to_estimate: temperature, estimated log-normalizer, and ratio as above, of each local anchor,
                ``(2, B_local)``.
            positive: similarity ``s_ii`` of the positive pair, ``(B_local,)`` or ``(2, B_local)``.
            gap: weighted sum ``Σ_j w_ij (s_ij − s_ii)`` over the negatives, ``(2, B_local)``.
        """

    def regularizer(self, rho: float | Tensor) -> float | Tensor:
        """Return the factor of the mean ``τ`` in the regularizer."""
        return 0.0


class FastCLIPObjective(Objective):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 4, 12] with the temperature's gradient of [NeuCLIP 13].

    [13] is the gradient of [12] with ``exp(−α)(ε+g)`` replaced by 1, which is its mean if α is a moving average.
    """

    estimand = NEGATIVES_MEAN
    regularized = True
    differentiates_alpha = True

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return stats.tau * (batch_to_estimate + alpha)

    def tau_gradient(
        self, tau: Tensor, alpha: Tensor, batch_to_estimate: Tensor, positive: Tensor, gap: Tensor
    ) -> Tensor:
        return alpha + 1 - gap / tau

    def regularizer(self, rho: float | Tensor) -> float | Tensor:
        return rho - 1


class NeuCLIPObjective(FastCLIPObjective):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 12] with its exact τ-derivative at constant α instead of [NeuCLIP 13].

    The dependence of α on τ would add ``τ(1 − exp(−α)(ε+g))·∂α/∂τ`` (see ``Estimate.tau_slope``).
    """

    def tau_gradient(
        self, tau: Tensor, alpha: Tensor, batch_to_estimate: Tensor, positive: Tensor, gap: Tensor
    ) -> Tensor:
        return alpha + batch_to_estimate - gap / tau


class Unscaled(Objective):
    """Base class of objectives that depend only on ``(s_ij − s_ii)/τ``, without the factor τ and without a regularizer."""

    def pair_factor(self, tau: Tensor) -> Tensor:
        return tau.reciprocal()

    def tau_gradient(
        self, tau: Tensor, alpha: Tensor, batch_to_estimate: Tensor, positive: Tensor, gap: Tensor
    ) -> Tensor:
        return -gap / tau.square()
