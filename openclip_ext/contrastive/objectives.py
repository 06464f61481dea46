"""What is minimized once the log-normalizers ``α`` are given, and what these are of.

Every objective is ``L = ½ Σ_k mean_i value_k,i + regularizer(ρ)`` with ``α`` constant, over weights
``w_ij = exp((s_ij − s_ii)/τ_i − α_i)/divisor``. Objectives differ in a factor, in the positive pair and in the gradient of
the temperature. The gradient defines an objective; its value is for the logs.

An objective declares the quantity that its ``α`` estimates and whether it has a regularizer ``ρ``; :func:`incompatibility`
checks both against a normalizer and a temperature scheme. Equation numbers in [brackets] are the papers'.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from openclip_ext.contrastive.batch import Contrast
from openclip_ext.contrastive.estimands import Estimand, NegativesMean
from openclip_ext.contrastive.normalizer import Normalizer
from openclip_ext.contrastive.temperature import TemperatureScheme


@dataclass(frozen=True)
class Anchors:
    """Per-anchor quantities of both sides, ``(2, N)`` each.

    All are finite where a sample does not count, and so must be what an objective makes of them: a weight of 0 removes it.

    Attributes:
        tau: temperature.
        alpha: estimated log-normalizer.
        log_g: log of the mean over the negatives.
        weight_ratio: ``exp(log_estimate − α)``; 1 where α agrees with the batch.
        positive: ``s_ii``, ``(N,)``.
        negatives: number of negatives of each anchor, 0-d or ``(N,)``.
        weighted_gap: ``Σ_j w_ij (s_ij − s_ii)``, or None where no temperature needs a gradient.
    """

    tau: Tensor
    alpha: Tensor
    log_g: Tensor
    weight_ratio: Tensor
    positive: Tensor
    negatives: Tensor
    weighted_gap: Tensor | None = None

    def gap(self) -> Tensor:
        """:attr:`weighted_gap`, where a temperature needs a gradient."""
        assert self.weighted_gap is not None, "asked for only where a temperature is learned"
        return self.weighted_gap


class Objective(ABC):
    """What is minimized for given log-normalizers.

    A subclass declares both class attributes; a class without them cannot be part of a loss.

    Args:
        estimand: an :attr:`estimand_type`.

    Attributes:
        estimand_type: what ``α`` estimates.
        regularized: whether it has a regularizer, so that ``ρ`` means anything.
        differentiates_alpha: whether its derivative in ``α`` is ``τ(1 − weight_ratio)``, so that the gradient of an estimate
            may reach the encoders.
    """

    estimand_type: ClassVar[type[Estimand]]
    regularized: ClassVar[bool]
    differentiates_alpha: ClassVar[bool] = False

    def __init__(self, estimand: Estimand) -> None:
        assert isinstance(estimand, self.estimand_type)
        self.estimand = estimand

    def pair_factor(self, tau: Tensor) -> Tensor | float:
        """Factor of ``w_ij`` in the derivative in ``s_ij``: one, or one for each anchor, ``(2, B)``."""
        return 1.0

    def positive_pair(self, anchors: Anchors, weight_sum: Tensor, contrast: Contrast) -> Tensor:
        """Derivative in ``s_ii`` over :meth:`pair_factor`, ``(2, B)``.

        That of a value that depends on the gaps ``s_ij − s_ii`` only.

        Args:
            anchors: of both sides.
            weight_sum: ``Σ_j w_ij``, ``(2, B)``.
            contrast: the samples.
        """
        return -weight_sum

    @abstractmethod
    def value(self, anchors: Anchors) -> Tensor:
        """Value without the regularizer, per anchor."""

    @abstractmethod
    def tau_gradient(self, anchors: Anchors) -> Tensor:
        """Derivative in ``τ_i`` without the regularizer, per anchor."""

    def regularizer(self, rho: float) -> float:
        """Factor of ``mean τ`` in the regularizer."""
        return 0.0


class Contrastive(Objective):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 4, 12] with the temperature's gradient of [NeuCLIP 13].

    [13] is [12] with ``exp(−α)(ε+g)`` taken as 1, which holds where α is a moving average that follows ``log(ε+g)``.

    Args:
        eps: ε.
    """

    estimand_type = NegativesMean
    regularized = True
    differentiates_alpha = True

    def __init__(self, *, eps: float) -> None:
        super().__init__(NegativesMean(eps))

    def value(self, anchors: Anchors) -> Tensor:
        return anchors.tau * (anchors.weight_ratio + anchors.alpha)

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        return anchors.alpha + 1 - anchors.gap() / anchors.tau

    def regularizer(self, rho: float) -> float:
        return rho - 1


class Unified(Contrastive):
    """``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 12], read literally for the temperature, too."""

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        return anchors.alpha + anchors.weight_ratio - anchors.gap() / anchors.tau


class Unscaled(Objective):
    """Base of objectives of the gaps over τ that are not multiplied by τ, without a regularizer."""

    regularized = False

    def pair_factor(self, tau: Tensor) -> Tensor:
        return tau.reciprocal()

    def tau_gradient(self, anchors: Anchors) -> Tensor:
        return -anchors.gap() / anchors.tau.square()


def incompatibility(
    objective: type[Objective], normalizer: type[Normalizer], temperature: type[TemperatureScheme]
) -> str | None:
    """Why these parts make no loss, or None if they do."""
    for declared in ("estimand_type", "regularized"):
        if not hasattr(objective, declared):
            return f"{objective.__name__} does not declare {declared}"
    estimand = objective.estimand_type
    if not issubclass(estimand, normalizer.estimates):
        offered = " or ".join(kind.formula for kind in normalizer.estimates)
        return f"the objective needs an estimate of {estimand.formula}; this normalizer estimates {offered}"
    if normalizer.differentiable and not objective.differentiates_alpha:
        return "the objective takes α as a constant; this normalizer's gradient may reach the encoders"
    if temperature.regularized and not objective.regularized:
        return "the objective has no regularizer, and these temperatures are learned with one"
    if normalizer.contrasts_locally and (temperature.learns_own or temperature.solves):
        return "this normalizer's objective may stay in each process, and these temperatures come from the global batch"
    return None
