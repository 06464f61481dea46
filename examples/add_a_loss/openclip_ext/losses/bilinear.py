"""A logistic loss on a learned bilinear form of image and text embeddings. Each process uses only its own samples."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import minibatch_metrics
from openclip_ext.contrastive.seeding import generator, linear
from openclip_ext.losses.method import Method
from openclip_ext.losses.options import Seed


class BilinearHead(nn.Module):
    """The learned matrix A, as a head that maps an image embedding to ``A·image``."""

    kind = "bilinear"
    evaluated = False

    def __init__(self, embed_dim: int, seed: int = 0) -> None:
        super().__init__()
        self.config = {"embed_dim": embed_dim}
        self.layer = linear(embed_dim, embed_dim, False, generator("cpu", seed, "bilinear"))

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


class BilinearLoss(ContrastiveLoss):
    """The loss ``mean_ij softplus(∓ c·text_j·A·image_i)``: minus if i = j (a pair), otherwise plus; c is the logit scale.

    Args:
        embed_dim: embedding dimension.
        seed: seed of the initial values of A.
    """

    def __init__(self, *, embed_dim: int, seed: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.head = BilinearHead(embed_dim, seed)
        self._last: LocalBatch | None = None

    def model_head(self) -> BilinearHead:
        """Return the head with A, which is trained and saved with the model."""
        return self.head

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        images, texts = self.head(batch.image.to(batch.dtype)), batch.text.to(batch.dtype)
        logits = batch.logit_scale.to(batch.dtype) * images @ texts.T
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
        self._last = batch.detached()
        return {"contrastive_loss": functional.softplus(-signs * logits).mean()}

    def metrics(self) -> dict[str, float]:
        """Return ``infonce``, ``chance`` and the temperature, as every loss does."""
        return {} if self._last is None else minibatch_metrics(self._last)


@dataclass(frozen=True)
class Bilinear(Seed, Method):
    """The loss, its option ``seed`` and its head."""

    module = BilinearLoss
    needs = ("embed_dim",)
    head = BilinearHead


METHOD = Bilinear("bilinear")
