"""Ranks in retrieval, for the validation during training, the evaluation harness and the experiments."""

import torch
from torch import Tensor

# Of the similarity matrix at a time: 64 MiB of float32.
_CHUNK_ELEMENTS = 2**24


def ranks_of_best_match(
    queries: Tensor, items: Tensor, query_labels: Tensor, item_labels: Tensor, ties_by_index: bool = False
) -> Tensor:
    """Count, for each query, the other labels' items that come before its best match, an item of its own label.

    Similarities that are not finite count against the query: a match that is not finite comes last, and another item that is
    not finite comes first.

    Args:
        queries: ``(Q, d)``.
        items: ``(N, d)``.
        query_labels: ``(Q,)``; at least one item has each.
        item_labels: ``(N,)``.
        ties_by_index: whether items that tie with the match come before it where their index is lower, as under
            ``argmax``; else half of them do, so that constant embeddings score as chance would.

    Returns:
        ``(Q,)`` float64, 0 where the match comes first.
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
