"""How a loss treats two samples with equal captions.

In web data, several samples may have equal captions. By default, all losses treat samples with equal captions as negatives of
each other, like OpenCLIP's loss. The option ``equal_captions`` has three values. ``mask`` and ``positive`` need labels (equal
for equal captions), or a mask of the pairs with equal captions. In training, samples with equal image files also count as
equal. ``P_i`` are the samples that equal anchor ``i``, including ``i``. ``N_i`` are all other samples.

- ``negative``: the negatives of anchor ``i`` are all samples ``j ≠ i``;
- ``mask``: the negatives are ``N_i``, in every sum and in every count;
- ``positive``: the negatives are ``N_i``, and the mean of ``s_ij`` over ``P_i`` replaces ``s_ii``.

Parts with a queue of earlier embeddings (``queueclip``, a solved temperature) also store labels, and exclude samples of the
queue that share a label with the anchor. A mask has no labels, so there, captions of other batches count as different.

With ``positive`` and a negligible ``ε``, the loss is the mean of ``−s_ip + τ·log mean_{j∈N_i} exp(s_ij/τ)`` over the positives
``p``. This is the supervised contrastive loss ``L_out`` (Khosla et al., NeurIPS 2020) without positives in the denominator.
Page: ``docs/equal-captions.md``.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.checks import can_read_values, described
from openclip_ext.contrastive.loop_checks import CHECKED_CALLS

NEGATIVE, POSITIVE = "negative", "positive"


def read_labels(positives: object, batch: LocalBatch) -> Tensor:
    """Return ``positives`` as labels, ``(B_local,)`` or ``(B_local, k)`` int64, on the device of the features.

    ``positives`` are such labels, or a ``(B_local, B_local)`` bool mask of the pairs with equal captions. Two samples with
    ``k`` labels each are equal if they share at least one. On the CPU, every mask is checked for consistency. On other
    devices, where the check synchronizes, masks are checked only until the loss has been called twice in training mode.

    Raises:
        ValueError: ``positives`` is missing, has a wrong shape or dtype, is an inconsistent mask, or is a mask in a run with
            several processes.
    """
    size = len(batch.image)
    if positives is None:
        raise ValueError(
            "positives: missing. With equal_captions, pass positives=: int64 labels (batch,), equal for equal captions, or a "
            "bool mask (batch, batch) of the pairs with equal captions"
        )
    if _is_tensor(positives, torch.bool, size, size):
        positives = _mask_to_labels(positives, batch.call)
    elif not (_is_tensor(positives, torch.int64, size) or _is_tensor(positives, torch.int64, size, None)):
        expected = f"int64 of shape ({size},) or ({size}, k), or bool of shape ({size}, {size})"
        raise ValueError(f"positives: expected {expected}, found {described(positives)}")
    return positives.to(batch.image.device, non_blocking=True)


def _is_tensor(value: object, dtype: torch.dtype, *shape: int | None) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of this dtype and shape. None stands for any size of a dimension."""
    if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim != len(shape):
        return False
    return all(expected in (None, size) for expected, size in zip(shape, value.shape, strict=True))


def _mask_to_labels(mask: Tensor, call: int | Tensor) -> Tensor:
    """Return labels ``(B,)``, which are equal for equal captions, and different in each call."""
    if distributed.world_size() > 1:
        raise ValueError(
            f"positives: a mask cannot compare captions across {distributed.world_size()} processes: pass labels, an int64 "
            "tensor of shape (batch,)"
        )
    labels = mask.byte().argmax(dim=1)
    is_checked = can_read_values(mask) and bool(mask.is_cpu or call < CHECKED_CALLS)
    equal = labels[:, None] == labels
    if is_checked and not mask.equal(equal):
        i, j = (mask != equal).nonzero()[0].tolist()
        raise ValueError(
            f"positives: inconsistent mask at samples {i} and {j}: expected a symmetric mask with a true diagonal, in which "
            "two captions that equal a third caption equal each other. Correct this pair in the mask"
        )
    return labels + call * len(mask)
