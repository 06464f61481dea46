"""Ranks in retrieval equal those of a full sort, equal images and captions are right answers, and ties are shared fairly."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from openclip_ext.evaluation import ranks as retrieval
from openclip_ext.evaluation.ranks import (
    IMAGE_TO_TEXT,
    TEXT_TO_IMAGE,
    chance,
    image_text_ranks,
    ranks_of_best_match,
    retrieval_metrics,
)
from openclip_ext.evaluation.scoring import caption_metrics


@pytest.mark.parametrize("chunk", [1, 7, 2**24])
def test_ranks_are_those_of_a_full_sort(chunk, monkeypatch):
    monkeypatch.setattr(retrieval, "_CHUNK_ELEMENTS", 50 * chunk)
    generator = torch.Generator().manual_seed(0)
    queries, items = torch.randn(30, 4, generator=generator), torch.randn(50, 4, generator=generator)
    right = torch.rand(30, 50, generator=generator) < 0.1
    right[:, 7] |= ~right.any(dim=1)
    order = (queries @ items.T).argsort(dim=1, descending=True)
    expected = right.gather(1, order).int().argmax(dim=1)
    pairs = right.nonzero()
    found = ranks_of_best_match(queries, items, pairs[torch.randperm(len(pairs), generator=generator)])
    assert torch.equal(found.mean(), expected.double())
    for k in (1, 5, 50):
        assert torch.equal(found.hits(k), (expected < k).double())


def test_ties_are_the_mean_over_all_orders():
    """Items of equal similarity: the expected rank and recall are means over all permutations of the items."""
    similarities = np.array([3, 2, 2, 2, 2, 2, 1])
    for right in ([1], [2, 4], [1, 3, 5], [0, 3], [6]):
        ranks = []
        for order in itertools.permutations(range(7)):
            ordered = sorted(order, key=lambda item: -similarities[item])
            ranks.append(min(ordered.index(item) for item in right))
        pairs = torch.tensor([[0, item] for item in right])
        found = ranks_of_best_match(torch.ones(1, 1), torch.tensor(similarities)[:, None].float(), pairs)
        assert float(found.mean()) == pytest.approx(np.mean(ranks))
        for k in range(1, 8):
            assert float(found.hits(k)) == pytest.approx(np.less(ranks, k).mean())


# Name -> image and caption of each sample.
REPEATS = {
    "all differ": [*zip(range(6), range(6), strict=True)],
    "names of classes": [(image, image % 2) for image in range(6)],
    "several rows an image": [(row // 3, row) for row in range(6)],
    "both": [(0, "a"), (0, "b"), (1, "b"), (1, "c"), (2, "a"), (2, "a")],
}


@pytest.mark.parametrize("pairs", REPEATS.values(), ids=REPEATS)
def test_equal_images_and_captions_are_right_answers(pairs):
    images, captions = zip(*pairs, strict=True)
    generator = torch.Generator().manual_seed(1)
    vectors = {name: F.normalize(torch.randn(8, generator=generator), dim=0) for name in [*images, *"abc", *captions]}
    image, text = (torch.stack([vectors[name] for name in side]) for side in (images, captions))
    # Copies that are computed in another batch may be rounded differently.
    noisy = text + 1e-7 * torch.randn(text.shape, generator=generator)
    found = image_text_ranks(image, noisy, images, captions)
    for row, (own_image, own_caption) in enumerate(pairs):
        for direction, query, items, right in (
            (IMAGE_TO_TEXT, own_image, captions, {caption for one, caption in pairs if one == own_image}),
            (TEXT_TO_IMAGE, own_caption, images, {one for one, caption in pairs if caption == own_caption}),
        ):
            order = sorted(set(items), key=lambda item: -float(vectors[query] @ vectors[item]))
            expected = min(order.index(item) for item in right)
            assert float(found[direction].mean()[row]) == expected
    # A model that separates what differs is perfect, and a collapsed model is at chance.
    own = {name: place for place, name in enumerate(dict.fromkeys(images))}
    shown = [{own[one] for one, caption in pairs if caption == name} for name in captions]
    perfect = torch.stack([torch.eye(6)[[*places]].sum(dim=0) for places in shown])
    metrics = retrieval_metrics(torch.eye(6)[[own[name] for name in images]], perfect, images, captions)
    assert metrics["image_to_text_R@1"] == metrics["text_to_image_R@1"] == 1
    collapsed = retrieval_metrics(torch.ones(6, 4), torch.ones(6, 4), images, captions)
    for name, value in chance(images, captions).items():
        items = {IMAGE_TO_TEXT: captions, TEXT_TO_IMAGE: images}[name]
        queries = {IMAGE_TO_TEXT: images, TEXT_TO_IMAGE: captions}[name]
        right = [len({item for other, item in zip(queries, items, strict=True) if other == one}) for one in queries]
        assert collapsed[f"{name}_R@1"] == value == pytest.approx(np.mean(right) / len(set(items)))


def test_a_collapsed_model_scores_chance_in_datacomps_retrieval():
    found, _ = caption_metrics(torch.ones(9, 4), torch.ones(18, 4), torch.arange(18) // 2)
    assert found["image_retrieval_recall@1"] == found["text_retrieval_recall@1"] == pytest.approx(1 / 9)
    assert found["text_retrieval_recall@5"] == pytest.approx(1 - 13 * 12 / (18 * 17))


def test_what_is_not_finite_is_never_found():
    embeddings, pairs = torch.eye(6), torch.arange(6)[:, None].expand(6, 2)
    embeddings[2] = torch.nan
    found = ranks_of_best_match(embeddings, embeddings, pairs)
    # The non-finite item ranks first for other queries. For its own query, the match ranks last.
    assert found.mean().tolist() == [1, 1, 5, 1, 1, 1]
    assert found.hits(1).tolist() == [0] * 6 and found.hits(2).tolist() == [1, 1, 0, 1, 1, 1]
