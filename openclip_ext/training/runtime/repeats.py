"""Report samples that repeat a caption or an image of their batch, because most losses count them as negatives."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger

logger = get_logger(__name__)

MEASURED_STEPS = 10
# Smallest share of repeating samples that is reported.
_NOTABLE_SHARE = 0.05


class RepeatReport:
    """A log of the share of a batch's samples that repeat a caption or an image, once after a run's first ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._steps: list[Tensor] = []

    def add(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Measure a step's micro-batches, which are in host memory. Collective: all ranks call it."""
        if self._left == 0 or "image_hash" not in batches[0]:
            return
        names = ("caption_hash", "image_hash")
        self._steps.append(torch.stack([torch.cat([batch[name] for batch in batches]) for name in names]))
        self._left -= 1
        if self._left:
            return
        parts = distributed.all_gather_object(torch.stack(self._steps))
        shares = [statistics.fmean(map(_repeating, of)) for of in torch.cat(parts, dim=-1).unbind(dim=1)]
        if distributed.is_rank0() and max(shares) >= _NOTABLE_SHARE:
            logger.info(
                f"Of the samples of a batch, {shares[0]:.0%} share their caption and {shares[1]:.0%} their image with "
                "another sample: they count as negatives. To exclude them, set --equal-captions mask."
            )


def _repeating(hashes: Tensor) -> float:
    """Return the share of hashes ``(B,)`` that occur more than once."""
    _, place, count = hashes.unique(return_inverse=True, return_counts=True)
    return float((count[place] > 1).double().mean())
