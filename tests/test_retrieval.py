"""Ranks in retrieval equal the ranks of a full sort, even with ties. Non-finite embeddings never match."""

import pytest
import torch

from openclip_ext.evaluation import ranks as retrieval
from openclip_ext.evaluation.ranks import ranks_of_best_match
from openclip_ext.evaluation.retrieval import retrieval_metrics


@pytest.mark.parametrize("chunk", [1, 7, 2**24])
@pytest.mark.parametrize("ties_by_index", [True, False])
def test_ranks_are_those_of_a_full_sort(chunk, ties_by_index, monkeypatch):
    monkeypatch.setattr(retrieval, "_CHUNK_ELEMENTS", 50 * chunk)
    generator = torch.Generator().manual_seed(0)
    queries, items = torch.randn(30, 4, generator=generator), torch.randn(50, 4, generator=generator)
    query_labels, item_labels = torch.randint(0, 7, (30,), generator=generator), torch.arange(50) % 7
    order = (queries @ items.T).argsort(dim=1, descending=True)
    expected = (item_labels[order] == query_labels[:, None]).int().argmax(dim=1).double()
    assert torch.equal(ranks_of_best_match(queries, items, query_labels, item_labels, ties_by_index), expected)


def test_a_collapsed_model_ranks_as_chance():
    same, labels = torch.ones(9, 4), torch.arange(9)
    assert ranks_of_best_match(same, same, labels, labels).tolist() == [4.0] * 9
    assert ranks_of_best_match(same, same, labels, labels, ties_by_index=True).tolist() == list(range(9))
    found = retrieval_metrics(same, same, labels)
    assert found["image_retrieval_recall@1"] == found["text_retrieval_recall@1"] == 1 / 9


@pytest.mark.parametrize("ties_by_index", [True, False])
def test_what_is_not_finite_is_never_found(ties_by_index):
    embeddings, labels = torch.eye(6), torch.arange(6)
    embeddings[2] = torch.nan
    ranks = ranks_of_best_match(embeddings, embeddings, labels, labels, ties_by_index)
    # The non-finite item ranks first for other queries. For its own query, the match ranks last.
    assert ranks.tolist() == [1, 1, 5, 1, 1, 1]
