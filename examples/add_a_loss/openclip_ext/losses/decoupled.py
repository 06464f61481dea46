"""Decoupled contrastive learning (Yeh et al., ECCV 2022) over the mini-batch."""

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import Contrast
from openclip_ext.contrastive.objectives import Estimand, Unscaled
from openclip_ext.losses.method import Method


class DecoupledContrastive(Unscaled):
    """``−s_ii/τ + log Σ_{j≠i} exp(s_ij/τ)``."""

    estimand = Estimand(
        "log(N·g), the sum over the negatives",
        from_batch=lambda contrast: contrast.log_gap_sums,
        log_divisor=lambda contrast: torch.zeros_like(contrast.tau),
    )

    def value(self, contrast: Contrast, alpha: Tensor, weight_ratio: Tensor) -> Tensor:
        return alpha


METHOD = Method(name="decoupled", normalizer="minibatch", temperature_scheme="global", objective=DecoupledContrastive)
