"""SimCLR: two augmented views of each image, compared with all other views of the batch, without texts.

Chen et al., *A Simple Framework for Contrastive Learning of Visual Representations*, ICML 2020. ``h`` are the projected unit
embeddings of the ``2·B`` views. The loss (NT-Xent) is the mean over all views of::

    −log( exp(h_i·h_i⁺/τ) / (exp(h_i·h_i⁺/τ) + Σ_{z: other images' views} exp(h_i·z/τ)) )

Naive float64 version: ``tests/references/two_views.py``. Page: ``docs/methods/unimodal.md``.

Example:
    >>> loss = openclip_ext.create_loss("simclr", embed_dim=512)
    >>> terms = loss(first_view_features, second_view_features, logit_scale, output_dict=True)
    >>> parameters += loss.model_head().parameters()  # the projector is trained with the model
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext import distributed
from openclip_ext.contrastive.batch import ContrastStats, LocalBatch, all_finite
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.normalizer import Normalizer
from openclip_ext.contrastive.objectives import Estimand, Objective, Unscaled
from openclip_ext.contrastive.seeding import generator, linear
from openclip_ext.contrastive.temperature import TemperatureScheme


class Projector(nn.Module):
    """SimCLR's projection head, ``Linear(ReLU(Linear x))``. The loss uses its output. Evaluations do not use the head."""

    kind = "projector"
    evaluated = False

    def __init__(self, embed_dim: int, projection_dim: int, seed: int = 0) -> None:
        super().__init__()
        self.config = {"embed_dim": embed_dim, "projection_dim": projection_dim}
        random = generator("cpu", seed, "projector")
        self.layers = nn.Sequential(
            linear(embed_dim, embed_dim, True, random), nn.ReLU(), linear(embed_dim, projection_dim, True, random)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the projections ``(B, projection_dim)`` of embeddings ``(B, embed_dim)``."""
        return self.layers(features)


class TwoViewLoss(GlobalContrastiveLoss):
    """A global contrastive loss of ``2·B`` views. The positive of each view is the other view of the same image.

    The pairs are first views with second views, and second views with first views. So each view is an anchor on both sides.
    The views of an image have the image's index and one label. So the negatives of an anchor are the ``2·(B−1)`` views of all
    other images, and the pair of an anchor with itself is masked.
    """

    expects_unit_norm = False
    views = 2

    def __init__(
        self,
        objective: Objective,
        normalizer: Normalizer,
        scheme: TemperatureScheme,
        num_samples: int | None = None,
        *,
        embed_dim: int,
        projection_dim: int | None,
        seed: int,
    ) -> None:
        super().__init__(objective, normalizer, scheme, embed_dim, num_samples)
        self.projector = Projector(embed_dim, projection_dim or embed_dim, seed)

    def model_head(self) -> Projector:
        """Return the projector, which the optimizer trains. Evaluations do not use it."""
        return self.projector

    def _batch(self, *inputs: Any, **options: Any) -> LocalBatch:
        """Return the pairs of projected views, after a check of the inputs. If one is not finite, all results are NaN."""
        batch = super()._batch(*inputs, **options)
        size = len(batch.image)
        if size < 2:
            raise ValueError("a contrastive loss needs at least 2 images, found 1: increase the batch size")
        finite = all_finite(torch.stack([batch.image, batch.text]).detach())
        first, second = (
            torch.where(finite, self._project(torch.where(finite, view.to(batch.dtype), 0)), torch.nan)
            for view in (batch.image, batch.text)
        )
        image, text = torch.cat([first, second]), torch.cat([second, first])
        index = None if batch.index is None else batch.index.repeat(2)
        labels = torch.arange(size, device=image.device).repeat(2) + size * distributed.rank()
        return replace(batch, image=image, text=text, index=index, labels=labels)

    def _project(self, features: Tensor) -> Tensor:
        return functional.normalize(self.projector(features), dim=1)

    def log_normalizers(self, image_features: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return the predicted log-normalizers of the first views and of the second views."""
        alpha, _ = super().log_normalizers(image_features, *others, **named)
        return alpha[: len(image_features)], alpha[len(image_features) :]


_CROSS_ENTROPY = Estimand(
    "log(1 + N·g), the cross-entropy",
    from_batch=lambda stats: stats.infonce,
    log_divisor=lambda stats: torch.zeros_like(stats.tau),
)


class InfoNce(Unscaled):
    """NT-Xent: ``log(1 + N·g)`` over the ``N`` negatives in the batch, without the factor τ.

    ``α`` is the loss itself, so the weights of the negatives are their softmax.
    """

    estimand = _CROSS_ENTROPY

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return alpha
