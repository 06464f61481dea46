"""The most recent samples' embeddings, which the prototypes restart from and the queue consists of."""

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import GatheredBatch


class EmbeddingQueue(nn.Module):
    """Keeps the ``capacity`` most recent samples' embeddings that count, both sides.

    Of a batch larger than the capacity it keeps the first samples, in order.

    Args:
        capacity: number of samples ``m``.
        embed_dim: width ``d``.
    """

    def __init__(self, capacity: int, embed_dim: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("rows", torch.zeros(2, capacity, embed_dim))
        self.register_buffer("next", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, block: GatheredBatch) -> Tensor:
        """Add a block's samples; rows ``[0]`` are texts, ``[1]`` images: what each side's anchors are contrasted with.

        Returns:
            The row that each of the samples has now ``(B,)`` int64; −1 where it has none.
        """
        candidates, positions, is_new = self._placement(block)
        rows = torch.where(is_new[:, None], block.features.flip(0)[:, candidates], self.rows[:, positions])
        self.rows[:, positions] = rows
        added = is_new.sum()
        self.next.copy_((self.next + added) % self.capacity)
        self.filled.copy_((self.filled + added).clamp(max=self.capacity))
        rows_of = torch.full((block.size,), -1, device=positions.device)
        return rows_of.scatter_(0, candidates, torch.where(is_new, positions, -1))

    def _placement(self, block: GatheredBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Samples that count first, in order; the slots they would go to; and which of them do count."""
        number = min(block.size, self.capacity)
        candidates = torch.argsort((~block.valid).to(torch.int8), stable=True)[:number]
        positions = (self.next + torch.arange(number, device=candidates.device)) % self.capacity
        return candidates, positions, block.valid[candidates]

    def repeated(self) -> Tensor:
        """The embeddings ``(2, capacity, d)``, the oldest first; while the ring is not full, what is there, repeated."""
        position = torch.arange(self.capacity, device=self.rows.device) % self.filled.clamp(min=1)
        return self.rows[:, (self.next - self.filled + position) % self.capacity]

    def multiplicity(self) -> Tensor:
        """How often :meth:`repeated` takes each slot, ``(capacity,)`` int64."""
        slots = torch.arange(self.capacity, device=self.rows.device)
        filled = self.filled.clamp(min=1)
        return torch.where(slots < filled, (self.capacity - 1 - slots) // filled + 1, 0)


def repeated_block(block: GatheredBatch, number: int) -> Tensor:
    """What a ring of ``number`` samples that has seen nothing but this block would hold: ``(2, number, d)``."""
    order = torch.argsort((~block.valid).to(torch.int8), stable=True)
    filled = block.valid.sum().clamp(min=1, max=number)
    return block.features.flip(0)[:, order[torch.arange(number, device=order.device) % filled]]
