"""Intervals of paired differences equal scipy's, and contain the true mean as often as they should."""

import numpy as np
import pytest
import torch
from scipy import stats

from openclip_ext.evaluation.statistics import half_width, paired_difference, seeds_interval


@pytest.mark.parametrize("seeds", range(2, 13))
def test_the_seeds_interval_is_scipys(seeds):
    first, second = np.random.default_rng(0).random((2, seeds))
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert seeds_interval(list(first - second)) == pytest.approx((expected.low, expected.high))
    half = pytest.approx((expected.high - expected.low) / 2)
    assert half_width(torch.tensor(first - second), range(seeds)) == half  # each value is a group
    of_samples = (torch.tensor(of_seed)[:, None].expand(seeds, 4) for of_seed in (first, second))
    found = paired_difference(*of_samples, range(4))  # samples do not differ
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("captions", "of_seeds", "noise"), [(200, 0.02, 0.3), (4, 0.0, 0.1)])
def test_the_interval_covers_seeds_and_samples_of_equal_captions(captions, of_seeds, noise):
    random = np.random.default_rng(1)
    groups = np.arange(200) % captions
    covered = 0
    for _ in range(400):
        of_seed, of_caption = random.normal(0, of_seeds, (3, 1)), random.normal(0, 0.3, captions)[groups]
        difference = 0.05 + of_seed + of_caption + random.normal(0, noise, (3, 200))
        found = paired_difference(torch.tensor(difference), torch.zeros(3, 200), groups.tolist())
        covered += found.low <= 0.05 <= found.high
    assert covered >= 0.93 * 400


def test_one_seed_or_one_caption_has_no_interval():
    assert paired_difference(torch.ones(1, 4), torch.zeros(1, 4), range(4)) is None
    assert paired_difference(torch.ones(3, 4), torch.zeros(3, 4), [0] * 4) is None
