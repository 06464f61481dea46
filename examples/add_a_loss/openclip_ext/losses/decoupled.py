"""Decoupled contrastive learning (Yeh et al., ECCV 2022) over the mini-batch."""

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import BatchAtTemperature
from openclip_ext.contrastive.objectives import Estimand, Unscaled
from openclip_ext.losses.method import Composed
from openclip_ext.losses.options import Minibatch, Unregularized


class DecoupledContrastive(Unscaled):
    """The loss ``−s_ii/τ + log Σ_{j≠i} exp(s_ij/τ)`` of anchor i: the sum excludes the positive pair."""

    estimand = Estimand(
        "log(N·g), the sum over the negatives",
        from_batch=lambda batch_at_tau: batch_at_tau.log_gap_sums,
        log_divisor=lambda batch_at_tau: torch.zeros_like(batch_at_tau.tau),
    )

    def value(self, batch_at_tau: BatchAtTemperature, alpha: Tensor, weight_ratio: Tensor) -> Tensor:
        return alpha


METHOD = Composed("decoupled", Minibatch(), Unregularized(), objective=DecoupledContrastive)
