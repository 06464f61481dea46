"""The interface of normalizers (estimators of the log-normalizers), and the mini-batch estimate."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import ContrastStats, LocalBatch, gather_batch
from openclip_ext.contrastive.checks import without_autocast
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN, Estimand
from openclip_ext.contrastive.similarities import Similarities
from openclip_ext.contrastive.temperature import global_temperatures


@dataclass(frozen=True)
class Estimate:
    """Estimated log-normalizers of a batch, and their gradient for the encoders.

    Attributes:
        log_normalizer: ``(2, B)`` log-normalizers ``α``.
        batch_coefficient: Factor λ of the term ``λ·(ε+g)`` of this batch in ``exp(α)``. Gradients flow through this term. 0
            (default) means no such term.
        feature_gradient: Function for the gradient of the other terms of ``α``. It maps weights ``(2, B_local)`` of this
            process's anchors to ``Σ weight·∇α`` for this process's images and texts, ``(2, B_local, d)``. None (default)
            means no gradient.
        tau_slope: ``∂α/∂τ`` of this process's anchors, ``(2, B_local)``. None (default) means that the temperature's gradient
            treats ``α`` as constant.
    """

    log_normalizer: Tensor
    batch_coefficient: float = 0.0
    feature_gradient: Callable[[Tensor], Tensor] | None = None
    tau_slope: Tensor | None = None


class Normalizer(nn.Module):
    """An estimator of the log-normalizers ``α`` and its state.

    Every process calls the normalizer with the same batch and gets the same result, so the state needs no synchronization.
    The loss calls the normalizer under ``torch.no_grad()``.
    Masked samples (``batch.valid`` is False) do not change the state. Keyword-only arguments of the constructor are options of
    the loss.

    Attributes:
        estimates: The supported estimands. None means any estimand. A subclass must declare this attribute.
        needs_index: Whether the normalizer needs ``batch.index``.
        depends_on_epoch: Whether the normalizer has schedules that depend on the epoch.
        differentiable: Whether the estimate can have a gradient with respect to the embeddings.
        contrasts_locally: Whether the encoders' loss compares only each process's own samples. :meth:`step` then updates the
            state with ``stats.all_gather()``. A class sets it to True if an option can enable it.
    """

    estimates: ClassVar[tuple[Estimand, ...] | None]
    needs_index: ClassVar[bool] = False
    depends_on_epoch: bool = False
    differentiable: ClassVar[bool] = False
    contrasts_locally: bool = False

    def step(self, stats: ContrastStats) -> Estimate:
        """Update the state with a training batch, and estimate the batch's log-normalizers."""
        return self.predict(stats)

    def predict(self, stats: ContrastStats) -> Estimate:
        """Estimate a batch's log-normalizers from the stored state, without changing the state."""
        raise NotImplementedError

    def keep_labels(self) -> None:
        """Prepare for batches with labels of equal samples. Called once by a loss with ``equal_captions``."""

    def keep_reference(self, width: int) -> None:
        """Prepare for batches with a guide of this embedding dimension. Called once by a loss with ``mask_margin``."""

    def start_epoch(self, epoch: int) -> None:
        """Start a new epoch. Not called at the start of epoch 0 or after a resume in mid-epoch: read ``batch.epoch`` there."""

    def metrics(self, epoch: int) -> dict[str, float]:
        return {}


class MinibatchNormalizer(Normalizer):
    """The biased mini-batch estimate of OpenCLIP's loss, without state [NeuCLIP, section 3, mini-batch approximation]."""

    estimates = None

    def predict(self, stats: ContrastStats) -> Estimate:
        return Estimate(stats.log_estimate)


@torch.no_grad()
def contrast_minibatch(batch: LocalBatch, gather: bool) -> ContrastStats:
    """Return a batch at the model's temperature, for losses without a normalizer. ``gather``: see :func:`gather_batch`."""
    with without_autocast(batch.image):
        gathered = gather_batch(batch, gather)
        similarities = Similarities(gathered, global_temperatures(gathered))
        return ContrastStats(gathered, similarities.tau, similarities.log_sums(), NEGATIVES_MEAN.from_batch)


def minibatch_metrics(batch: LocalBatch) -> dict[str, float]:
    """Return the metrics of a loss that has no softmax over the batch (SigLIP, CLIP-Lite).

    ``batch`` is the detached batch of the last call. ``infonce`` and ``chance`` are computed only from this process's valid
    samples. Synchronizes with the device.
    """
    temperature = 1 / batch.logit_scale.item()
    metrics = {f"temperature_{name}": temperature for name in ("min", "median", "max")}
    if len(batch.image) < 2:
        return metrics
    stats = contrast_minibatch(batch, gather=False)
    infonce = stats.batch.mean(stats.infonce).mean().item()
    return metrics | {"infonce": infonce, "chance": math.log(max(1, int(stats.batch.valid.sum())))}
