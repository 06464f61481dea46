"""SogCLR: a moving average for each sample instead of the batch's normalizer, with a constant temperature.

Yuan et al., *Provable Stochastic Optimization for Global Contrastive Learning: Small Batch Does Not Harm Performance*,
ICML 2022; Algorithm 34 of [opt4ml], the book section *Discriminative Pretraining of Representation Models*.

- For images with texts, SogCLR uses the moving average of ``fastclip.py`` with a constant γ.
- For two views of each image (``views=2``), as in the paper, ``h`` are projected unit embeddings, and each image has a moving
  average ``u_i ← (1−γ)·u_i + γ·mean_z exp(h_i·z/τ)``, where ``z`` are the views of other images. The loss is the mean of
  ``−h_i·h_i⁺ + τ·log(ε + u_i)``. The gradient of the loss flows through the batch's part of ``u``.

Naive float64 versions: ``tests/references/contrastive.py`` and ``tests/references/two_views.py``. Pages:
``docs/methods/sogclr-isogclr.md``, ``docs/methods/unimodal.md``.

Example:
    >>> loss = openclip_ext.create_loss("sogclr", num_samples=len(dataset))
    >>> terms = loss(image_features, text_features, logit_scale, index=index, output_dict=True)
"""

from typing import Any

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.normalizer import Estimate
from openclip_ext.contrastive.objectives import Estimand, Objective
from openclip_ext.losses.fastclip import MovingAverageNormalizer
from openclip_ext.state.sharded_table import group_log_mean

_UNCENTERED_MEAN = Estimand(
    "log u, where u is the mean of exp(s/τ) over the negatives (the positive pair is not subtracted)",
    from_batch=lambda stats: stats.log_sums - stats.batch.log_negatives,
    log_divisor=lambda stats: stats.batch.log_negatives - stats.positive_exponent,
)


class Decoupled(Objective):
    """``−s_ii + τ·log(ε + u)`` [opt4ml, Algorithm 34]. The coefficient of the positive pair is exactly −1."""

    estimand = _UNCENTERED_MEAN
    depends_on_gaps = False

    def positive_pair(self, stats: ContrastStats, alpha: Tensor, weight_sum: Tensor) -> Tensor:
        return -torch.ones_like(weight_sum)

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return stats.tau * alpha - stats.batch.positive

    def tau_gradient(self, *values: Tensor) -> Tensor:
        raise NotImplementedError("SogCLR's temperature is constant")


class UncenteredMovingAverage(MovingAverageNormalizer):
    """``u_i ← (1−γ)·u_i + γ·mean_z exp(h_i·z/τ)``, ``α = log(ε + u)`` [opt4ml, Algorithm 34].

    Each of an image's two views uses a new ``u`` that contains this view's own estimate. The mean of both new ``u`` is stored.
    """

    estimates = (_UNCENTERED_MEAN,)

    def __init__(self, *, eps: float, **options: Any) -> None:
        super().__init__(**options)
        self.eps = eps

    def step(self, stats: ContrastStats) -> Estimate:
        batch, index = stats.batch, stats.batch.sample_index()
        averaged = self.averaged(stats)
        self.table.write(index, group_log_mean(index, averaged, batch.valid), batch.valid)
        return Estimate(log_math.log_add(averaged, self.eps))

    def predict(self, stats: ContrastStats) -> Estimate:
        return Estimate(log_math.log_add(self.stored(stats), self.eps))
