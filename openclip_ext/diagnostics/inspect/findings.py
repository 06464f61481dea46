"""Find duplicates, false negatives, misfits, hard and easy samples from the similarities of paired embeddings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclip_ext.cli.options import cli_field
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.diagnostics.estimation_error import anchor_temperatures, exact_log_normalizers
from openclip_ext.evaluation.encoder import Embeddings

# Rows and columns of a block of similarities. A block needs 64 MiB, and four blocks are in memory at a time.
_ROWS, _COLUMNS = 2048, 8192
# Tolerance for float32 rounding. For example, an image's similarities to two equal captions must count as equal.
_ROUNDING = 1e-5
# Ratio of the standard deviation of a normal distribution to its median absolute deviation.
_MAD_TO_STD = 1.4826

DEFINITIONS = {
    "copies": "two samples with the same image file, byte for byte; they are in no other category of duplicate images",
    "duplicates": "two samples whose images have a cosine similarity of at least {duplicate_image:g}, and whose captions "
    "have a cosine similarity of at least {duplicate_caption:g}",
    "duplicate-images": "two samples whose images have a cosine similarity of at least {duplicate_image:g}",
    "duplicate-captions": "two samples whose captions have a cosine similarity of at least {duplicate_caption:g}",
    "false-negatives": "two samples: the image of one is at least as similar to the caption of the other as both samples' "
    "images are to their own captions. It is also at least as similar as in the best {best_share:g} % of all such pairs",
    "misfit-captions": "captions whose largest cosine similarity to any image is more than {deviations:g} standard "
    "deviations (1.4826 median absolute deviations) below the median of these largest similarities",
    "misfit-images": "images whose largest cosine similarity to any caption is more than {deviations:g} standard "
    "deviations (1.4826 median absolute deviations) below the median of these largest similarities",
    "hardest": "the {extremes:,} samples with the largest log-normalizers (mean over image and text): other samples "
    "match at least as well as the correct caption or image",
    "easiest": "the {extremes:,} samples with the smallest log-normalizers (mean over image and text): no other sample is "
    "similar",
}
PAIRS = tuple(DEFINITIONS)[:5]
OF_IMAGES = ("duplicates", "duplicate-images")  # categories that contain copies until they are separated


@dataclass(frozen=True)
class Thresholds:
    """Thresholds in the definitions of the categories."""

    duplicate_image: float = cli_field(0.98, "smallest cosine similarity of duplicate images", minimum=-1, maximum=1)
    duplicate_caption: float = cli_field(
        0.98, "smallest cosine similarity of duplicate captions", minimum=-1, maximum=1
    )
    false_negative_quantile: float = cli_field(
        0.9,
        "minimum similarity of false negatives, as a quantile of the similarities of positive pairs (0: no minimum)",
        minimum=0,
        maximum=1,
    )
    deviations: float = cli_field(
        3.0, "minimum distance of a misfit's best similarity below the median, in standard deviations", minimum=0
    )
    extremes: int = cli_field(100, "number of hardest samples and of easiest samples", minimum=0)
    max_pairs: int = cli_field(
        10_000, "maximum number of pairs to list per category, the most similar first; all pairs are counted", minimum=1
    )

    def definition(self, category: str) -> str:
        """Return a category's definition with these thresholds."""
        return DEFINITIONS[category].format(best_share=round(100 * (1 - self.false_negative_quantile), 6), **vars(self))


@dataclass(frozen=True)
class Found:
    """Findings of one category, the clearest first.

    Attributes:
        count: Number of all findings. The arrays contain at most ``Thresholds.max_pairs`` pairs.
        samples: Rows of the embeddings: ``(k, 2)`` for pairs (the smaller row first) and for misfits (with their best match),
            else ``(k, 1)``.
        value: ``(k,)`` similarities or log-normalizers. For ``duplicates``, the smaller of the image and caption similarities.
    """

    count: int
    samples: np.ndarray
    value: np.ndarray

    def entries(self) -> list[list[Any]]:
        """Return ``[sample, value]`` or ``[sample, other sample, value]`` for each listed finding."""
        return [[*samples, value] for samples, value in zip(self.samples.tolist(), self.value.tolist(), strict=True)]

    def shown(self, show: int) -> list[int]:
        """Return the places of the findings to show: of pairs, the surest half of ``show`` and the least certain ones."""
        places = list(range(len(self.samples)))
        if len(places) <= show or self.samples.shape[1] == 1:
            return places[:show]
        surest = -(-show // 2)
        return places[:surest] + places[len(places) - (show - surest) :]

    def redundant(self) -> set[int]:
        """Return samples whose exclusion leaves no pair: the second sample of each pair whose first sample is kept."""
        left_out: set[int] = set()
        for first, second in sorted(self.samples.tolist(), key=lambda pair: pair[::-1]):
            if first not in left_out:
                left_out.add(second)
        return left_out


def separate_copies(found: dict[str, Found], hashes: Mapping[int, int]) -> dict[str, Found]:
    """Move pairs with equal image files from the categories of duplicate images to ``copies``, which comes first.

    ``hashes`` contains the hash of the image file of each listed sample of these categories.
    """
    result = dict(found)
    for name in OF_IMAGES:  # the second one contains all copies
        listed = found[name]
        same = np.array([hashes[first] == hashes[second] for first, second in listed.samples.tolist()], dtype=bool)
        copies = Found(int(same.sum()), listed.samples[same], listed.value[same])
        result[name] = Found(listed.count - copies.count, listed.samples[~same], listed.value[~same])
    return {"copies": copies, **result}


class _StrongestPairs:
    """A counter of pairs that stores the pairs with the largest values."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._kept = np.empty((3, 0))

    def add(self, rows: Tensor, columns: Tensor, hit: Tensor, value: Tensor) -> None:
        """Add the pairs of ``rows`` ``(R,)`` and ``columns`` ``(C,)`` at the positions where ``hit`` ``(R, C)`` is True."""
        count = int(hit.sum())
        self.count += count
        if count > self._limit:  # for example if all samples have the same embedding
            strongest = value.masked_fill(~hit, -torch.inf).flatten().topk(self._limit, sorted=False).indices
            row, column = strongest // hit.shape[1], strongest % hit.shape[1]
        else:
            row, column = torch.nonzero(hit, as_tuple=True)
        first, second = rows[row], columns[column]
        found = [torch.minimum(first, second), torch.maximum(first, second), value[row, column]]
        kept = np.concatenate([self._kept, torch.stack([part.double() for part in found]).cpu().numpy()], axis=1)
        self._kept = kept[:, np.lexsort((kept[1], kept[0], -kept[2]))[: self._limit]]

    def found(self) -> Found:
        return Found(self.count, self._kept[:2].T.astype(np.int64), self._kept[2])


class _Best:
    """The largest similarity of each anchor, and the row that has this similarity to the anchor."""

    def __init__(self, anchors: int, device: torch.device) -> None:
        self._value = torch.full((anchors,), -torch.inf, device=device)
        self._partner = torch.zeros(anchors, dtype=torch.int64, device=device)

    def add(self, place: slice, columns: Tensor, similarities: Tensor) -> None:
        """Update the maxima with the similarities ``(R, C)`` between the anchors at ``place`` and the rows ``columns``."""
        value, column = similarities.max(dim=1)
        better = value > self._value[place]
        self._value[place] = torch.where(better, value, self._value[place])
        self._partner[place] = torch.where(better, columns[column], self._partner[place])

    def misfits(self, rows: np.ndarray, deviations: float) -> Found:
        value, partner = self._value.cpu().numpy(), self._partner.cpu().numpy()
        median = np.median(value)
        limit = median - deviations * _MAD_TO_STD * np.median(np.abs(value - median))
        places = np.flatnonzero(value < limit)
        places = places[np.argsort(value[places], kind="stable")]
        return Found(len(places), np.stack([rows[places], partner[places]], axis=1), value[places])


@torch.no_grad()
def log_normalizers(
    loss: ContrastiveLoss,
    embeddings: Embeddings,
    anchors: Tensor,
    device: torch.device,
    reference: EmbeddingStore | None = None,
) -> tuple[Tensor, bool]:
    """Return log-normalizers ``(A,)`` of the rows ``anchors``, and whether the loss stored them.

    A sample's log-normalizer is the mean over its image and its text. If the loss does not store log-normalizers, they are
    computed exactly over all samples. A steered loss may need its ``reference`` to predict the temperatures.
    """
    is_stored = isinstance(loss, GlobalContrastiveLoss) and loss.normalizer.needs_index and not loss.steers
    scale = torch.tensor(embeddings.logit_scale, device=device)
    parts = []
    # Parts have equal sizes to avoid a part with one sample, whose log-normalizer a loss cannot estimate.
    for rows in anchors.tensor_split(math.ceil(len(anchors) / _ROWS)):
        image, text, index = (part[rows].to(device) for part in (embeddings.image, embeddings.text, embeddings.index))
        if is_stored:
            alpha = torch.stack(loss.log_normalizers(image, text, scale, index))
        else:
            rows_of_reference = None if reference is None else reference.rows(embeddings.index[rows])
            tau = anchor_temperatures(loss, image, text, scale, index, rows_of_reference)
            alpha = exact_log_normalizers(embeddings.image, embeddings.text, rows.to(device), tau)
        parts.append(alpha.double().mean(dim=0).cpu())
    return torch.cat(parts), is_stored


@torch.no_grad()
def find(
    embeddings: Embeddings, anchors: Tensor, difficulty: Tensor, thresholds: Thresholds, device: torch.device
) -> dict[str, Found]:
    """Return the findings of all categories but ``copies``. In each pair, at least one sample is an anchor.

    ``anchors`` ``(A,)`` contains ascending rows of the embeddings, which are compared with all rows. ``difficulty`` ``(A,)``
    contains the :func:`log_normalizers` of the anchors.
    """
    positive = torch.linalg.vecdot(embeddings.image, embeddings.text)
    if not torch.isfinite(positive).all():
        raise ValueError(
            f"{int((~torch.isfinite(positive)).sum())} embeddings are not finite: use an earlier --checkpoint"
        )
    floor = float(np.quantile(positive.numpy(), thresholds.false_negative_quantile))
    is_anchor = torch.zeros(len(positive), dtype=torch.bool)
    is_anchor[anchors] = True
    pairs = {name: _StrongestPairs(thresholds.max_pairs) for name in PAIRS if name != "copies"}
    best = {side: _Best(len(anchors), device) for side in ("misfit-captions", "misfit-images")}
    # Rounding may give equal embeddings a similarity below 1.
    limits = [min(limit, 1 - _ROUNDING) for limit in (thresholds.duplicate_image, thresholds.duplicate_caption)]
    for first in range(0, len(anchors), _ROWS):
        place = slice(first, first + _ROWS)
        rows = anchors[place]
        image, text = (side[rows].to(device) for side in (embeddings.image, embeddings.text))
        for columns in torch.arange(len(positive)).split(_COLUMNS):
            images, texts = (side[columns].to(device).T for side in (embeddings.image, embeddings.text))
            # A pair of two anchors is computed twice, but is new only once. A pair with one anchor is computed once.
            is_new = ((rows[:, None] < columns) | ~is_anchor[columns]).to(device)
            own = torch.maximum(positive[rows, None], positive[columns]).to(device)
            of_images, of_captions = image @ images, text @ texts
            caption_of_column, image_of_column = image @ texts, text @ images
            same_image, same_caption = of_images >= limits[0], of_captions >= limits[1]
            crossed = torch.maximum(caption_of_column, image_of_column)
            hits = {
                "duplicates": (same_image & same_caption, torch.minimum(of_images, of_captions)),
                "duplicate-images": (same_image, of_images),
                "duplicate-captions": (same_caption, of_captions),
                "false-negatives": (crossed >= own.clamp(min=floor) - _ROUNDING, crossed),
            }
            columns = columns.to(device)
            for name, (hit, value) in hits.items():
                pairs[name].add(rows.to(device), columns, hit & is_new, value)
            best["misfit-captions"].add(place, columns, image_of_column)
            best["misfit-images"].add(place, columns, caption_of_column)
    all_rows, alpha = anchors.numpy(), difficulty.numpy()
    order = np.argsort(alpha, kind="stable")
    ends = {"hardest": order[::-1][: thresholds.extremes], "easiest": order[: thresholds.extremes]}
    return {
        **{name: kept.found() for name, kept in pairs.items()},
        **{side: values.misfits(all_rows, thresholds.deviations) for side, values in best.items()},
        **{name: Found(len(end), all_rows[end, None], alpha[end]) for name, end in ends.items()},
    }
