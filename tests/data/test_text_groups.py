"""Groups of texts contain every text once, and as few positions as possible."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from openclip_ext.data.text_groups import group_texts

END = 99


def random_texts(rng: np.random.Generator, rows: int, context: int) -> Tensor:
    """Return texts ``(rows, context)`` of random lengths, padded with 0; the end-of-text token is the largest."""
    texts = torch.from_numpy(rng.integers(1, END, (rows, context)))
    for text, length in zip(texts, rng.integers(1, context + 1, rows), strict=True):
        text[length - 1] = END
        text[length:] = 0
    return texts


def fewest_positions(lengths: list[int], most: int, context: int) -> int:
    """Return the number of positions of the best division, found by trying all divisions of the sorted texts."""
    padded = sorted(min(-(-length // 8) * 8, context) for length in lengths)
    found = []
    for number in range(1, most + 1):
        for cuts in itertools.combinations(range(1, len(padded)), number - 1):
            ends = [*cuts, len(padded)]
            found.append(sum((end - start) * padded[end - 1] for start, end in zip([0, *cuts], ends, strict=True)))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_groups_have_the_fewest_positions(seed):
    rng = np.random.default_rng(seed)
    rows, context, most = int(rng.integers(1, 9)), int(rng.integers(3, 78)), int(rng.integers(1, 5))
    texts = random_texts(rng, rows, context)
    groups = group_texts(texts, most)
    lengths = (texts.argmax(1) + 1).tolist()
    assert len(groups.tokens) <= most
    assert groups.num_positions == fewest_positions(lengths, most, context)
    assert groups.num_tokens == sum(lengths)


@pytest.mark.parametrize("of_equal_size", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_each_text_is_at_its_place_with_all_its_tokens(of_equal_size, seed):
    rng = np.random.default_rng(seed)
    texts = random_texts(rng, int(rng.integers(1, 40)), 77)
    groups = group_texts(texts, 4, of_equal_size)
    placed = [row for group in groups.tokens for row in group]
    assert len(placed) == len(texts)
    for text, place in zip(texts, groups.places.tolist(), strict=True):
        found = placed[place]
        assert torch.equal(found, text[: len(found)])
        assert END in found


@pytest.mark.parametrize(("rows", "groups"), [(64, 4), (6, 3), (7, 1)])
def test_groups_of_a_compiled_model_have_few_shapes(rows, groups):
    shapes = set()
    for seed in range(50):
        shapes |= {
            part.shape for part in group_texts(random_texts(np.random.default_rng(seed), rows, 77), 4, True).tokens
        }
    assert {shape[0] for shape in shapes} == {rows // groups}
    assert {shape[1] for shape in shapes} <= {16, 32, 48, 64, 77}
