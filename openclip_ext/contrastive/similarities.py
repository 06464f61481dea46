"""Similarities of this process's anchors with all samples of a block, and what the losses sum over them.

Two passes: the first gives the log-sums over each anchor's negatives; between them the caller finds the log-normalizers; the
second gives the gradients. One product of images and texts serves both sides where the block is this process's own: image
anchors along its rows, text anchors along its columns. Larger blocks are taken in chunks of anchors, and the second pass
then computes each chunk again, so that memory is ``O(B·chunk)`` and not ``O(B²)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch

# Pairs in a chunk. About five buffers of this many numbers live at a time: 0.7 GB in float32.
MAX_PAIRS = 2**25

_ROWS, _COLUMNS = 1, 0


def anchor_chunks(anchors: slice, width: int) -> Iterator[slice]:
    """Parts of a range of anchors, so small that ``width`` numbers for each of them on both sides fit in a chunk."""
    size = max(1, MAX_PAIRS // (2 * width))
    for start in range(anchors.start, anchors.stop, size):
        yield slice(start, min(start + size, anchors.stop))


def chunk_bytes(local_size: int, size: int) -> int:
    """What a step keeps of the similarities of so many anchors with so many samples: values and terms of both sides.

    In float32; while it computes, about two more buffers of a third of this.
    """
    return 3 * 4 * min(local_size * size, max(MAX_PAIRS, size))


@dataclass
class PairGradients:
    """What :meth:`Similarities.gradients` returns.

    Attributes:
        features: ``(2, B_local, d)``, of this process's images and texts.
        mean_similarity: ``(2, B_local)``, of this process's anchors with their negatives, by softmax; None if not asked for.
    """

    features: Tensor
    mean_similarity: Tensor | None


class Similarities:
    """Similarities of a block whose temperatures are set.

    Pairs that do not count, an anchor's own pair among them, and with views its own embedding, are
    :data:`functional.MASKED_SIMILARITY`.

    Args:
        block: the samples.
    """

    def __init__(self, block: GatheredBatch) -> None:
        self.block = block
        self.shared = block.local_size == block.size
        rows = max(1, MAX_PAIRS // block.size)
        self._slices = [
            slice(block.first + start, block.first + min(start + rows, block.local_size))
            for start in range(0, block.local_size, rows)
        ]
        self._kept: list[_Chunk] = []

    def log_g(self) -> Tensor:
        """``log g`` of all anchors of the block, ``(2, B)``, 0 where a sample does not count.

        With a gathered block one exchange of ``2·B`` scalars.
        """
        block = self.block
        own = block.own
        log_sums: list[list[Tensor]] = [[], []]
        for chunk in self._chunks():
            log_sums[chunk.side].append(chunk.log_sum(_ROWS))
            if self.shared:
                log_sums[1].append(chunk.log_sum(_COLUMNS))
        images = torch.cat(log_sums[0])
        texts = _log_add_all(log_sums[1]) if self.shared else torch.cat(log_sums[1])
        log_g = torch.stack([images, texts]) - block.positive[own] / block.tau[:, own] - torch.log(block.negatives)
        return torch.where(block.valid, block.gather_own(log_g), 0)

    def gradients(self, log_g: Tensor, coefficients: Tensor, with_mean_similarity: bool) -> PairGradients:
        """Gradient in the embeddings of ``Σ_k,i coefficient_k,i · Σ_j softmax_j(s_ij/τ_i)·s_ij``, the softmax held.

        The sum is over all anchors of the block; the gradient is that of this process's embeddings, as anchors and as
        everybody's negatives. To be called once, after :meth:`log_g`.

        Args:
            log_g: what that returned.
            coefficients: ``(2, B)``, 0 where an anchor does not count.
            with_mean_similarity: whether to return it.
        """
        block = self.block
        log_sums = log_g + block.positive / block.tau + torch.log(block.negatives)
        features = torch.zeros_like(block.features[:, block.own])
        means = torch.zeros_like(features[..., 0]) if with_mean_similarity else None
        for chunk in self._chunks():
            side, other = chunk.side, 1 - chunk.side
            here = slice(chunk.anchors.start - block.first, chunk.anchors.stop - block.first)
            rows, row_scale = chunk.softmax(_ROWS, log_sums)
            columns, column_scale = chunk.softmax(_COLUMNS, log_sums)
            if means is not None:
                means[side, here] = torch.linalg.vecdot(rows, chunk.values, dim=1) * row_scale
                if self.shared:
                    means[other] += torch.linalg.vecdot(columns, chunk.values, dim=0) * column_scale
            rows.mul_((coefficients[side, chunk.anchors] * row_scale)[:, None])
            weights = rows.addcmul_(columns, coefficients[other] * column_scale)
            torch.mm(weights, block.features[other], out=features[side, here])
            if self.shared:
                features[other].addmm_(weights.T, block.features[side, chunk.anchors])
        self._kept.clear()
        return PairGradients(features, means)

    def _chunks(self) -> Iterator["_Chunk"]:
        """Chunks of the image anchors, and where the block is not this process's own, of the text anchors."""
        if self._kept:
            yield from self._kept
            return
        for side in range(1 if self.shared else 2):
            for anchors in self._slices:
                chunk = _Chunk(self.block, side, anchors)
                if len(self._slices) == 1:
                    self._kept.append(chunk)
                yield chunk


@dataclass
class _Chunk:
    """Similarities of some anchors of one side, the rows, with all samples of the other, the columns.

    Attributes:
        side: of the rows.
        anchors: which samples of the block they are.
        values: ``(c, B)``.
    """

    block: GatheredBatch
    side: int
    anchors: slice
    values: Tensor = field(init=False)
    _terms: dict[int, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        features = self.block.features
        self.values = self._masked(features[self.side, self.anchors] @ features[1 - self.side].T)

    def _masked(self, values: Tensor) -> Tensor:
        block = self.block
        values.masked_fill_(~(block.valid[self.anchors, None] & block.valid[None, :]), F.MASKED_SIMILARITY)
        positions = torch.arange(self.anchors.start, self.anchors.stop, device=values.device)
        values.scatter_(1, positions[:, None], F.MASKED_SIMILARITY)
        if block.views == 2:
            # An anchor's own embedding, which the other side has half of its process's samples further.
            half = block.local_size // 2
            local = positions - block.first
            other_view = torch.where(local < half, positions + half, positions - half)
            values.scatter_(1, other_view[:, None], F.MASKED_SIMILARITY)
        return values

    def _exponents(self, dim: int) -> Tensor:
        if dim == _ROWS:
            return self.values / self.block.tau[self.side, self.anchors, None]
        return self.values / self.block.tau[1 - self.side]

    def log_sum(self, dim: int) -> Tensor:
        """Log of the sum of ``exp(s/τ)`` over the rows' or the columns' entries, τ the row's or the column's anchor's."""
        terms = self._exponents(dim)
        largest = F.shifted_exp_(terms, dim)
        self._terms[dim] = terms, largest
        return largest + terms.sum(dim).log_()

    def softmax(self, dim: int, log_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax of the rows' or the columns' anchors over *all* their negatives, up to a scale for each anchor.

        Args:
            dim: whose.
            log_sums: ``(2, B)`` of all anchors.

        Returns:
            Terms ``(c, B)``, which the caller may overwrite, and scales, ``(c,)`` or ``(B,)``.
        """
        log_sum = log_sums[self.side, self.anchors] if dim == _ROWS else log_sums[1 - self.side]
        if dim in self._terms:
            terms, largest = self._terms.pop(dim)
            return terms, (largest - log_sum).exp_()
        terms = self._exponents(dim).sub_(log_sum.unsqueeze(dim)).exp_()
        return terms, torch.ones_like(log_sum)


def _log_add_all(log_values: list[Tensor]) -> Tensor:
    """Log of the sum of the exponentials of equally shaped tensors."""
    return log_values[0] if len(log_values) == 1 else torch.logsumexp(torch.stack(log_values), dim=0)
