"""Prototypes that are a queue of recent embeddings, untrained. In none of the papers."""

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue, repeated_block
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.losses.neuclip import estimate_from_prototypes


class QueueNormalizer(Normalizer):
    """NeuCLIP's prediction [10, 11] with the ``m`` most recent samples' embeddings, this batch's included, as prototypes.

    An anchor's own embedding is among them, unless ``leave_own_out``: it makes the estimate too large, and so bounds the
    weights from above.

    With λ > 0 a defensive mixture with the batch, ``exp(α) = (1−λ)·exp(α_queue) + λ·(ε + g)``: it bounds the weights
    ``exp(−α)(ε+g)`` by ``1/λ``. With ``alpha_gradient`` the gradient of both parts reaches the encoders: the queue is then
    a control variate for the batch.

    Args:
        embed_dim: width ``d`` of the embeddings.
        eps: ε.
        prototypes: length ``m`` of the queue.
        batch_weight: λ.
        leave_own_out: average over the queue without the anchor's own embedding, as the exact normalizer does.
        alpha_gradient: let α's gradient reach the encoders.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        eps: float,
        prototypes: int,
        batch_weight: float,
        leave_own_out: bool,
        alpha_gradient: bool,
    ) -> None:
        super().__init__()
        if leave_own_out and prototypes < 2:
            raise ValueError("leave_own_out=True: needs prototypes >= 2, or nothing is left")
        self.eps = eps
        self.batch_weight = batch_weight
        self.leave_own_out = leave_own_out
        self.alpha_gradient = alpha_gradient
        self.ring = EmbeddingQueue(prototypes, embed_dim)

    @torch.no_grad()
    def step(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        own_rows = self.ring.push(block)
        return self._estimate(self.ring.rows, self.ring.multiplicity(), block, own_rows if self.leave_own_out else None)

    @torch.no_grad()
    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`; from the queue as it is, and from this very block while the queue is empty."""
        empty = self.ring.filled == 0
        rows = torch.where(empty, repeated_block(block, self.ring.capacity), self.ring.rows)
        return self._estimate(rows, torch.where(empty, 1, self.ring.multiplicity()), block)

    def _estimate(
        self, rows: Tensor, multiplicity: Tensor, block: GatheredBatch, left_out: Tensor | None = None
    ) -> Estimate:
        directions = torch.nn.functional.normalize(rows, dim=2)
        queue = estimate_from_prototypes(directions, block, self.eps, self.alpha_gradient, multiplicity, left_out)
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
