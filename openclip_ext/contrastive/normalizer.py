"""What every estimator of the log-normalizers is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import GatheredBatch


@dataclass
class Estimate:
    """Estimated log-normalizers of a block, and how they depend on the embeddings where that reaches the encoders.

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

    Every process calls it with the same block and gets the same result, so that its state needs no synchronisation.
    Samples that do not count (``block.valid``) leave no trace in the state.

    Attributes:
        needs_index: whether ``block.index`` must be there.
    """

    needs_index = False

    def step(self, block: GatheredBatch) -> Estimate:
        """Update the state with a training batch and estimate its log-normalizers."""
        return self.predict(block)

    def predict(self, block: GatheredBatch) -> Estimate:
        """Estimate a block's log-normalizers from the stored state, which stays as it is."""
        raise NotImplementedError

    def start_epoch(self, epoch: int) -> None:
        """Be told that epoch ``epoch`` (from 0) begins; called once for each."""

    def metrics(self, epoch: int) -> dict[str, float]:
        """Numbers for the logs."""
        return {}


def batch_estimate_where_missing(stored: Tensor, block: GatheredBatch) -> Tensor:
    """``stored`` ``(2, B)``, and the batch's own estimate where it is NaN."""
    return torch.where(torch.isnan(stored), block.log_estimate, stored)


class MinibatchNormalizer(Normalizer):
    """``α_i = log(ε + g_i(batch))`` (NeuCLIP, section 3, mini-batch approximation). No state."""

    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        return Estimate(block.log_estimate)
