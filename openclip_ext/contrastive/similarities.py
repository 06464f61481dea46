"""Similarities between this process's anchors and all samples of a batch, and sums over these similarities.

There are two passes. The first pass returns the log-sums over each anchor's negatives, from which the caller estimates the
log-normalizers. The second pass returns the gradients. If all samples are local, one matrix product of images and texts is
enough for both sides: its rows belong to image anchors, and its columns to text anchors. Large batches are processed in chunks
of anchors. The second pass computes each chunk again, so the memory is ``O(B·chunk)`` instead of ``O(B²)``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import GatheredBatch

# Similarity of a masked pair. Its exponential is 0 for any temperature in (0, 1]. Unlike -inf, it can be multiplied by 0.
MASKED_SIMILARITY = -1e4

# Maximum number of pairs per chunk. About five buffers of this size are in memory at the same time: 0.7 GB in float32.
MAX_PAIRS = 2**25

_ROWS, _COLUMNS = 1, 0


def anchor_chunks(anchors: slice, pairs: int) -> Iterator[slice]:
    """Split a range of anchors into slices of up to ``MAX_PAIRS`` pairs (or elements), of which each anchor has ``pairs``."""
    size = max(1, MAX_PAIRS // pairs)
    for start in range(anchors.start, anchors.stop, size):
        yield slice(start, min(start + size, anchors.stop))


def chunk_bytes(local_size: int, size: int) -> int:
    """Return the bytes of the three largest float32 buffers, for ``local_size`` anchors and ``size`` samples.

    The computation also uses about two more buffers, each of the size of one of the three.
    """
    return 3 * 4 * min(local_size * size, max(MAX_PAIRS, size))


class Similarities:
    """Similarities of a batch at the anchors' temperatures ``tau``, ``(2, B)``.

    Pairs that are not negatives have the similarity :data:`MASKED_SIMILARITY`: an anchor and its positive, samples with equal
    labels, samples that a reference model finds alike, and pairs with a masked sample.
    """

    def __init__(self, batch: GatheredBatch, tau: Tensor) -> None:
        self.batch = batch
        self.tau = tau
        self.all_local = batch.local_size == batch.size
        self._slices = list(anchor_chunks(batch.local, batch.size))
        self._kept: list[_Chunk] = []

    def log_sums(self) -> Tensor:
        """Return ``log Σ_j exp(s_ij/τ_i)`` over the negatives of all anchors of the batch, ``(2, B)``.

        Masked samples get values for which their ``log g`` is 0. For a gathered batch, ``2·B`` scalars are communicated.
        """
        batch = self.batch
        parts: list[list[Tensor]] = [[], []]
        for chunk in self._chunks():
            parts[chunk.side].append(chunk.log_sum(_ROWS))
            if self.all_local:
                parts[1].append(chunk.log_sum(_COLUMNS))
        texts = parts[1]
        if self.all_local and len(texts) > 1:
            texts = [torch.logsumexp(torch.stack(texts), dim=0)]
        log_sums = batch.gather_local(torch.cat([*parts[0], *texts]).view(2, -1))
        return torch.where(batch.valid, log_sums, batch.log_negatives)

    def gradients(
        self, log_sums: Tensor, coefficients: Tensor, with_mean_similarity: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of ``Σ_k,i coefficient_k,i · Σ_j softmax_j(s_ij/τ_i)·s_ij`` with respect to the embeddings.

        The softmax is treated as constant. The sum is over all anchors ``i`` of both sides ``k``. Call this method once, after
        :meth:`log_sums`.

        Args:
            log_sums: The result of :meth:`log_sums`.
            coefficients: factor of each anchor's term, ``(2, B)``, 0 for masked anchors.
            with_mean_similarity: Whether to return the mean similarities.

        Returns:
            The gradient ``(2, B_local, d)`` with respect to this process's images and texts, both as anchors and as negatives.
            Also each local anchor's mean similarity to its negatives, weighted by the softmax, ``(2, B_local)``, or None.
        """
        batch = self.batch
        features = torch.empty_like(batch.features[:, batch.local])
        means = torch.empty_like(features[..., 0]) if with_mean_similarity else None
        for number, chunk in enumerate(self._chunks()):
            first = number == 0  # the first chunk overwrites the buffers, later chunks add to them
            side, other = chunk.side, 1 - chunk.side
            here = slice(chunk.anchors.start - batch.first, chunk.anchors.stop - batch.first)
            rows, row_scale = chunk.softmax(_ROWS, log_sums)
            columns, column_scale = chunk.softmax(_COLUMNS, log_sums)
            if means is not None:
                means[side, here] = _scaled(torch.linalg.vecdot(rows, chunk.values, dim=1), row_scale)
                if self.all_local:
                    sums = _scaled(torch.linalg.vecdot(columns, chunk.values, dim=0), column_scale)
                    means[other] = sums if first else means[other] + sums
            rows.mul_(_scaled(coefficients[side, chunk.anchors], row_scale)[:, None])
            weights = rows.addcmul_(columns, _scaled(coefficients[other], column_scale))
            torch.mm(weights, batch.features[other], out=features[side, here])
            if self.all_local:
                features[other].addmm_(weights.T, batch.features[side, chunk.anchors], beta=0 if first else 1)
        self._kept.clear()
        return features, means

    def _chunks(self) -> Iterator["_Chunk"]:
        """Yield chunks of image anchors. If one product is not enough for both sides, also yield chunks of text anchors."""
        if self._kept:
            yield from self._kept
            return
        for side in range(1 if self.all_local else 2):
            for anchors in self._slices:
                chunk = _Chunk(self.batch, self.tau, side, anchors)
                if len(self._slices) == 1:
                    self._kept.append(chunk)
                yield chunk


class _Chunk:
    """Similarities ``values`` ``(c, B)`` of ``c`` anchors of one side (rows) to all samples of the other side (columns)."""

    def __init__(self, batch: GatheredBatch, tau: Tensor, side: int, anchors: slice) -> None:
        self.tau, self.side, self.anchors = tau, side, anchors
        self._terms: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.values = values = batch.features[side, anchors] @ batch.features[1 - side].T
        values.masked_fill_(batch.ignored[anchors, None] | batch.ignored, MASKED_SIMILARITY)
        if (excluded := batch.excluded(anchors)) is not None:
            values.masked_fill_(excluded, MASKED_SIMILARITY)
        values.diagonal(anchors.start).fill_(MASKED_SIMILARITY)

    def _exponents(self, dim: int) -> Tensor:
        if dim == _ROWS:
            return self.values / self.tau[self.side, self.anchors, None]
        return self.values / self.tau[1 - self.side]

    def log_sum(self, dim: int) -> Tensor:
        """Return the log of the sum of ``exp(s/τ)`` along ``dim``, with the anchor's τ."""
        terms, scale, log_sum = log_math.softmax_terms(self._exponents(dim), dim)
        self._terms[dim] = terms, scale
        return log_sum

    def softmax(self, dim: int, log_sums: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this chunk's part of each anchor's softmax over all negatives, given ``log_sums`` ``(2, B)``.

        The softmax is returned as two factors: terms ``(c, B)``, which the caller may overwrite, and scales ``(c,)`` or
        ``(B,)``, or None, which means 1.
        """
        if dim in self._terms:  # kept from :meth:`log_sum`, because the batch is one chunk
            return self._terms.pop(dim)
        log_sum = log_sums[self.side, self.anchors] if dim == _ROWS else log_sums[1 - self.side]
        return log_math.exp_(self._exponents(dim).sub_(log_sum.unsqueeze(dim))), None


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values * scale
