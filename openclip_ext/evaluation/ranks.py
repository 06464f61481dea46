"""Rank the right answers of retrieval: for validation during training, compare, the evaluation harness and experiments."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Maximum number of elements of the similarity matrix that are computed at a time: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24

RECALL_AT = (1, 5, 10)
IMAGE_TO_TEXT, TEXT_TO_IMAGE = "image_to_text", "text_to_image"


@dataclass(frozen=True)
class Ranks:
    """Ranks of the best right item of ``Q`` queries, if items of equal similarity are in random order.

    Attributes:
        ahead: ``(Q,)`` number of wrong items with a larger similarity than the best right item.
        wrong, right: ``(Q,)`` number of wrong and of right items with the similarity of the best right item.
    """

    ahead: Tensor
    wrong: Tensor
    right: Tensor

    def __getitem__(self, queries: Tensor) -> "Ranks":
        return Ranks(self.ahead[queries], self.wrong[queries], self.right[queries])

    def mean(self) -> Tensor:
        """Return the expected rank ``(Q,)`` float64; 0 means that a right item ranks first."""
        return self.ahead + self.wrong.double() / (self.right + 1)

    def hits(self, k: int = 1) -> Tensor:
        """Return the probability ``(Q,)`` float64 that a right item is among the first ``k``; 0 or 1 without ties."""
        missed = torch.ones_like(self.ahead, dtype=torch.float64)
        for drawn in range(k):  # of the tied items, the first k - ahead are drawn without replacement
            left = (self.wrong - drawn).clamp(min=0)
            share = left.double() / (left + self.right).clamp(min=1)
            missed *= share.masked_fill(self.ahead + drawn >= k, 1)
        return 1 - missed


def ranks_of_best_match(queries: Tensor, items: Tensor, right: Tensor) -> Ranks:
    """Return the ranks of each query's best right item.

    A NaN similarity counts against the query: a right item with NaN ranks last, and a wrong item with NaN ranks ahead.

    Args:
        queries, items: Embeddings ``(Q, d)`` and ``(N, d)``.
        right: ``(P, 2)`` int64, the pairs of a query and a right item. Each query needs at least one right item.
    """
    rows = max(1, _CHUNK_ELEMENTS // max(1, len(items)))
    right = right[right[:, 0].argsort()].to(queries.device)
    counts = right[:, 0].bincount(minlength=len(queries)).split(rows)
    pairs = right.split([int(part.sum()) for part in counts])
    found = []
    for number, (part, own) in enumerate(zip(queries.split(rows), pairs, strict=True)):
        similarities = part @ items.T
        matches = torch.zeros_like(similarities, dtype=torch.bool)
        matches[own[:, 0] - number * rows, own[:, 1]] = True
        best = similarities.masked_fill(~matches, -torch.inf).amax(dim=1, keepdim=True)
        tied, ahead = similarities == best, ~(similarities <= best)
        found.append([(of & which).sum(dim=1) for of, which in ((ahead, ~matches), (tied, ~matches), (tied, matches))])
    return Ranks(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def image_text_ranks(
    images: Tensor, texts: Tensor, image_groups: Sequence[Hashable], caption_groups: Sequence[Hashable]
) -> dict[str, Ranks]:
    """Rank the right answers of ``N`` samples in both directions, :data:`IMAGE_TO_TEXT` and :data:`TEXT_TO_IMAGE`.

    Samples of one image group have equal images, and samples of one caption group have equal captions. An image and a caption
    match if at least one sample has both. Each different image and each different caption is one item, so equal items neither
    compete nor tie. The result has the ranks of every sample as a query, so samples with equal queries have equal ranks.

    Args:
        images, texts: Embeddings ``(N, d)`` of the samples.
        image_groups, caption_groups: ``N`` values each, equal for equal images and equal captions, such as hashes.
    """
    device = images.device
    (image, first_images), (text, first_texts) = _numbered(image_groups, device), _numbered(caption_groups, device)
    images, texts, pairs = images[first_images], texts[first_texts], torch.stack([image, text], dim=1).unique(dim=0)
    return {
        IMAGE_TO_TEXT: ranks_of_best_match(images, texts, pairs)[image],
        TEXT_TO_IMAGE: ranks_of_best_match(texts, images, pairs.flip(1))[text],
    }


def retrieval_metrics(
    images: Tensor,
    texts: Tensor,
    image_groups: Sequence[Hashable] | None = None,
    caption_groups: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Return the :func:`rank_metrics` of paired embeddings ``(N, d)``. For the groups, see :func:`image_text_ranks`.

    None (default) means that all rows differ.
    """
    rows = range(len(images))
    groups = (rows if of is None else of for of in (image_groups, caption_groups))
    return rank_metrics(image_text_ranks(images, texts, *groups))


def rank_metrics(ranks: Mapping[str, Ranks]) -> dict[str, float]:
    """Return the mean and median rank (from 1) and the recall of each direction, with OpenCLIP's names.

    The names are ``image_to_text_R@1``, ... Items of equal similarity are in random order: ranks are expected ranks, and
    recall is the probability of a hit. For ``ranks``, see :func:`image_text_ranks`.
    """
    metrics = {}
    for name, of in ranks.items():
        expected = of.mean()
        metrics[f"{name}_mean_rank"] = float(expected.mean()) + 1
        metrics[f"{name}_median_rank"] = math.floor(float(expected.quantile(0.5))) + 1
        for k in RECALL_AT:
            metrics[f"{name}_R@{k}"] = float(of.hits(k).mean())
    return metrics


def chance(image_groups: Sequence[Hashable], caption_groups: Sequence[Hashable]) -> dict[str, float]:
    """Return R@1 of random guessing in both directions. For the arguments, see :func:`image_text_ranks`."""
    equal = torch.ones(len(image_groups), 1)
    ranks = image_text_ranks(equal, equal, image_groups, caption_groups)
    return {name: float(of.hits().mean()) for name, of in ranks.items()}


def repeats(image_groups: Sequence[Hashable], caption_groups: Sequence[Hashable]) -> str:
    """Return a text with the numbers of different captions and images; empty if all samples differ."""
    captions, images = (len(set(groups)) for groups in (caption_groups, image_groups))
    if min(captions, images) == len(caption_groups):
        return ""
    return f"{captions:,} distinct captions and {images:,} distinct images: equal ones count as right answers"


def _numbered(groups: Sequence[Hashable], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each sample's group number ``(N,)``, and the first sample of each group, in ascending order."""
    first: dict[Hashable, int] = {}
    for sample, group in enumerate(groups):
        first.setdefault(group, sample)
    number = {group: place for place, group in enumerate(first)}
    return torch.tensor([number[group] for group in groups], device=device), torch.tensor(
        [*first.values()], device=device
    )
