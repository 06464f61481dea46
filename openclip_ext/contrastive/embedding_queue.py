"""A queue of the most recent embeddings, for NeuCLIP's prototypes, for queueclip and for solved temperatures."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import GatheredBatch


class EmbeddingQueue(nn.Module):
    """Ring buffer (first in, first out) of the embeddings of the ``capacity`` most recent samples.

    Masked samples are not added. If a batch is larger than the capacity, only its first valid samples are added.

    Attributes:
        rows: ``(2, capacity, d)``: text embeddings for image anchors, and image embeddings for text anchors.
        next: 0-d, the row that the next sample will overwrite.
        filled: 0-d, the number of rows in use.
        slots: ``(capacity,)`` int64, the numbers of all rows.
        labels: ``(capacity, 2)`` int64 labels of equal samples, see :mod:`openclip_ext.contrastive.equal_captions`. None
            before :meth:`keep_labels`.
        reference: ``(2, capacity, width)`` embeddings of the samples by a reference model, see
            :mod:`openclip_ext.contrastive.guide`. None before :meth:`keep_reference`.
    """

    rows: Tensor
    next: Tensor
    filled: Tensor
    slots: Tensor
    labels: Tensor | None
    reference: Tensor | None

    def __init__(self, capacity: int, embed_dim: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("rows", torch.zeros(2, capacity, embed_dim))
        self.register_buffer("next", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("slots", torch.arange(capacity), persistent=False)
        self.labels = self.reference = None

    def keep_labels(self) -> None:
        """Also store the labels of all samples that are added from now on."""
        del self.labels
        self.register_buffer("labels", torch.zeros(self.capacity, 2, dtype=torch.int64))

    def keep_reference(self, width: int) -> None:
        """Also store a reference model's embeddings of all samples that are added from now on."""
        del self.reference
        self.register_buffer("reference", torch.zeros(2, self.capacity, width))

    @property
    def compares(self) -> bool:
        """Whether the queue knows which of its samples are no negatives of an anchor."""
        return self.labels is not None or self.reference is not None

    def push(self, batch: GatheredBatch) -> None:
        candidates, positions, is_new = self._placement(batch)
        if self.reference is not None:
            assert batch.guide is not None
            known = torch.where(is_new[:, None], batch.guide.rows[:, candidates], self.reference[:, positions])
            self.reference[:, positions] = known.to(self.reference.dtype)
        if self.labels is not None:
            new = _two_labels(batch)[candidates]
            self.labels[positions] = torch.where(is_new[:, None], new, self.labels[positions])
        rows = torch.where(is_new[:, None], batch.others[:, candidates], self.rows[:, positions])
        self.rows[:, positions] = rows
        added = is_new.sum()
        self.next.add_(added).remainder_(self.capacity)
        self.filled.add_(added).clamp_(max=self.capacity)

    def excluded(self, batch: GatheredBatch, leave_own_out: bool) -> Callable[[slice], Tensor] | None:
        """Return which rows each anchor excludes after :meth:`push`. Call this method before ``push``.

        The result is None, or a function of a slice of ``b`` anchors that returns ``(b, capacity)`` bool. An anchor excludes
        other samples that :meth:`equal` it, and with ``leave_own_out`` also its own row.
        """
        if not self.compares and not leave_own_out:
            return None
        assigned = self.assigned_rows(batch)

        def of_anchors(anchors: slice) -> Tensor:
            own = assigned[anchors, None] == self.slots
            if not self.compares:
                return own
            equal = self.equal(batch, anchors)
            return equal | own if leave_own_out else equal & ~own

        return of_anchors

    def equal(self, batch: GatheredBatch, anchors: slice) -> Tensor:
        """Return which rows share a label with each of ``b`` anchors, or resemble the anchor, ``(b, capacity)`` bool."""
        alike = None
        if self.reference is not None:
            assert batch.guide is not None
            alike = batch.guide.alike(anchors, replace(batch.guide, rows=self.reference.to(batch.guide.rows.dtype)))
        if self.labels is None:
            assert alike is not None, "the queue compares no samples"
            return alike
        equal = (_two_labels(batch)[anchors, None] == self.labels).any(dim=2)
        return equal if alike is None else equal | alike

    def assigned_rows(self, batch: GatheredBatch) -> Tensor:
        """Return the row ``(B,)`` int64 that :meth:`push` assigns to each sample; −1 for samples that are not added."""
        candidates, positions, is_new = self._placement(batch)
        rows = torch.full((batch.size,), -1, device=positions.device)
        return rows.scatter_(0, candidates, torch.where(is_new, positions, -1))

    def _placement(self, batch: GatheredBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch positions of the candidates for the queue, their rows in the queue, and whether each is valid."""
        number = min(batch.size, self.capacity)
        candidates = batch.valid_first[:number]
        positions = (self.next + self.slots[:number]) % self.capacity
        return candidates, positions, batch.valid[candidates]

    def repeated(self) -> Tensor:
        """Return the stored embeddings, oldest first, repeated to ``(2, capacity, d)`` if the queue is not full."""
        position = self.slots % self.filled.clamp(min=1)
        return self.rows[:, (self.next - self.filled + position) % self.capacity]

    def multiplicity(self) -> Tensor:
        """Return how often :meth:`repeated` contains each row, ``(capacity,)`` int64."""
        filled = self.filled.clamp(min=1)
        return (self.slots < filled) * ((self.capacity - 1 - self.slots) // filled + 1)


def repeated_batch(batch: GatheredBatch, number: int) -> Tensor:
    """Return what :meth:`EmbeddingQueue.repeated` returns for a queue of capacity ``number`` with only this batch."""
    order = batch.valid_first
    filled = batch.valid.sum().clamp(min=1, max=number)
    return batch.others[:, order[torch.arange(number, device=order.device) % filled]]


def _two_labels(batch: GatheredBatch) -> Tensor:
    """Return the samples' labels as ``(B, 2)``. A single label is repeated."""
    assert batch.given_labels is not None
    labels = batch.given_labels.reshape(batch.size, -1)
    if labels.shape[1] > 2:
        raise ValueError(
            f"positives: expected at most 2 labels per sample with a queue, found {labels.shape[1]}. Pass 1 or 2"
        )
    return labels.expand(-1, 2)
