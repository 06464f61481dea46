"""The quantities that log-normalizers ``α`` estimate.

Objectives differ in what their ``α`` is the logarithm of: the mean over the negatives, or with the positive pair, or not
relative to it. An estimate of one is wrong for another, so each is a type.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import Contrast


class Estimand(ABC):
    """The quantity whose logarithm ``α`` is.

    Attributes:
        formula: for messages.
        includes_positive: whether the positive pair is one of its terms.
    """

    formula: ClassVar[str]
    includes_positive: ClassVar[bool] = False

    @abstractmethod
    def from_batch(self, contrast: Contrast) -> Tensor:
        """The batch's own estimate of ``α``, ``(2, B)``."""

    @abstractmethod
    def log_divisor(self, contrast: Contrast) -> Tensor:
        """Log of the number by which it divides ``Σ_j exp((s_ij − s_ii)/τ_i)``; 0-d or ``(2, B)``."""


class NegativesMean(Estimand):
    """``ε + g_i``, ``g_i`` the mean of ``exp((s_ij − s_ii)/τ)`` over the negatives [NeuCLIP 9].

    Args:
        eps: ε.
    """

    formula = "log(ε + g), the mean over the negatives"

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def from_batch(self, contrast: Contrast) -> Tensor:
        return log_math.log_add(contrast.log_g, self.eps)

    def log_divisor(self, contrast: Contrast) -> Tensor:
        return contrast.batch.log_negatives


class PartitionMean(Estimand):
    """``Z_i·exp(−c·s_ii) = (1 + (B−1)·g_i)/B``: the mean over all ``B`` pairs of an anchor, the positive one included."""

    formula = "log((1 + (B−1)·g)/B), the mean over all pairs, the positive one included"
    includes_positive = True

    def from_batch(self, contrast: Contrast) -> Tensor:
        return contrast.infonce - contrast.batch.log_pairs

    def log_divisor(self, contrast: Contrast) -> Tensor:
        return contrast.batch.log_pairs
