"""Interface of the estimators of the log-normalizers, and the mini-batch estimate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from openclip_ext.contrastive.batch import Contrast
from openclip_ext.contrastive.estimands import Estimand


@dataclass(frozen=True)
class Estimate:
    """Estimated log-normalizers of a batch, and how they depend on the embeddings where that reaches the encoders.

    Attributes:
        alpha: ``(2, B)``.
        batch_share: λ if ``exp(α)`` contains ``λ·(ε+g)`` of this very batch and the encoders are to know it.
        feature_gradient: takes weights ``(2, B_local)`` of this process's anchors and returns ``Σ weight·∇α``, the rest of
            α's gradient, for this process's images and texts ``(2, B_local, d)``; None: zero, or not used.
    """

    alpha: Tensor
    batch_share: float = 0.0
    feature_gradient: Callable[[Tensor], Tensor] | None = None


class Normalizer(nn.Module):
    """An estimator of the log-normalizers ``α`` and its state.

    Every process calls it with the same contrast and gets the same result, so its state needs no synchronisation. Samples
    that do not count (``batch.valid``) leave no trace in the state. Keyword-only arguments of the constructor are options of
    the loss.

    Attributes:
        estimates: the quantities that it can estimate, as types. A subclass must declare them.
        needs_index: whether it needs ``batch.index``.
        depends_on_epoch: whether schedules of it follow the epoch.
        differentiable: whether its estimate may come with a gradient in the embeddings.
        refuses_labels: why it cannot leave out samples of equal labels; empty: it can.
        contrasts_locally: whether the encoders' loss may contrast each process's own samples only. :meth:`step` is then told
            the global batch where :meth:`fit_due`.
    """

    estimates: ClassVar[tuple[type[Estimand], ...]]
    needs_index: ClassVar[bool] = False
    depends_on_epoch: bool = False
    differentiable: ClassVar[bool] = False
    refuses_labels: ClassVar[str] = ""
    contrasts_locally: bool = False

    def step(self, contrast: Contrast, global_contrast: Contrast | None = None) -> Estimate:
        """Update the state with a training batch and estimate its log-normalizers.

        Args:
            contrast: the samples that the encoders' loss contrasts.
            global_contrast: all processes' samples, only where the normalizer :attr:`contrasts_locally` and :meth:`fit_due`.
        """
        return self.predict(contrast)

    def predict(self, contrast: Contrast) -> Estimate:
        """Estimate log-normalizers from the stored state, which stays as it is."""
        raise NotImplementedError

    def fit_due(self) -> bool:
        """Whether the next :meth:`step` learns from the global batch."""
        return True

    def start_epoch(self, epoch: int) -> None:
        """Called once when epoch ``epoch`` (from 0) begins."""

    def metrics(self, epoch: int) -> dict[str, float]:
        """Numbers for the logs."""
        return {}


class MinibatchNormalizer(Normalizer):
    """The batch's own estimate [NeuCLIP, section 3, mini-batch approximation]. No state.

    It is biased, and what OpenCLIP's loss does in effect: the baseline of every comparison.
    """

    estimates = (Estimand,)

    def predict(self, contrast: Contrast) -> Estimate:
        """``α`` from this batch alone."""
        return Estimate(contrast.log_estimate)
