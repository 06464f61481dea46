"""An epoch contains every sample once, with any layout and after any interruption. All versions have the same order."""

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from openclip_ext.data.hashing import Purpose, hash64, hash_int
from openclip_ext.data.order import EpochOrder, Layout, Segment, resampled_shards, shuffled_positions, shuffled_shards


def run_rank(order: EpochOrder, layout: Layout, rank: int, batches: int) -> np.ndarray:
    """Return the sample indices of a rank's first batches. The batches come from the workers in turn, as in a DataLoader."""
    streams = []
    for worker in range(layout.workers):
        positions = np.concatenate([*order.shuffled(rank, worker), np.empty(0, np.int64)])
        indices = order.piece_indices(rank, worker, positions)
        streams.append(iter(indices.reshape(-1, layout.batch_size)))
    rows = [next(streams[batch % layout.workers]) for batch in range(batches)]
    return np.array(rows, dtype=np.int64).reshape(batches, layout.batch_size)


def random_layout(rng: random.Random, samples: int) -> Layout:
    return Layout(
        world_size=rng.choice([1, 2, 3, 8]),
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


def test_every_sample_comes_once_on_any_layout():
    rng = random.Random(0)
    for case in range(60):
        counts = random_counts(rng)
        n = int(counts.sum())
        layout = random_layout(rng, rng.choice([n, n, max(n // 2, 100)]))
        order = EpochOrder(shuffled_shards(counts, seed=case, epoch=case % 3), case, case % 3, (), layout)
        batches = layout.epoch_samples // layout.global_batch * layout.accum_freq
        assert order.batches == batches
        parts = [run_rank(order, layout, rank, batches) for rank in range(layout.world_size)]
        indices = np.concatenate(parts).ravel()
        assert len(np.unique(indices)) == len(indices) == batches * layout.world_size * layout.batch_size
        assert layout.epoch_samples - len(indices) < layout.global_batch
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < n)


def test_unseen_samples_follow_on_any_other_layout():
    """Interrupt an epoch up to three times, and resume it each time with another layout."""
    rng = random.Random(1)
    for case in range(40):
        counts = random_counts(rng)
        n = int(counts.sum())
        sequence = shuffled_shards(counts, seed=case, epoch=5)
        seen: list[Segment] = []
        indices: list[np.ndarray] = []
        for part in range(4):
            layout = random_layout(rng, n)
            if seen and layout == seen[-1].layout:
                continue
            order = EpochOrder(sequence, case, 5, tuple(seen), layout)
            batches = order.batches if part == 3 else rng.randint(0, order.batches)
            indices += [run_rank(order, layout, rank, batches).ravel() for rank in range(layout.world_size)]
            seen.append(Segment(layout, batches))
        together = np.concatenate(indices)
        assert len(np.unique(together)) == len(together)
        if len(seen) == 4:
            assert n - len(together) < seen[-1].layout.global_batch


def test_a_billion_samples_go_on_in_another_layout_in_little_memory():
    first = Layout(64, 8, 64, 1, epoch_samples=10**9, shuffle_window=10_000)
    tracemalloc.start()
    order = EpochOrder(lambda slots: slots, 0, 0, (Segment(first, 100_000),), replace(first, world_size=48))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.batches * 48 * 64 == (10**9 - 100_000 * 64 * 64) // (48 * 64) * 48 * 64
    assert peak < 200 * 2**20


def test_shuffle_delays_no_position_by_more_than_the_window():
    for length, window in ((1000, 0), (1000, 1), (5000, 300), (700_000, 10_000)):
        order = np.concatenate(list(shuffled_positions(length, window, 7, 1, 2)))
        assert np.array_equal(np.sort(order), np.arange(length))
        ahead = np.maximum.accumulate(order) - np.arange(length)
        assert ahead.max() <= window, "a loader would have to hold more samples than the window"
        if window == 0:
            assert np.array_equal(order, np.arange(length))
        of_epoch = EpochOrder(lambda slots: slots, 7, 1, [], Layout(1, 1, 1, 1, length, window))
        order = np.concatenate(list(of_epoch.shuffled(0, 0)))
        for start in (0, 1, length // 2, length - 1, length):
            left = np.concatenate([*of_epoch.shuffled(0, 0, start), np.empty(0, np.int64)])
            unread = of_epoch.unread(0, 0, start)
            assert np.array_equal(left, order[start:])
            assert np.array_equal(unread[np.arange(len(unread))], np.sort(left))


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
    order = EpochOrder(shuffled_shards(np.array([5, 7, 4]), 42, 3), 42, 3, (), Layout(1, 1, 4, 1, 16, 8))
    indices = run_rank(order, Layout(1, 1, 4, 1, 16, 8), 0, 4).ravel().tolist()
    assert hash_int(Purpose.SEQUENCE, 42, 3, 0) == 1719357129758833175
    assert indices == [15, 5, 14, 11, 0, 9, 6, 7, 10, 8, 2, 4, 1, 13, 12, 3]
