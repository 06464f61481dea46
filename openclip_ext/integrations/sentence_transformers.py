"""Use this package's losses in ``sentence-transformers``. Each sample's label is the sample's index."""

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.integrations.micro_batches import rows_of
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.integrations.transformers import LossCallback


class GlobalContrastiveLoss(nn.Module):
    """A global contrastive loss for pairs of texts. Both texts of a pair are anchors.

    Args:
        loss: Loss from ``openclip_ext.create_loss``.
        scale: Initial ``1/τ``, if the loss does not set an initial temperature.
        micro_batch_size: Number of texts with activations in memory at a time. Each text is embedded twice (GradCache, Gao et
            al. 2021). The loss and its gradient do not change. None (default) embeds the full batch at once.

    Example:
        >>> train = with_index(pairs).rename_column("index", "label")  # two columns of texts
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
        self.logit_scale = nn.Parameter(torch.tensor(scale).log())
        self.model_loss = ModelLoss(loss, self, averages=False, is_trained=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Return the loss of a batch, 0-d.

        Args:
            sentence_features: The two columns of texts, tokenized.
            labels: Indices ``(B_local,)`` of the samples, if the loss needs them.
        """
        embeddings = [normalize(self._embed(features), dim=-1) for features in sentence_features]
        if len(embeddings) != 2:
            raise ValueError(
                f"expected two columns of texts, found {len(embeddings)}: remove columns of hard negatives"
            )
        first, second = embeddings
        outputs = {"image_features": first, "text_features": second, "logit_scale": self.logit_scale.exp()}
        return self.model_loss(outputs, labels, training=self.model.training)

    def _embed(self, features: dict[str, Tensor]) -> Tensor:
        def embed(part: dict[str, Any]) -> Tensor:
            return self.model(part)["sentence_embedding"]

        if self.micro_batch_size is None:
            return embed(features)
        if "attention_mask" not in features:
            raise ValueError(
                "micro_batch_size needs inputs with an attention_mask, found none: remove micro_batch_size"
            )
        count = len(features["attention_mask"])
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
