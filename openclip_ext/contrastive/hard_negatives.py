"""Hard negatives: captions that are similar to a sample's caption, but do not match its image.

As in NegCLIP (Yuksekgonul et al., *When and why vision-language models behave like bags-of-words*, ICLR 2023, section 4), the
hard negatives of a global batch are additional negatives of all its images. The negatives of the texts are unchanged.

The normalizer estimates the mean over the data set's captions, as without hard negatives. The batch's own hard negatives are
added to this estimate ``α``. If the estimand has ``n`` terms in the batch (``B−1`` negatives, or ``B`` pairs), and the batch
has ``H`` hard negatives, the log-normalizer of image ``i`` is::

    α'_i = log( n/(n+H)·exp(α_i) + 1/(n+H)·Σ_j exp((s_i,hard_j − s_ii)/τ_i) )

With the mini-batch estimate, ``openclip`` is therefore NegCLIP's loss.
Page: ``docs/methods/openclip-siglip.md``.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.normalizer import Estimate
from openclip_ext.contrastive.objectives import Estimand
from openclip_ext.contrastive.similarities import MASKED_SIMILARITY, anchor_chunks


class HardNegatives:
    """The hard negatives of a batch, as negatives of its images.

    Attributes:
        captions: The batch at its temperatures, without hard negatives.
        joined: This batch, with the hard negatives among the negatives of the images.
    """

    def __init__(self, captions: ContrastStats) -> None:
        batch = captions.batch
        assert batch.hard is not None
        self.captions, self._hard = captions, batch.hard
        parts = [torch.logsumexp(self._exponents(anchors), dim=1) for anchors in self._chunks(batch.local)]
        self._log_sums = batch.gather_local(torch.cat(parts)[None])[0]
        before = batch.negatives.expand(batch.size)
        negatives = torch.stack([before + batch.count, before])
        sums = torch.stack([torch.logaddexp(captions.log_sums[0], self._log_sums), captions.log_sums[1]])
        self.joined = replace(
            captions,
            batch=replace(batch, negatives=negatives),
            log_sums=torch.where(batch.valid, sums, negatives.log()),  # log g of masked samples is 0
        )

    def join(self, estimate: Estimate, estimand: Estimand) -> Estimate:
        """Add the hard negatives to an estimate ``α``: return ``α'``. Only the captions' part has a gradient."""
        before, after = self.captions.batch, self.joined.batch
        if estimand.includes_positive:
            log_part = before.log_pairs - after.log_pairs
        else:
            log_part = before.log_negatives - after.log_negatives
        captions = estimate.log_normalizer + log_part
        alpha = torch.stack([torch.logaddexp(captions[0], self._log_terms(estimand)), captions[1]])
        alpha = alpha.masked_fill(after.ignored, 0)
        part = log_math.saturating_exp(captions - alpha)[:, after.local]  # of the captions in exp(α')
        gradient, slope = estimate.feature_gradient, estimate.tau_slope
        if slope is not None:
            gap = self.gap(self.weight_sums(alpha, estimand))
            slope = slope * part - gap / self.captions.tau[:, after.local].square()
        return replace(
            estimate,
            log_normalizer=alpha,
            feature_gradient=None if gradient is None else lambda weights: gradient(weights * part),
            tau_slope=slope,
        )

    def weight_sums(self, alpha: Tensor, estimand: Estimand) -> Tensor:
        """Return the sum of the hard negatives' weights ``w_ij`` of each anchor, ``(2, B)``. For texts, it is 0."""
        images = log_math.saturating_exp(self._log_terms(estimand) - alpha[0])
        return torch.stack([images, torch.zeros_like(images)])

    def gap(self, weight_sums: Tensor) -> Tensor:
        """Return ``Σ_j w_ij (s_i,hard_j − s_ii)`` of this process's anchors, ``(2, B_local)``."""
        batch = self.captions.batch
        parts = (
            torch.linalg.vecdot(self._softmax(anchors), batch.features[0, anchors] @ self._hard.T)
            for anchors in self._chunks(batch.local)
        )
        return weight_sums[:, batch.local] * (torch.cat([*parts]) - batch.positive[..., batch.local])

    def gradients(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``Σ_i coefficient_i·Σ_j softmax_j(s_i,hard_j/τ_i)·s_i,hard_j`` at a constant softmax.

        They are for this process's images and hard negatives, ``(B_local, d)`` each. ``coefficients`` ``(B,)`` of all images
        are 0 for masked images.
        """
        batch = self.captions.batch
        all_local = batch.local_size == batch.size
        images, hard = torch.empty_like(self._hard[batch.local]), torch.zeros_like(self._hard[batch.local])
        for anchors in self._chunks(batch.local):
            weights = self._softmax(anchors).mul_(coefficients[anchors, None])
            torch.mm(weights, self._hard, out=images[anchors.start - batch.first : anchors.stop - batch.first])
            if all_local:
                hard.addmm_(weights.T, batch.features[0, anchors])
        if not all_local:  # compare the hard negatives of this process with the images of all processes
            for anchors in self._chunks(slice(0, batch.size)):
                weights = self._softmax(anchors, batch.local).mul_(coefficients[anchors, None])
                hard.addmm_(weights.T, batch.features[0, anchors])
        return images, hard

    def _log_terms(self, estimand: Estimand) -> Tensor:
        """Return the log of the hard negatives' part of ``exp(α')``, ``(B,)``."""
        return self._log_sums - self.captions.positive_exponent[0] - estimand.log_divisor(self.joined)[0]

    def _chunks(self, anchors: slice) -> Iterator[slice]:
        return anchor_chunks(anchors, self.captions.batch.size)

    def _exponents(self, anchors: slice, columns: slice = slice(None)) -> Tensor:
        """Return ``s_i,hard_j/τ_i`` of some images ``i`` and hard negatives ``j``; very small for hard negatives to ignore."""
        batch = self.captions.batch
        values = batch.features[0, anchors] @ self._hard[columns].T
        return values.masked_fill_(batch.ignored[columns], MASKED_SIMILARITY) / self.captions.tau[0, anchors, None]

    def _softmax(self, anchors: slice, columns: slice = slice(None)) -> Tensor:
        return log_math.exp_(self._exponents(anchors, columns).sub_(self._log_sums[anchors, None]))
