"""A frozen reference model inside the loss: steering (DRRho-CLIP, Wei et al. 2025, arXiv:2505.06699) and distillation.

The reference model has unit embeddings ``ê1, ê2`` and similarities ``ŝ_ij = ê1_i·ê2_j``. Steering replaces ``s_ij − s_ii`` in
every exponent by ``(s_ij − s_ii) − (ŝ_ij − ŝ_ii)``. So a negative has a large weight if the model is worse on it than the
reference model. ``s_ij − ŝ_ij`` is the inner product of ``[ê1; e1]`` with ``[−ê2; e2]``, so normalizers need no special code.
The features have two blocks: first the reference's, then the model's. The reference's block has no gradient.

Distillation adds ``½·[CE(softmax(ŝ/τ̂), softmax(s/τ)) + its transpose]`` over the global batch.

Naive float64 versions: ``tests/references/steering.py``. Page: ``docs/reference-model.md``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import GatheredBatch, LocalBatch, all_finite
from openclip_ext.contrastive.similarities import MASKED_SIMILARITY, anchor_chunks

# The logged metrics of a step use all pairs of up to this many samples.
_REPORTED = 512
# Lower bound of norms in divisions, to keep the result finite for rows of zeros.
_SMALLEST_NORM = 1e-12


def read_reference(reference: Any, batch: LocalBatch, width: int) -> Tensor:
    """Return the reference's image and text embeddings of a batch, ``(2, B_local, width)``, on its device and in its dtype.

    ``reference`` contains them, ``(B_local, width)`` each. Raise ValueError for wrong shapes.
    """
    expected = (len(batch.image), width)
    if reference is None or [tuple(side.shape) for side in reference] != [expected, expected]:
        found = "none" if reference is None else " and ".join(str(tuple(side.shape)) for side in reference)
        raise ValueError(
            f"reference: expected the reference model's embeddings of images and of texts, {expected} each, found {found}"
        )
    return torch.stack([side.detach().to(batch.image.device, batch.dtype, non_blocking=True) for side in reference])


def with_reference(batch: LocalBatch, reference: Tensor) -> LocalBatch:
    """Return the batch with the reference's features before the model's: ``[ê1; e1]`` and ``[−ê2; e2]``.

    ``reference`` ``(2, B_local, width)`` contains ``ê1`` and ``ê2``. A row of zeros means that the reference could not read
    the sample. Such a sample is masked.
    """
    image, text = reference
    return replace(
        batch,
        image=torch.cat([image, batch.image.to(batch.dtype)], dim=1),
        text=torch.cat([-text, batch.text.to(batch.dtype)], dim=1),
        mask=image.any(dim=1) & text.any(dim=1),
        hard=None,
    )


def blocks(reference_width: int) -> tuple[slice, ...]:
    """Return the columns of each block of features: first the reference's block, if there is one, then the model's."""
    return (slice(0, reference_width), slice(reference_width, None)) if reference_width else (slice(None),)


def block_norms(rows: Tensor, columns: slice) -> Tensor:
    """Return the norms ``(2, m, 1)`` of one block of rows ``(2, m, d)``."""
    return torch.linalg.vector_norm(rows[..., columns], dim=2, keepdim=True).clamp_(min=_SMALLEST_NORM)


def normalize_blocks(rows: Tensor, columns: Sequence[slice]) -> Tensor:
    """Return rows ``(2, m, d)`` with each block divided by its norm."""
    if len(columns) == 1:
        return rows / block_norms(rows, columns[0])
    return torch.cat([rows[..., block] / block_norms(rows, block) for block in columns], dim=2)


def distill(
    batch: GatheredBatch, features: Tensor, reference: Tensor, tau: Tensor, reference_tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distillation term ``½·[CE(softmax(ŝ/τ̂), softmax(s/τ)) + its transpose]`` and its gradients.

    ``features`` ``(2, B, d)`` and ``reference`` ``(2, B, d̂)`` are the embeddings of the model and the reference.
    ``tau`` ``(2, B)`` are the temperatures of the anchors, and ``reference_tau`` is ``τ̂``.

    Returns:
        The mean cross entropy of each side's anchors, ``(2,)``; the gradients with respect to this process's images and
        texts, ``(2, B_local, d)``; and the gradient with respect to ``1/τ``, 0-d.
    """
    sides = range(2)
    chunks = list(anchor_chunks(batch.local, 2 * batch.size))

    def cosines(of: Tensor, side: int, anchors: slice) -> Tensor:
        values = of[side, anchors] @ of[1 - side].T
        return values.masked_fill_(batch.ignored[anchors, None] | batch.ignored, MASKED_SIMILARITY)

    log_sums = torch.stack(
        [
            torch.cat([torch.logsumexp(cosines(of, side, anchors) / scale(side, anchors), dim=1) for anchors in chunks])
            for of, scale in (
                (features, lambda side, anchors: tau[side, anchors, None]),
                (reference, lambda side, anchors: reference_tau),
            )
            for side in sides
        ]
    )
    log_sum, log_sum_reference = batch.gather_local(log_sums).view(2, 2, -1)
    values = torch.zeros_like(tau[:, 0])
    gradients = torch.empty_like(features[:, batch.local])
    scale_gradient = torch.zeros_like(values[0])
    for side in sides:
        other = 1 - side
        for anchors in chunks:
            here = slice(anchors.start - batch.first, anchors.stop - batch.first)
            own, taught = cosines(features, side, anchors), cosines(reference, side, anchors) / reference_tau
            log_p = own / tau[side, anchors, None] - log_sum[side, anchors, None]
            target = (taught - log_sum_reference[side, anchors, None]).exp_()
            share = batch.sample_weight[anchors, None]
            values[side] -= (share * target * log_p).sum()
            as_anchor = share * (log_p.exp_() - target)
            scale_gradient += 0.5 * (as_anchor * own).sum()
            as_other = (own / tau[other] - log_sum[other]).exp_() - (taught - log_sum_reference[other]).exp_()
            weights = as_anchor / tau[side, anchors, None] + batch.sample_weight * as_other / tau[other]
            gradients[side, here] = 0.5 * batch.world_size * weights @ features[other]
    if batch.world_size > 1:
        values = batch.gather_local(values[:, None]).sum(dim=1)
    return values, gradients, batch.world_size * scale_gradient


def report(batch: LocalBatch, width: int) -> dict[str, float]:
    """Return two metrics of this process's samples: how often the reference beats the model, and the reference's InfoNCE.

    The first metric is the fraction of negatives with ``ŝ_ij − ŝ_ii < s_ij − s_ii``. InfoNCE uses the model's temperature.
    Synchronizes with the device.

    Args:
        batch: Samples whose features contain the reference's block, then the model's, without an autograd graph.
        width: Embedding dimension of the reference's block.
    """
    assert batch.mask is not None, "set by with_reference"
    usable = batch.mask.nonzero()[:_REPORTED, 0]
    if len(usable) < 2 or not all_finite(torch.stack([batch.image, batch.text])):
        return {}
    image, text = batch.image[usable], batch.text[usable]
    reference = -(image[:, :width] @ text[:, :width].T)
    difference = image @ text.T
    negative = ~torch.eye(len(usable), dtype=torch.bool, device=image.device)
    ahead, infonce = [], []
    for values, theirs in ((difference, reference), (difference.T, reference.T)):
        ahead.append((values > values.diagonal()[:, None])[negative].double().mean())
        logits = (theirs - theirs.diagonal()[:, None]) * batch.logit_scale.to(theirs.dtype)
        infonce.append(log_math.log_add(torch.logsumexp(logits.masked_fill(~negative, -torch.inf), dim=1), 1.0).mean())
    return {
        "reference_ahead": torch.stack(ahead).mean().item(),
        "reference_infonce": torch.stack(infonce).mean().item(),
    }
