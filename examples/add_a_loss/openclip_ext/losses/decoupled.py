"""Decoupled contrastive learning (Yeh et al., ECCV 2022) over the mini-batch."""

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.objectives import Estimand, Unscaled
from openclip_ext.losses.method import Composed
from openclip_ext.losses.options import Minibatch, Unregularized


class DecoupledContrastive(Unscaled):
    """The loss ``−s_ii/τ + log Σ_{j≠i} exp(s_ij/τ)`` of anchor i: the sum excludes the positive pair."""

    estimand = Estimand(
        "log(N·g), the sum over the negatives",
        from_batch=lambda stats: stats.log_sum_negatives,
        log_divisor=lambda stats: torch.zeros_like(stats.tau),
    )

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return alpha


METHOD = Composed("decoupled", Minibatch(), Unregularized(), objective=DecoupledContrastive)
