"""The order of samples: a pure function of the seed, the epoch, and the lanes of the epoch.

An epoch is a *sequence* of slots, each with one sample (:func:`shuffled_shards`, :func:`shuffled_rows`). *Lanes* are
contiguous parts of the sequence, one for each worker of each rank. A lane is shuffled within a window, so it can be read from
front to back. Each global batch takes its samples from the lanes. Random numbers are hashes without a state, so the position
in an epoch is the number of its steps: every worker can compute, without opening a file, which samples follow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from openclip_ext.data.hashing import Purpose, hash64, hash_int, permutation, uniform

_SHUFFLE_BLOCK = 1 << 18  # positions of a lane that are shuffled together; a smaller number needs less memory
_READ_BLOCK = 4096  # positions of a lane whose indices are computed together

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
        return np.arange(begin, end), _shuffle_keys(begin, end, window, seed, *words)

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


def _shuffle_keys(begin: int, end: int, window: int, *words: int) -> np.ndarray:
    positions = np.arange(begin, end)
    return positions + window * uniform(hash64(Purpose.SHUFFLE, *words, positions))


@dataclass(frozen=True)
class Lanes:
    """The division of an epoch into lanes, each read from front to back.

    An epoch has as many lanes as its ranks have workers when it begins. A checkpoint stores the lanes, so the rest of the
    epoch has the same global batches on any number of ranks.
    """

    ranks: int
    workers: int  # per rank, at least 1 (without workers, the training process counts as one)
    batch_size: int  # samples of a micro-batch
    accum_freq: int  # micro-batches of an optimizer step
    epoch_samples: int  # number of slots of the sequence that the epoch uses, except for an incomplete step at its end
    shuffle_window: int  # in samples, for each lane (see shuffled_positions)

    def __len__(self) -> int:
        return self.ranks * self.workers

    @property
    def global_batch(self) -> int:
        """Number of samples of one optimizer step over all ranks."""
        return self.ranks * self.batch_size * self.accum_freq

    def steps(self, slots: int) -> int:
        """Return the number of optimizer steps for which this number of slots is enough."""
        return slots // self.global_batch

    def ends(self, steps: int) -> np.ndarray:
        """Return the end (exclusive) of each lane ``(len(self),)``; a lane starts at the end of the lane before it."""
        batches, extra = divmod(steps * self.accum_freq, self.workers)
        of_rank = (batches + (np.arange(self.workers) < extra)) * self.batch_size
        return np.cumsum(np.tile(of_rank, self.ranks))

    def locate(self, step: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane of each place in the global batch of a step, and the position in the shuffled lane."""
        block, offset = np.divmod(places, self.batch_size)
        rank, micro_batch = np.divmod(block, self.accum_freq)
        turn, worker = np.divmod(step * self.accum_freq + micro_batch, self.workers)
        return rank * self.workers + worker, turn * self.batch_size + offset


class EpochOrder:
    """The order of an epoch's samples: a pure function of the seed, the epoch, the lanes and the sequence of samples.

    Args:
        sequence: Maps the epoch's slots to sample indices.
        seed, epoch: Seeds of the shuffles.
        lanes: The lanes of the epoch.
        num_slots: Length of the sequence. None (default) means at least ``lanes.epoch_samples``.
    """

    def __init__(
        self, sequence: EpochSequence, seed: int, epoch: int, lanes: Lanes, num_slots: int | None = None
    ) -> None:
        self.lanes = lanes
        self.steps = lanes.steps(lanes.epoch_samples if num_slots is None else min(num_slots, lanes.epoch_samples))
        self._sequence = sequence
        self._seed = seed
        self._epoch = epoch
        self._ends = lanes.ends(self.steps)
        self._starts = np.concatenate([[0], self._ends[:-1]])

    def length(self, lane: int) -> int:
        """Return the number of samples in a lane."""
        return int(self._ends[lane] - self._starts[lane])

    def indices(self, lane: int, positions: np.ndarray) -> np.ndarray:
        """Return the global indices of the samples at these positions of a lane, before its shuffle."""
        return self._sequence(self._starts[lane] + positions)

    def shuffled(self, lane: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the positions of a lane in shuffled order, without the first ``start`` positions, as int64 arrays."""
        return shuffled_positions(self.length(lane), self.lanes.shuffle_window, *self._seeds(lane), start=start)

    def unread(self, lane: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the positions that :meth:`shuffled` yields in ascending order, as int64 arrays."""
        length, window = self.length(lane), self.lanes.shuffle_window
        first, last = max(start - window, 0), min(start + window, length)  # no position moves further than the window
        keys = _shuffle_keys(first, last, window, *self._seeds(lane))
        yield first + np.sort(np.argsort(keys, kind="stable")[start - first :])
        for begin in range(last, length, _READ_BLOCK):
            yield np.arange(begin, min(begin + _READ_BLOCK, length))

    def _seeds(self, lane: int) -> tuple[int, ...]:
        return self._seed, self._epoch, 0, *divmod(lane, self.lanes.workers)
