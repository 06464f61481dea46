"""Use this package's losses in ``sentence-transformers``. Each sample's label is the sample's index."""

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from openclip_ext.contrastive.loss import HARD_NEGATIVES, ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.integrations.micro_batches import rows_of
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.integrations.transformers import LossCallback

# Inputs with one row per sample: of texts and images. SigLIP's texts have no mask.
_ROWS = ("attention_mask", "pixel_values", "input_ids")


class GlobalContrastiveLoss(nn.Module):
    """A global contrastive loss for pairs of texts, or of images and texts. Both sides of a pair are anchors.

    A model with a ``logit_scale`` (CLIP, SigLIP) is trained with this temperature, and with its ``logit_bias``, as in
    :class:`ModelLoss`. For other models, this class has a temperature.

    Args:
        loss: Loss from ``openclip_ext.create_loss``.
        scale: Initial ``1/τ``, if neither the model nor the loss has an initial temperature.
        micro_batch_size: Number of texts or images with activations in memory at a time. Each is embedded twice (GradCache,
            Gao et al. 2021). The loss and its gradient do not change. None (default) embeds the full batch at once.

    Example:
        >>> train = with_index(pairs).rename_column("index", "label")  # two columns: texts, or images and texts
        >>> contrastive = openclip_ext.create_loss("fastclip", embed_dim=256, num_samples=len(train))
        >>> loss = GlobalContrastiveLoss(model, contrastive)
        >>> arguments = SentenceTransformerTrainingArguments(folder, learning_rate_mapping=loss.learning_rates())
        >>> SentenceTransformerTrainer(
        ...     model, arguments, train_dataset=train, loss=loss, callbacks=[loss.callback()]
        ... ).train()
    """

    def __init__(
        self,
        model: SentenceTransformer,
        loss: ContrastiveLoss,
        scale: float = 20.0,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.micro_batch_size = micro_batch_size
        towers = (part for part in model.modules() if isinstance(getattr(part, LOGIT_SCALE, None), nn.Parameter))
        tower = next(towers, None)
        self.logit_scale = nn.Parameter(torch.tensor(scale).log()) if tower is None else tower.logit_scale
        self.logit_bias = getattr(tower, "logit_bias", None)
        # A temperature of this class has no trained value.
        self.model_loss = ModelLoss(loss, self, averages=False, is_trained=False if tower is None else None)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Return the loss of a batch, 0-d.

        Args:
            sentence_features: Two columns of texts or images, preprocessed, and optionally a third with hard negatives of the
                first column. They are additional negatives of its anchors.
            labels: Indices ``(B_local,)`` of the samples, if the loss needs them.
        """
        embeddings = [normalize(self._embed(features), dim=-1) for features in sentence_features]
        if len(embeddings) not in (2, 3):
            raise ValueError(
                f"expected two columns, or three with hard negatives, found {len(embeddings)}: remove columns"
            )
        outputs = dict(zip(("image_features", "text_features", HARD_NEGATIVES), embeddings, strict=False))
        outputs["logit_scale"] = self.logit_scale.exp()
        if self.logit_bias is not None:
            outputs["logit_bias"] = self.logit_bias
        return self.model_loss(outputs, labels, training=self.model.training)

    def _embed(self, features: dict[str, Tensor]) -> Tensor:
        def embed(part: dict[str, Any]) -> Tensor:
            return self.model(part)["sentence_embedding"]

        if self.micro_batch_size is None:
            return embed(features)
        named = (features[name] for name in _ROWS if name in features and "cu_seq_lens_q" not in features)
        rows = next((value for value in named if value.ndim > 1), None)
        if rows is None:  # the texts of a batch are joined into one row
            raise ValueError("micro_batch_size needs inputs with one row per sample: remove micro_batch_size")
        count = len(rows)
        parts = (
            {name: rows_of(value, first, self.micro_batch_size, count) for name, value in features.items()}
            for first in range(0, count, self.micro_batch_size)
        )
        return torch.cat([checkpoint(embed, part, use_reentrant=False) for part in parts])

    def callback(self) -> LossCallback:
        """Return a callback for the trainer. It sets the epoch, bounds the temperature, and saves the loss's state."""
        return LossCallback(self.model_loss)

    def learning_rates(self) -> dict[str, float]:
        """Return the training argument ``learning_rate_mapping``: the temperature's learning rate, if the loss sets it."""
        rate = self.model_loss.loss.logit_scale_lr
        return {} if rate is None else {r"^logit_scale$": rate}
