"""Likely false negatives: pairs that a reference model finds too similar (GISTEmbed, Solatorio 2024, arXiv:2402.16829).

With the reference's similarities ``ŝ``, samples ``i`` and ``j`` are *alike* if ``max(ŝ_ij, ŝ_ji) > max(ŝ_ii, ŝ_jj) − margin``:
the reference finds the image of one and the text of the other almost as similar as their own pairs. Alike samples are no
negatives of each other, in every sum and in every count, like samples with :mod:`equal captions
<openclip_ext.contrastive.equal_captions>` that are masked. Queues store the reference's embeddings, and exclude alike samples
of earlier batches. GISTEmbed compares with the anchor's own pair only; the maximum over both pairs makes the relation
symmetric, and excludes fewer negatives.

Page: ``docs/reference-model.md``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Guide:
    """The reference model's embeddings of ``n`` samples.

    Attributes:
        rows: ``(2, n, width)`` unit embeddings of images and of texts. A row of zeros means that the reference could not read
            the sample, which is then alike no other.
        margin: How far below a pair's own similarity another similarity is too large.
    """

    rows: Tensor
    margin: float

    def alike(self, anchors: slice, others: "Guide | None" = None) -> Tensor:
        """Return which of the ``n`` samples of ``others`` (default: of this object) are alike ``b`` anchors, ``(b, n)`` bool.

        ``anchors`` are a slice of this object's samples. A sample may or may not be alike itself.
        """
        others = self if others is None else others
        rows, own = self.rows[:, anchors], self.own()[anchors, None]
        closest = torch.maximum(rows[0] @ others.rows[1].T, rows[1] @ others.rows[0].T)
        return closest > torch.maximum(own, others.own()) - self.margin

    def own(self) -> Tensor:
        """Return the similarities ``ŝ_ii``, ``(n,)``; infinite for samples that the reference could not read."""
        unread = ~self.rows.any(dim=2).all(dim=0)
        return torch.linalg.vecdot(self.rows[0], self.rows[1]).masked_fill(unread, math.inf)
