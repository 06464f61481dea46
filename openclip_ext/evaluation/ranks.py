"""Compute retrieval ranks for validation during training, the evaluation harness and experiments."""

import torch
from torch import Tensor

# Maximum number of elements of the similarity matrix that are computed at a time: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


def ranks_of_best_match(
    queries: Tensor, items: Tensor, query_labels: Tensor, item_labels: Tensor, ties_by_index: bool = False
) -> Tensor:
    """Return each query's rank: the number of items with other labels that rank before the best item with its own label.

    A NaN similarity counts against the query: a match with NaN ranks last, and another item with NaN ranks before the match.

    Args:
        queries, items: Embeddings ``(Q, d)`` and ``(N, d)``.
        query_labels, item_labels: ``(Q,)`` and ``(N,)``. Each query needs at least one item with its label.
        ties_by_index: Whether items that tie with the match rank by index, as in ``argmax``. False (default) means that half
            of the tied items rank before the match, so constant embeddings score at chance.

    Returns ``(Q,)`` float64; 0 means that the match ranks first.
    """
    index = torch.arange(len(items), device=items.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, len(items)))
    ranks = []
    for part, labels in zip(queries.split(rows), query_labels.split(rows), strict=True):
        similarities = part @ items.T
        matches = labels[:, None] == item_labels
        best, first = similarities.masked_fill(~matches, -torch.inf).max(dim=1, keepdim=True)
        in_front = ~(similarities <= best) & ~matches
        tied = (similarities == best) & ~matches
        weighted = (tied & (index < first)).sum(dim=1) if ties_by_index else tied.sum(dim=1).double() / 2
        ranks.append(in_front.sum(dim=1) + weighted.double())
    return torch.cat(ranks)
