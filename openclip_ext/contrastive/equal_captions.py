"""How a loss treats two samples with equal captions.

Web data repeat captions. OpenCLIP's loss, and every loss here by default, takes the image of another sample with the same
caption for a negative. Labels that are equal where captions are let a loss treat them in another way.
With ``P_i`` the samples of anchor ``i``'s label, itself included, and ``N_i`` all others:

- ``negative``: the negatives are all ``j ≠ i``; the labels play no part;
- ``mask``: the negatives are ``N_i``, in every sum and in every count;
- ``positive``: as ``mask``, and the mean of ``s_ij`` over ``P_i`` takes the place of ``s_ii``.

Where ``ε`` does not matter, the loss is then the mean over the positives of ``−s_ip + τ·log mean_{j∈N_i} exp(s_ij/τ)``, the
supervised contrastive loss (Khosla et al., NeurIPS 2020, 'out') without the positives in the denominator.
Page: ``docs/equal-captions.md``.
"""

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import LocalBatch

NEGATIVE, POSITIVE = "negative", "positive"


def labels_of(positives: object, batch: LocalBatch) -> Tensor:
    """Return the labels ``(B_local,)`` int64 on the features' device; raise ValueError if they are something else."""
    if positives is None:
        raise ValueError(
            "this loss was created with equal_captions and needs positives=: a (batch,) int64 tensor, equal numbers for equal "
            "captions"
        )
    size = len(batch.image)
    if not isinstance(positives, Tensor) or positives.shape != (size,) or positives.dtype != torch.int64:
        found = repr(type(positives).__name__)
        if isinstance(positives, Tensor):
            found = f"{tuple(positives.shape)} {positives.dtype}"
        raise ValueError(f"positives: expected int64 of shape ({size},), found {found}")
    return positives.to(batch.image.device, non_blocking=True)
