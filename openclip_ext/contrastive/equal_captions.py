"""What two samples with equal captions are to each other.

Web data repeat captions. OpenCLIP's loss, and every loss here by default, takes the image of another sample with the same
caption for a negative. With the labels of the captions, equal where these are equal, a loss can do otherwise. With ``P_i``
the samples of anchor ``i``'s label, itself included, and ``N_i`` all others:

- ``negative``: the negatives are all ``j ≠ i``; the labels play no part;
- ``mask``: the negatives are ``N_i``, in every sum and in every count;
- ``positive``: as ``mask``, and the mean of ``s_ij`` over ``P_i`` takes the place of ``s_ii``.

Where ``ε`` does not matter, the loss is then the mean over the positives of ``−s_ip + τ·log mean_{j∈N_i} exp(s_ij/τ)``, the
supervised contrastive loss (Khosla et al., NeurIPS 2020, 'out') without the positives in the denominator.
Page: ``docs/equal-captions.md``.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openclip_ext.contrastive.normalizer import Normalizer
    from openclip_ext.contrastive.objectives import Objective

NEGATIVE, POSITIVE = "negative", "positive"


def refuse_equal_captions(choice: str, objective: "type[Objective]", normalizer: "type[Normalizer]") -> None:
    """Raise ValueError if a loss of these parts cannot treat equal captions so, with the reason."""
    if choice == NEGATIVE:
        return
    if normalizer.refuses_labels:
        raise ValueError(f"equal_captions={choice}: {normalizer.refuses_labels}; use negative, or another loss")
    if choice == POSITIVE and objective.estimand_type.includes_positive:
        raise ValueError(
            f"equal_captions={choice}: this loss estimates {objective.estimand_type.formula}, which has room for one positive "
            "pair; use mask, or another loss"
        )


def check_labels(labels: object, features: Tensor) -> Tensor:
    """The labels ``(B_local,)`` as int64 on the features' device.

    Raises:
        ValueError: there are none, or they are of another shape or type.
    """
    if labels is None:
        raise ValueError(
            "this loss was created with equal_captions and needs positives=, a (batch,) int64 tensor: equal numbers for equal "
            "captions"
        )
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or tuple(labels.shape) != (len(features),):
        found = f"{tuple(labels.shape)} {labels.dtype}" if isinstance(labels, Tensor) else repr(type(labels).__name__)
        raise ValueError(f"positives: expected int64 of shape ({len(features)},), found {found}")
    return labels.to(features.device, non_blocking=True)
