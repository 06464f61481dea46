"""Uni-modal losses: two augmented views of each image are contrasted with all other views, and with no text.

SimCLR: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020. SogCLR: Yuan et
al., "Provable Stochastic Optimization for Global Contrastive Learning", ICML 2022, here after Algorithm 34 of the chapter
"Discriminative Pretraining of Representation Models".
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch, LocalBatch
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.loss import ContrastiveLoss, without_autocast
from openclip_ext.contrastive.normalizer import Estimate, MinibatchNormalizer, Normalizer
from openclip_ext.contrastive.objectives import Decoupled, InfoNce, Surrogate
from openclip_ext.contrastive.seeding import generator, linear
from openclip_ext.contrastive.temperature import ConstantTemperature
from openclip_ext.losses.fastclip import MovingAverageNormalizer
from openclip_ext.state.sharded_table import log_mean_of_equal


class Projector(nn.Module):
    """SimCLR's projection head, ``Linear(ReLU(Linear x))``: the loss sees its output, evaluations its input.

    Args:
        embed_dim: width of the embeddings.
        projection_dim: width of the output.
        seed: of the start values.
    """

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
        """``(B, embed_dim)`` to ``(B, projection_dim)``."""
        return self.layers(features)


class DynamicNormalizer(MovingAverageNormalizer):
    """``u_i ← (1−γ)·u_i + γ·mean_z exp(h_i·z/τ)``, ``α = log(ε + u)`` [the chapter, Algorithm 34].

    Each view's anchor uses the ``u`` with its own batch estimate; what is kept of an image is the mean of its views'.

    Args:
        eps: ε.
        num_samples, gamma, ...: see :class:`MovingAverageNormalizer`.
    """

    def __init__(self, *, eps: float, **options: Any) -> None:
        super().__init__(**options)
        self.eps = eps

    @torch.no_grad()
    def step(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        averaged = F.log_mix(self._stored(block), block.log_estimate, self.gamma(block.epoch))
        self.table.write(block.index, log_mean_of_equal(block.index, averaged, block.valid), block.valid)
        return Estimate(F.log_add(averaged, self.eps))

    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        return Estimate(F.log_add(self._stored(block), self.eps))


class TwoViewLoss(ContrastiveLoss):
    """A global contrastive loss of ``2·B`` views: each is an anchor, its image's other view the positive.

    The negatives of an anchor are the ``2·(B−1)`` views of all other images. That is a :class:`GlobalContrastiveLoss` of
    ``2·B`` pairs, the first views against the second ones and the second against the first, in which an anchor's own
    embedding does not count; an image's two anchors share its index.

    Args:
        surrogate, normalizer: parts of the loss.
        embed_dim: width of the embeddings.
        num_samples: size of the index space, where the normalizer needs the index.
        projection_dim: width of the projector's output; None: that of the embeddings.
        temperature: τ, constant; None: the model's.
        seed: of the projector's start values.
    """

    views = 2
    learns_logit_scale = False

    def __init__(
        self,
        surrogate: Surrogate,
        normalizer: Normalizer,
        embed_dim: int,
        num_samples: int | None,
        projection_dim: int | None,
        temperature: float | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.projector = Projector(embed_dim, projection_dim or embed_dim, seed)
        scheme = ConstantTemperature(temperature=temperature)
        self.contrast = GlobalContrastiveLoss(surrogate, normalizer, scheme, None, num_samples, views=2)
        self.needs_index = self.contrast.needs_index
        self.initial_logit_scale = scheme.initial_logit_scale

    def model_head(self) -> Projector:
        """See :class:`ContrastiveLoss`."""
        return self.projector

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """See :class:`ContrastiveLoss`."""
        first, second = self._projected(batch)
        index = self._index_of_both(batch)
        self.contrast.train(self.training)
        return self.contrast(*_as_pairs(first, second), batch.logit_scale, index=index, output_dict=True)

    @torch.no_grad()
    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`ContrastiveLoss`. For SogCLR ``log(ε + u)`` as stored, for SimCLR the batch's own."""
        with without_autocast(image_features):
            batch = self._batch(image_features, text_features, logit_scale, index)
            pairs = _as_pairs(*self._projected(batch))
            alpha, _ = self.contrast.log_normalizers(*pairs, batch.logit_scale, index=self._index_of_both(batch))
        return alpha[: len(image_features)], alpha[len(image_features) :]

    def _projected(self, batch: LocalBatch) -> tuple[Tensor, Tensor]:
        """The projections of both views, unit norm; NaN where an image does not count."""
        views = (batch.image, batch.text)
        valid = torch.isfinite(batch.image).all(dim=1, keepdim=True) & torch.isfinite(batch.text).all(
            dim=1, keepdim=True
        )
        first, second = (
            torch.where(valid, self._project(torch.where(valid, view.to(batch.dtype), 0)), torch.nan) for view in views
        )
        return first, second

    def _project(self, features: Tensor) -> Tensor:
        return functional.normalize(self.projector(features), dim=1)

    def prefetch(self, index: Tensor) -> None:
        """See :class:`ContrastiveLoss`."""
        super().prefetch(index.repeat(2))

    def _index_of_both(self, batch: LocalBatch) -> Tensor | None:
        return self.contrast.check_index(batch.index, batch.image).repeat(2) if self.needs_index else None

    def start_epoch(self, epoch: int) -> None:
        """See :class:`ContrastiveLoss`."""
        super().start_epoch(epoch)
        self.contrast.start_epoch(epoch)

    def metrics(self) -> dict[str, float]:
        """See :meth:`GlobalContrastiveLoss.metrics`; ``chance`` is the logarithm of the ``2·B − 1`` candidates."""
        return self.contrast.metrics()

    def pop_nonfinite(self) -> list[tuple[int, list[int]]]:
        """See :class:`ContrastiveLoss`."""
        self.contrast.pop_nonfinite()  # raises for an index out of range
        return super().pop_nonfinite()


def _as_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([first, second]), torch.cat([second, first])


class SimClrLoss(TwoViewLoss):
    """SimCLR's InfoNCE (NT-Xent): the mean over all ``2·B`` views of the cross-entropy of finding the other view.

    Args:
        views: 2.
        embed_dim, projection_dim, temperature, seed: see :class:`TwoViewLoss`.
    """

    def __init__(
        self, *, embed_dim: int, projection_dim: int | None, temperature: float | None, views: int, seed: int
    ) -> None:
        if views != 2:
            raise ValueError(
                f"views={views}: simclr compares two views of each image; take openclip for images and texts"
            )
        super().__init__(InfoNce(), MinibatchNormalizer(), embed_dim, None, projection_dim, temperature, seed)


class DynamicContrastiveLoss(TwoViewLoss):
    """SogCLR on images alone: ``mean −h_i·h_i⁺ + τ·log(ε + u_i)``, ``u`` a moving average for each image [Algorithm 34].

    Args:
        views: 2.
        eps: ε.
        embed_dim, num_samples, projection_dim, temperature, seed: see :class:`TwoViewLoss`.
        gamma, gamma_schedule, gamma_decay_epochs, epochs, state_device, state_dir: see :class:`MovingAverageNormalizer`.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_samples: int,
        projection_dim: int | None,
        temperature: float | None,
        views: int,
        seed: int,
        eps: float,
        gamma: float,
        gamma_schedule: str,
        gamma_decay_epochs: int | None,
        epochs: int,
        state_device: str,
        state_dir: str | None,
    ) -> None:
        if views != 2:
            raise ValueError(f"views={views}: this is SogCLR of two views of each image")
        normalizer = DynamicNormalizer(
            eps=eps,
            num_samples=num_samples,
            gamma=gamma,
            gamma_schedule=gamma_schedule,
            gamma_decay_epochs=gamma_decay_epochs,
            epochs=epochs,
            state_device=state_device,
            state_dir=state_dir,
        )
        super().__init__(Decoupled(eps=eps), normalizer, embed_dim, num_samples, projection_dim, temperature, seed)
