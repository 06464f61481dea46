"""Report what the first batches of a run show about its data: repeated captions or images, and captions that are cut."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger

logger = get_logger(__name__)

MEASURED_STEPS = 10
# Smallest share of samples that is reported.
_NOTABLE_SHARE = 0.05


class BatchReport:
    """A report of a run's first ``steps`` steps in the log: samples that repeat a caption or an image, captions that are cut.

    Most losses count repeating samples as negatives, or exclude them.

    Args:
        equal_captions: The loss's option; None for a loss without it.
        padding: The token that fills texts up to the context length; None if texts have no fixed length.
    """

    def __init__(self, steps: int, equal_captions: str | None, padding: int | None) -> None:
        self._left = steps
        self._equal_captions = equal_captions
        self._padding = padding
        self._steps: list[Tensor] = []

    def add(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Measure a step's micro-batches, which are in host memory. Collective: all ranks call it."""
        if self._left == 0 or "image_hash" not in batches[0]:
            return
        columns = [torch.cat([batch[name] for batch in batches]) for name in ("caption_hash", "image_hash")]
        if self._padding is not None:
            # A text without padding has exactly the context length, or more likely, it was longer.
            columns.append(torch.cat([batch["text"][:, -1] for batch in batches]) != self._padding)
        self._steps.append(torch.stack(columns))
        self._left -= 1
        if self._left:
            return
        measured = torch.cat(distributed.all_gather_object(torch.stack(self._steps)), dim=-1)  # (steps, 2 or 3, B)
        if distributed.is_rank0():
            self._report_repeats(measured[:, :2])
            if self._padding is not None:
                self._report_cut_captions(float(measured[:, 2].double().mean()))

    def _report_cut_captions(self, share: float) -> None:
        if share >= _NOTABLE_SHARE:
            logger.info(
                f"{share:.0%} of the captions fill the model's context length, so they are probably cut. To train on all "
                "sentences, set --draw-sentences."
            )

    def _report_repeats(self, hashes: Tensor) -> None:
        if self._equal_captions in (None, "negative"):
            shares = [statistics.fmean(map(_repeating, of)) for of in hashes.unbind(dim=1)]
            cure = "To exclude them, set --equal-captions mask"
            if self._equal_captions is None:
                cure = "To exclude them, use a loss such as queueclip with --equal-captions mask"
            if max(shares) >= _NOTABLE_SHARE:
                logger.info(
                    f"Of the samples of a batch, {shares[0]:.0%} share their caption and {shares[1]:.0%} their image with "
                    f"another sample: they count as negatives. {cure}."
                )
        elif alike := int((hashes == hashes[..., :1]).all(dim=-1).any(dim=-1).sum()):
            logger.warning(
                f"In {alike} of the first {len(hashes)} steps, all samples have the same caption or image, so there are no "
                "negatives: these steps train nothing. Raise --batch-size, or set --equal-captions negative."
            )


def _repeating(hashes: Tensor) -> float:
    """Return the share of hashes ``(B,)`` that occur more than once."""
    _, place, count = hashes.unique(return_inverse=True, return_counts=True)
    return float((count[place] > 1).double().mean())
