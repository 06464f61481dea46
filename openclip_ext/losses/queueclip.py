"""queueclip: NeuCLIP with a queue of recent embeddings instead of trained prototypes. There is no paper.

The embeddings of the ``m`` most recent samples, including the batch, replace NeuCLIP's prototypes. The queue's estimate is
mixed with the batch's own estimate, which has the share λ (a defensive mixture)::

    α_queue,i = log( ε + (1/m) Σ_j exp((s_ij − s_ii)/τ) ),   j over the queue
    exp(α_i)  = (1−λ)·exp(α_queue,i) + λ·(ε + g_i)

Because of the batch's share, the weights ``exp(−α)(ε+g)`` are at most ``1/λ``. The gradients of both parts of ``α`` flow to
the encoders. The coefficients of ``∇log g_batch`` and ``∇log g_queue`` sum to one, so the queue is a control variate for the
batch.

Naive float64 version: ``QueueClip`` in ``tests/references/prototypes.py``. Page: ``docs/methods/queueclip.md``.

Example:
    >>> loss = openclip_ext.create_loss("queueclip", embed_dim=512, prototypes=4096)
    >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
    >>> sum(terms.values()).backward()
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue, repeated_batch
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN
from openclip_ext.contrastive.steering import blocks, normalize_blocks
from openclip_ext.losses.neuclip import estimate_from_prototypes


class QueueNormalizer(Normalizer):
    """NeuCLIP's formula [NeuCLIP 10, 11] with the queue as prototypes, mixed with the batch's estimate.

    If ``leave_own_out`` is False, the queue contains the anchor's positive pair. The positive pair makes the estimate too
    large, which also limits the weights.
    """

    estimates = (NEGATIVES_MEAN,)
    differentiable = True

    def __init__(
        self,
        *,
        embed_dim: int,
        reference_dim: int,
        eps: float,
        prototypes: int,
        batch_weight: float,
        leave_own_out: bool,
        alpha_gradient: bool,
    ) -> None:
        super().__init__()
        if leave_own_out and prototypes < 2:
            raise OptionError("leave_own_out", "leave_own_out=True needs prototypes >= 2")
        self.eps = eps
        self.batch_weight = batch_weight
        self.leave_own_out = leave_own_out
        self.alpha_gradient = alpha_gradient
        self.queue = EmbeddingQueue(prototypes, embed_dim)
        self.blocks = blocks(reference_dim)

    def keep_labels(self) -> None:
        self.queue.keep_labels()

    def keep_reference(self, width: int) -> None:
        self.queue.keep_reference(width)

    def step(self, stats: ContrastStats) -> Estimate:
        excluded = self.queue.excluded(stats.batch, self.leave_own_out)
        self.queue.push(stats.batch)
        return self._estimate(self.queue.rows, self.queue.multiplicity(), stats, excluded)

    def predict(self, stats: ContrastStats) -> Estimate:
        """Estimate log-normalizers from the stored queue and this batch. An empty queue is replaced by this batch.

        All samples of the queue count, also those with a label of the anchor.
        """
        empty = self.queue.filled == 0
        rows = torch.where(empty, repeated_batch(stats.batch, self.queue.capacity), self.queue.rows)
        return self._estimate(rows, torch.where(empty, 1, self.queue.multiplicity()), stats)

    def _estimate(
        self,
        rows: Tensor,
        multiplicity: Tensor,
        stats: ContrastStats,
        excluded: Callable[[slice], Tensor] | None = None,
    ) -> Estimate:
        batch = stats.batch
        directions = normalize_blocks(rows, self.blocks)
        queue = estimate_from_prototypes(directions, stats, self.eps, self.alpha_gradient, multiplicity, excluded)
        queue_alpha = batch.gather_local(queue.log_normalizer)
        alpha = log_math.log_mix(queue_alpha, stats.log_estimate, self.batch_weight)
        if not self.alpha_gradient:
            return Estimate(alpha)
        queue_share = (1 - self.batch_weight) * log_math.saturating_exp(queue_alpha - alpha)[:, batch.local]
        return Estimate(
            alpha,
            batch_coefficient=self.batch_weight,
            feature_gradient=lambda weights: queue.feature_gradient(weights * queue_share),
        )
