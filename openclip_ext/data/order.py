"""The order of samples. It depends only on the seed, the epoch, the layout, and the part of the epoch already trained on.

An epoch is a *sequence* of slots, each with one sample (:func:`shuffled_shards`, :func:`shuffled_rows`). A *layout* cuts the
slots into contiguous pieces of whole batches, one for each worker of each rank. A worker shuffles its piece within a window.
Random numbers are hashes without a state. So every worker can compute, without opening a file, where a run stopped and which
samples were used in other layouts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from openclip_ext.data.hashing import Purpose, hash64, hash_int, permutation, uniform

_SHUFFLE_BLOCK = 1 << 18  # positions of an epoch's order that are computed together; a smaller number needs less memory

# Maps slots to the global indices of their samples, both int64 arrays.
EpochSequence = Callable[[np.ndarray], np.ndarray]


def _shard_sequence(counts: np.ndarray, shards: np.ndarray, begin: int = 0) -> EpochSequence:
    """Return a sequence of all samples shard by shard, starting at position ``begin`` and wrapping around at the end."""
    first_indices = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int64)[shards]
    starts = np.concatenate([[0], np.cumsum(counts[shards])])

    def indices(slots: np.ndarray) -> np.ndarray:
        positions = (slots + begin) % starts[-1]
        places = np.searchsorted(starts, positions, side="right") - 1
        return first_indices[places] + (positions - starts[places])

    return indices


def shuffled_shards(counts: np.ndarray, seed: int, epoch: int, shards: np.ndarray | None = None) -> EpochSequence:
    """Return a sequence of all samples, with the shards in random order, starting at a random sample.

    Because of the random start, the samples that an epoch leaves out at its end differ between epochs. ``counts`` are the
    sample counts of all shards, and ``shards`` are the numbers of the shards to use; None (default) means all.
    """
    shards = np.arange(len(counts)) if shards is None else shards
    shards = shards[permutation(hash64(Purpose.SEQUENCE, seed, epoch, shards))]
    return _shard_sequence(counts, shards, hash_int(Purpose.ROTATION, seed, epoch) % int(counts[shards].sum()))


def resampled_shards(
    counts: np.ndarray, num_slots: int, seed: int, epoch: int, weights: Sequence[float] | np.ndarray
) -> EpochSequence:
    """Return a sequence of at least ``num_slots`` samples: all samples of shards that are drawn with replacement.

    ``weights`` are the shards' relative probabilities.
    """
    shares = np.cumsum(np.asarray(weights, dtype=np.float64))
    if not np.any(counts[np.diff(shares, prepend=0) > 0]):
        raise ValueError(
            "all shards with an upsampling factor above 0 are empty: check --train-data-upsampling-factors"
        )
    draws: list[np.ndarray] = []
    total, per_call = 0, 1024
    while total < num_slots:
        numbers = np.arange(len(draws) * per_call, (len(draws) + 1) * per_call)
        points = uniform(hash64(Purpose.RESAMPLING, seed, epoch, numbers)) * shares[-1]
        draws.append(np.searchsorted(shares, points, side="right").clip(max=len(counts) - 1))
        total += int(counts[draws[-1]].sum())
    return _shard_sequence(counts, np.concatenate(draws))


def kept_samples(sequence: EpochSequence, left_out: np.ndarray) -> EpochSequence:
    """Convert a sequence of kept samples, numbered from 0, to sample indices, which skip ``left_out`` ``(k,)`` (ascending)."""
    kept_before = left_out - np.arange(len(left_out))

    def indices(slots: np.ndarray) -> np.ndarray:
        numbers = sequence(slots)
        return numbers + np.searchsorted(kept_before, numbers, side="right")

    return indices


def shuffled_rows(num_samples: int, seed: int, epoch: int) -> EpochSequence:
    """Return a sequence of all samples in random order, for data that can be read in any order."""
    return permutation(hash64(Purpose.SEQUENCE, seed, epoch, np.arange(num_samples))).__getitem__


def shuffled_positions(length: int, window: int, seed: int, *words: int, start: int = 0) -> Iterator[np.ndarray]:
    """Shuffle ``0 .. length - 1``, moving no position by ``window`` or more places; yield the result as int64 arrays.

    The first ``start`` positions of the result are skipped, and most of them are not computed.

    Position ``p`` gets the sort key ``p + window * u`` with ``u`` uniform in [0, 1). A reader that reads the positions in
    ascending order then stores at most ``window`` samples, and half as many on average. A window of 0 does not shuffle.
    """

    def with_keys(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(begin, end)
        return positions, positions + window * uniform(hash64(Purpose.SHUFFLE, seed, *words, positions))

    first = start // _SHUFFLE_BLOCK * _SHUFFLE_BLOCK
    waiting, waiting_keys = with_keys(max(first - window, 0), first)
    waiting, waiting_keys = waiting[waiting_keys >= first], waiting_keys[waiting_keys >= first]
    start -= first - len(waiting)
    for begin in range(first, length, _SHUFFLE_BLOCK):
        end = min(begin + _SHUFFLE_BLOCK, length)
        positions, keys = map(np.concatenate, zip((waiting, waiting_keys), with_keys(begin, end), strict=True))
        # Keys below `end` are final: all later positions have keys of at least `end`.
        ready = keys < end if end < length else np.ones(len(keys), dtype=bool)
        yield positions[ready][np.argsort(keys[ready], kind="stable")][start:]
        start = max(0, start - int(ready.sum()))
        waiting, waiting_keys = positions[~ready], keys[~ready]


@dataclass(frozen=True)
class Layout:
    """The division of an epoch among ranks and workers."""

    world_size: int
    workers: int  # per rank, at least 1 (without workers, the training process counts as one)
    batch_size: int  # samples of a micro-batch
    accum_freq: int  # micro-batches of an optimizer step; incomplete steps are dropped
    epoch_samples: int  # number of slots of the sequence that the epoch uses
    shuffle_window: int  # in samples, for each worker (see shuffled_positions)

    def replaced(self, entry: Mapping[str, Any]) -> "Layout":
        """Return a layout with a checkpoint's values. Unknown names are ignored; missing names keep this layout's value."""
        return replace(self, **{name: int(entry[name]) for name in asdict(self) if name in entry})

    @property
    def global_batch(self) -> int:
        """Number of samples of one optimizer step over all ranks."""
        return self.world_size * self.batch_size * self.accum_freq

    def batches(self, slots: int) -> int:
        """Return how many micro-batches each rank gets from this number of slots."""
        return slots // self.global_batch * self.accum_freq

    def worker_batches(self, batches: int, worker: int) -> int:
        """Return how many of a rank's first ``batches`` micro-batches this worker yields. The workers take turns."""
        return max(0, (batches - worker + self.workers - 1) // self.workers)

    def piece(self, slots: int, rank: int, worker: int) -> tuple[int, int]:
        """Return the start and the end (exclusive) of a worker's piece of the positions ``0 .. slots - 1``."""
        batches = self.batches(slots)
        before = rank * batches + sum(self.worker_batches(batches, other) for other in range(worker))
        begin = before * self.batch_size
        return begin, begin + self.worker_batches(batches, worker) * self.batch_size


@dataclass(frozen=True)
class Segment:
    """A part of an epoch that was trained in one layout.

    Attributes:
        batches: Micro-batches per rank.
        bad: Number of bad samples that each worker skipped, rank by rank. Empty means none.
        excluded: Bad samples that the rest of the epoch excludes, as ascending positions among the samples that this segment
            and earlier segments have left.
    """

    layout: Layout
    batches: int
    bad: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()

    def taken(self, rank: int, worker: int) -> int:
        """Return how many samples a worker has yielded or skipped."""
        number = rank * self.layout.workers + worker
        bad = self.bad[number] if number < len(self.bad) else 0
        return self.layout.worker_batches(self.batches, worker) * self.layout.batch_size + bad


class EpochOrder:
    """The order of the samples in the rest of an epoch.

    Args:
        sequence: Maps the epoch's slots to sample indices.
        seed, epoch: Seeds of the shuffles.
        seen: The completed segments in other layouts, in order.
        layout: The layout of the rest of the epoch, in which each rank gets ``batches`` micro-batches.
        num_slots: Length of the sequence. None (default) means the length that the layouts need.

    Raises:
        ValueError: A segment has more batches than its samples could fill.
    """

    def __init__(
        self,
        sequence: EpochSequence,
        seed: int,
        epoch: int,
        seen: Sequence[Segment],
        layout: Layout,
        num_slots: int | None = None,
    ) -> None:
        self._sequence = sequence
        self._seed = seed
        self._epoch = epoch
        self._layout = layout
        self._segment = len(seen)
        asked = max([layout.epoch_samples, *(segment.layout.epoch_samples for segment in seen)])
        unseen = _Slots.up_to(asked if num_slots is None else min(asked, num_slots))
        for number, segment in enumerate(seen):
            unseen = _without(unseen, segment, seed, (epoch, number))
        self._slots = unseen
        self._num_slots = unseen.number_below(layout.epoch_samples)
        self.batches = layout.batches(self._num_slots)

    def piece_length(self, rank: int, worker: int) -> int:
        """Return the number of samples in a worker's piece."""
        begin, end = self._layout.piece(self._num_slots, rank, worker)
        return end - begin

    def piece_indices(self, rank: int, worker: int, positions: np.ndarray) -> np.ndarray:
        """Return the global indices of the samples at these positions of a worker's piece."""
        return self._sequence(self._slots[positions + self._layout.piece(self._num_slots, rank, worker)[0]])

    def shuffled(self, rank: int, worker: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the positions of a worker's piece in shuffled order, without the first ``start`` positions."""
        words = (self._epoch, self._segment, rank, worker)
        window = self._layout.shuffle_window
        return shuffled_positions(self.piece_length(rank, worker), window, self._seed, *words, start=start)

    def positions(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the ascending positions of samples among all samples that the completed segments have left."""
        left = self._sequence(self._slots[np.arange(self._num_slots)])
        return tuple(np.flatnonzero(np.isin(left, indices)).tolist())

    def unread(self, rank: int, worker: int, start: int) -> "_Slots":
        """Return the positions that :meth:`shuffled` yields, in ascending order."""
        length, window = self.piece_length(rank, worker), self._layout.shuffle_window
        left = _left_of_shuffle(length, window, start, self._seed, self._epoch, self._segment, rank, worker)
        return _Slots.up_to(length).ranges(*left)


@dataclass(frozen=True)
class _Slots:
    """Ascending slots, stored as runs of consecutive slots. Even the rest of a large epoch consists of few runs.

    Attributes:
        firsts: The first slot of each run.
        ends: The number of slots in each run and all runs before it.
    """

    firsts: np.ndarray
    ends: np.ndarray

    @classmethod
    def up_to(cls, number: int) -> "_Slots":
        """Return ``0 .. number - 1``."""
        return cls(np.zeros(1, np.int64), np.array([number], np.int64))

    @property
    def _begins(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the slots at these positions."""
        runs = np.searchsorted(self.ends, positions, side="right")
        return (self.firsts - self._begins)[runs] + positions

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends.size else 0

    def number_below(self, slot: int) -> int:
        """Return how many of these slots are smaller than ``slot``."""
        return int(np.clip(slot - self.firsts, 0, np.diff(self.ends, prepend=0)).sum())

    def ranges(self, begins: np.ndarray, ends: np.ndarray) -> "_Slots":
        """Return the slots at the positions in these ranges, which must be ascending and must not overlap."""
        begins, ends = begins[begins < ends], ends[begins < ends]
        first, last = np.searchsorted(self.ends, begins, side="right"), np.searchsorted(self.ends, ends, side="left")
        # Cut ranges at the ends of the runs.
        cuts = last - first + 1
        ranges = np.repeat(np.arange(len(begins)), cuts)
        runs = first[ranges] + np.arange(len(ranges)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        run_begins = self._begins[runs]
        starts, stops = np.maximum(begins[ranges], run_begins), np.minimum(ends[ranges], self.ends[runs])
        return _Slots(self.firsts[runs] + starts - run_begins, np.cumsum(stops - starts))


def _without(slots: _Slots, segment: Segment, seed: int, words: tuple[int, ...]) -> _Slots:
    """Return the slots that a segment has left. Each worker's shuffle has the seed (seed, words, rank, worker)."""
    layout = segment.layout
    number = slots.number_below(layout.epoch_samples)
    if not 0 <= segment.batches <= layout.batches(number):
        raise ValueError(
            f"cannot resume: the checkpoint has {segment.batches} batches on each rank, but its layout allows only "
            f"{layout.batches(number)} ({layout}). Use an end-of-epoch checkpoint"
        )
    begins, ends, end = [], [], 0
    for rank in range(layout.world_size):
        for worker in range(layout.workers):
            begin, end = layout.piece(number, rank, worker)
            done = min(segment.taken(rank, worker), end - begin)
            left = _left_of_shuffle(end - begin, layout.shuffle_window, done, seed, *words, rank, worker)
            begins.append(begin + left[0])
            ends.append(begin + left[1])
    begins.append(np.array([end]))
    ends.append(slots.ends[-1:])
    remaining = slots.ranges(np.concatenate(begins), np.concatenate(ends))
    excluded = np.array(segment.excluded, dtype=np.int64)
    return remaining.ranges(np.append(0, excluded + 1), np.append(excluded, len(remaining)))


def _left_of_shuffle(length: int, window: int, done: int, seed: int, *words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that :func:`shuffled_positions` yields after the first ``done``, as starts and ends of ranges.

    Only the keys near ``done`` are computed, because no position moves further than ``window``.
    """
    first, limit = max(done - window, 0), min(done + window, length)
    positions = np.arange(first, limit)
    keys = positions + window * uniform(hash64(Purpose.SHUFFLE, seed, *words, positions))
    is_left = np.ones(limit - first + 3, dtype=np.int8)
    is_left[0] = is_left[-1] = 0
    is_left[1 + np.argsort(keys, kind="stable")[: done - first]] = 0
    # The last range also contains all positions from `limit` on.
    changes = np.diff(is_left)
    ends = first + np.flatnonzero(changes == -1)
    ends[-1] = length
    return first + np.flatnonzero(changes == 1), ends
