"""An epoch contains every sample once, with any layout and after any interruption. All versions have the same order."""

import random
import tracemalloc

import numpy as np
import pytest

from openclip_ext.data.hashing import Purpose, hash64, hash_int
from openclip_ext.data.order import EpochOrder, Lanes, resampled_shards, shuffled_positions, shuffled_shards


def global_batches(order: EpochOrder) -> np.ndarray:
    """Return the sample indices ``(steps, global batch)`` of an epoch."""
    lanes = order.lanes
    samples = []
    for lane in range(len(lanes)):
        positions = np.concatenate([*order.shuffled(lane), np.empty(0, np.int64)])
        samples.append(order.indices(lane, positions))
    rows = []
    for step in range(order.steps):
        of_lanes, positions = lanes.locate(step, np.arange(lanes.global_batch))
        rows.append([samples[lane][position] for lane, position in zip(of_lanes, positions, strict=True)])
    return np.array(rows, dtype=np.int64).reshape(order.steps, lanes.global_batch)


def random_lanes(rng: random.Random, samples: int) -> Lanes:
    return Lanes(
        ranks=rng.choice([1, 2, 3, 8]),
        workers=rng.choice([1, 2, 5]),
        batch_size=rng.choice([1, 3, 8]),
        accum_freq=rng.choice([1, 1, 2]),
        epoch_samples=samples,
        shuffle_window=rng.choice([0, 1, 20, 10_000]),
    )


def random_counts(rng: random.Random) -> np.ndarray:
    counts = np.array([rng.choice([0, 1, 7, 30, 100]) for _ in range(rng.randint(1, 12))])
    counts[rng.randrange(len(counts))] = 150
    return counts


def test_every_sample_comes_once_with_any_lanes():
    rng = random.Random(0)
    for case in range(60):
        counts = random_counts(rng)
        n = int(counts.sum())
        lanes = random_lanes(rng, rng.choice([n, n, max(n // 2, 100)]))
        order = EpochOrder(shuffled_shards(counts, seed=case, epoch=case % 3), case, case % 3, lanes)
        assert order.steps == lanes.epoch_samples // lanes.global_batch
        indices = global_batches(order).ravel()
        assert len(np.unique(indices)) == len(indices) == order.steps * lanes.global_batch
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < n)


def test_a_rank_that_began_the_epoch_reads_one_lane_per_worker():
    """Batch k of a rank is from the lane of worker k modulo the number of workers, and each lane is read in order."""
    lanes = Lanes(ranks=3, workers=4, batch_size=5, accum_freq=2, epoch_samples=900, shuffle_window=0)
    for step in range(30):
        found, positions = (array.reshape(3, 2, 5) for array in lanes.locate(step, np.arange(lanes.global_batch)))
        for rank in range(3):
            for micro_batch in range(2):
                number = 2 * step + micro_batch
                assert found[rank, micro_batch].tolist() == [4 * rank + number % 4] * 5
                assert positions[rank, micro_batch].tolist() == [*range(number // 4 * 5, number // 4 * 5 + 5)]


def test_the_middle_of_a_billion_samples_needs_little_memory():
    lanes = Lanes(64, 8, 64, 1, epoch_samples=10**9, shuffle_window=10_000)
    tracemalloc.start()
    order = EpochOrder(lambda slots: slots, 0, 0, lanes)
    start = order.length(300) // 2
    first, unread = next(order.shuffled(300, start)), next(order.unread(300, start))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.steps == 10**9 // 4096 and abs(int(first[0]) - start) < 10_000 > abs(int(unread[0]) - start)
    assert peak < 50 * 2**20


def test_shuffle_delays_no_position_by_more_than_the_window():
    for length, window in ((1000, 0), (1000, 1), (5000, 300), (700_000, 10_000)):
        order = np.concatenate(list(shuffled_positions(length, window, 7, 1, 2)))
        assert np.array_equal(np.sort(order), np.arange(length))
        ahead = np.maximum.accumulate(order) - np.arange(length)
        assert ahead.max() <= window, "a loader would have to hold more samples than the window"
        if window == 0:
            assert np.array_equal(order, np.arange(length))
        of_epoch = EpochOrder(lambda slots: slots, 7, 1, Lanes(1, 1, 1, 1, length, window))
        order = np.concatenate(list(of_epoch.shuffled(0)))
        for start in (0, 1, length // 2, length - 1, length):
            left = np.concatenate([*of_epoch.shuffled(0, start), np.empty(0, np.int64)])
            assert np.array_equal(left, order[start:])
            assert np.array_equal(np.concatenate([*of_epoch.unread(0, start)]), np.sort(left))


def test_resampled_shards_are_drawn_by_weight():
    counts = np.array([10, 20, 10])
    sequence = resampled_shards(counts, 60_000, seed=0, epoch=0, weights=[1, 0, 3])
    indices = sequence(np.arange(60_000))
    assert not np.any((indices >= 10) & (indices < 30)), "the shard with weight 0 was sampled"
    share = np.mean(indices >= 30)
    assert 0.72 < share < 0.78
    assert np.array_equal(np.sort(indices[:10] % 10), np.arange(10)), "the first 10 samples are not one full shard"
    with pytest.raises(ValueError, match="all shards with an upsampling factor above 0 are empty"):
        resampled_shards(np.array([0, 5]), 10, 0, 0, weights=[1, 0])


def test_hash_of_arrays_and_integers_agree():
    words = [0, 1, 5, 2**40, -3, 2**64 + 7]
    for word in words:
        assert int(hash64(Purpose.PIXELS, 11, word)[0]) == hash_int(Purpose.PIXELS, 11, word)
    many = hash64(Purpose.PIXELS, 11, np.arange(1000))
    assert many.tolist() == [hash_int(Purpose.PIXELS, 11, number) for number in range(1000)]
    assert len(np.unique(many)) == 1000
    assert hash_int(Purpose.PIXELS, 1, 2) != hash_int(Purpose.SHUFFLE, 1, 2) != hash_int(Purpose.SHUFFLE, 2, 1)


def test_order_does_not_change_between_versions():
    """A run may be resumed with later versions of this package and of NumPy, so the order must stay the same."""
    order = EpochOrder(shuffled_shards(np.array([5, 7, 4]), 42, 3), 42, 3, Lanes(1, 1, 4, 1, 16, 8))
    indices = global_batches(order).ravel().tolist()
    assert hash_int(Purpose.SEQUENCE, 42, 3, 0) == 1719357129758833175
    assert indices == [15, 5, 14, 11, 0, 9, 6, 7, 10, 8, 2, 4, 1, 13, 12, 3]
