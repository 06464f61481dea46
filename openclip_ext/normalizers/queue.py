"""Prototypes that are a queue of recent embeddings, untrained. In none of the papers."""

import torch
from torch import Tensor

from openclip_ext.losses import functional as F
from openclip_ext.losses.block import Block
from openclip_ext.normalizers.base import Estimate, Normalizer
from openclip_ext.normalizers.prototypes import estimate_from_prototypes
from openclip_ext.normalizers.ring import EmbeddingRing, repeated_block


class QueueNormalizer(Normalizer):
    """NeuCLIP's prediction [10, 11] with the ``m`` most recent samples' embeddings, this batch's included, as prototypes.

    With λ > 0 a defensive mixture with the batch, ``exp(α) = (1−λ)·exp(α_queue) + λ·(ε + g)``: it bounds the weights
    ``exp(−α)(ε+g)`` by ``1/λ``. With ``alpha_gradient`` the gradient of both parts reaches the encoders: the queue is then
    a control variate for the batch.

    Args:
        embed_dim: width ``d`` of the embeddings.
        eps: ε.
        prototypes: length ``m`` of the queue.
        batch_weight: λ.
        alpha_gradient: let α's gradient reach the encoders.
    """

    def __init__(
        self, *, embed_dim: int, eps: float, prototypes: int, batch_weight: float, alpha_gradient: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.batch_weight = batch_weight
        self.alpha_gradient = alpha_gradient
        self.ring = EmbeddingRing(prototypes, embed_dim)

    @torch.no_grad()
    def step(self, block: Block) -> Estimate:
        """See :class:`Normalizer`."""
        self.ring.push(block)
        return self._estimate(self.ring.rows, self.ring.log_multiplicity(), block)

    @torch.no_grad()
    def predict(self, block: Block) -> Estimate:
        """See :class:`Normalizer`; from the queue as it is, and from this very block while the queue is empty."""
        empty = self.ring.filled == 0
        rows = torch.where(empty, repeated_block(block, self.ring.capacity), self.ring.rows)
        return self._estimate(rows, torch.where(empty, 0, self.ring.log_multiplicity()), block)

    def _estimate(self, rows: Tensor, log_multiplicity: Tensor, block: Block) -> Estimate:
        directions = torch.nn.functional.normalize(rows, dim=2)
        queue = estimate_from_prototypes(directions, block, self.eps, self.alpha_gradient, log_multiplicity)
        queue_alpha = block.gather_own(queue.alpha)
        alpha = F.log_mix(queue_alpha, block.log_estimate, self.batch_weight)
        if not self.alpha_gradient:
            return Estimate(alpha)
        queue_share = (1 - self.batch_weight) * F.saturating_exp(queue_alpha - alpha)[:, block.own]
        return Estimate(
            alpha,
            batch_share=self.batch_weight,
            feature_gradient=lambda weights: queue.feature_gradient(weights * queue_share, block),
        )
