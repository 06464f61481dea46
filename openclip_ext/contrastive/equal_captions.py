"""What two samples with equal captions are to each other.

Web data repeat captions. OpenCLIP's loss, and every loss here by default, takes the image of another sample with the same
caption for a negative. With labels that are equal where captions are, or a mask of such pairs, a loss can do otherwise.
With ``P_i`` the samples of anchor ``i``'s label, itself included, and ``N_i`` all others:

- ``negative``: the negatives are all ``j ≠ i``; the labels play no part;
- ``mask``: the negatives are ``N_i``, in every sum and in every count;
- ``positive``: as ``mask``, and the mean of ``s_ij`` over ``P_i`` takes the place of ``s_ii``.

Where ``ε`` does not matter, the loss is then the mean over the positives of ``−s_ip + τ·log mean_{j∈N_i} exp(s_ij/τ)``, the
supervised contrastive loss (Khosla et al., NeurIPS 2020, 'out') without the positives in the denominator.
Page: ``docs/equal-captions.md``.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.checks import can_read_values
from openclip_ext.contrastive.loop_checks import CHECKED_CALLS

NEGATIVE, POSITIVE = "negative", "positive"


def labels_of(positives: object, batch: LocalBatch) -> Tensor:
    """Return the labels ``(B_local,)`` int64, on the features' device, of ``positives``: labels, or a mask of pairs.

    A mask is checked. Elsewhere than on the CPU that waits for the device, and so ends after two calls in training mode.

    Args:
        positives: ``(B_local,)`` int64 labels, or the ``(B_local, B_local)`` bool mask of the pairs with equal captions.
        batch: the samples of the call.

    Raises:
        ValueError: there are none, they are of another shape or type, a mask says that captions are equal in a way that no
            captions are, or there is a mask with several processes.
    """
    if positives is None:
        raise ValueError(
            "this loss was created with equal_captions and needs positives=: a (batch,) int64 tensor, equal numbers for equal "
            "captions, or a (batch, batch) bool tensor of the pairs with equal captions"
        )
    size = len(batch.image)
    if _is(positives, torch.bool, size, size):
        positives = _labels_of_mask(positives, batch.call)
    elif not _is(positives, torch.int64, size):
        found = repr(type(positives).__name__)
        if isinstance(positives, Tensor):
            found = f"{tuple(positives.shape)} {positives.dtype}"
        raise ValueError(
            f"positives: expected int64 of shape ({size},) or bool of shape ({size}, {size}), found {found}"
        )
    return positives.to(batch.image.device, non_blocking=True)


def _is(value: object, dtype: torch.dtype, *shape: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == dtype and value.shape == shape


def _labels_of_mask(mask: Tensor, call: int) -> Tensor:
    """Return the position ``(B,)`` of each sample's first positive, itself included."""
    if distributed.world_size() > 1:
        raise ValueError(
            f"positives: found a mask, and there are {distributed.world_size()} processes. A mask says nothing of the other "
            "processes' captions: pass labels, a (batch,) int64 tensor"
        )
    labels = mask.byte().argmax(dim=1)
    checked = can_read_values(mask) and (mask.is_cpu or call < CHECKED_CALLS)
    if checked and not mask.equal(labels[:, None] == labels):
        raise ValueError(f"positives: {_contradiction(mask)}")
    return labels


def _contradiction(mask: Tensor) -> str:
    """Return what is wrong with a mask ``(B, B)`` that no captions can have."""
    if not mask.diagonal().all():
        return f"sample {_first(~mask.diagonal())[0]} is no positive of itself: set the mask's diagonal"
    if not mask.equal(mask.T):
        i, j = _first(mask & ~mask.T)
        return f"sample {j} is a positive of {i}, and {i} is none of {j}: make the mask symmetric"
    i, k = _first((mask.float() @ mask.float() > 0) & ~mask)
    j = _first(mask[i] & mask[k])[0]
    return (
        f"samples {i} and {j} are positives of each other, {j} and {k}, too, but not {i} and {k}. Two captions that are both "
        "equal to a third are equal: set the pair, or leave one of the others out"
    )


def _first(condition: Tensor) -> list[int]:
    return condition.nonzero()[0].tolist()
