"""The order of samples: a pure function of (seed, epoch, layout) and of the part of the epoch that was seen before.

An epoch is a *sequence* of slots, one sample each (:func:`shuffled_shards`, :func:`shuffled_rows`). A *layout* cuts
the slots into contiguous pieces, one for each worker of each rank, of whole batches, and a worker shuffles its
piece within a window. Everything is integers that are computed, not drawn: where a run stopped is found again by
counting, without opening a file, and what another layout has seen is known to every worker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from openclip_ext.data.hashing import Purpose, hash64, hash_int, permutation, uniform

# Slots that are shuffled at once; bounds the memory of an order, and is part of its definition.
_SHUFFLE_BLOCK = 1 << 18


# An epoch's samples in sequence: from slots to the global indices of the samples in them, both int64 arrays.
EpochSequence = Callable[[np.ndarray], np.ndarray]


def _shard_sequence(counts: np.ndarray, shards: np.ndarray, begin: int = 0) -> EpochSequence:
    """Return the samples of whole shards, one shard after the other, from the sample ``begin`` on and around."""
    first_indices = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int64)[shards]
    starts = np.concatenate([[0], np.cumsum(counts[shards])])

    def indices(slots: np.ndarray) -> np.ndarray:
        positions = (slots + begin) % starts[-1]
        places = np.searchsorted(starts, positions, side="right") - 1
        return first_indices[places] + (positions - starts[places])

    return indices


def shuffled_shards(counts: np.ndarray, seed: int, epoch: int) -> EpochSequence:
    """Return all samples, the shards in random order, beginning at a random sample.

    The random beginning makes the samples at the end, which no batch has room for (or which a shortened epoch leaves
    out), others in each epoch, even with a single shard. ``counts`` are the samples in each shard.
    """
    shards = permutation(hash64(Purpose.SEQUENCE, seed, epoch, np.arange(len(counts))))
    return _shard_sequence(counts, shards, hash_int(Purpose.ROTATION, seed, epoch) % int(counts.sum()))


def resampled_shards(
    counts: np.ndarray, num_slots: int, seed: int, epoch: int, weights: Sequence[float] | None = None
) -> EpochSequence:
    """Return shards drawn with replacement, each with all its samples (``--dataset-resampled``).

    At least ``num_slots`` samples are drawn. ``weights`` say how often a shard is drawn relative to others; None: equally.
    """
    shares = np.cumsum(np.ones(len(counts)) if weights is None else np.asarray(weights, dtype=np.float64))
    if not np.any(counts[np.diff(shares, prepend=0) > 0]):
        raise ValueError("only empty shards have a chance to be drawn: check --train-data-upsampling-factors")
    draws: list[np.ndarray] = []
    total, per_call = 0, 1024
    while total < num_slots:
        numbers = np.arange(len(draws) * per_call, (len(draws) + 1) * per_call)
        points = uniform(hash64(Purpose.RESAMPLING, seed, epoch, numbers)) * shares[-1]
        draws.append(np.searchsorted(shares, points, side="right").clip(max=len(counts) - 1))
        total += int(counts[draws[-1]].sum())
    return _shard_sequence(counts, np.concatenate(draws))


def kept_samples(sequence: EpochSequence, left_out: np.ndarray) -> EpochSequence:
    """Return a sequence of kept samples, which numbers them through, with their indices among all.

    ``left_out`` ``(k,)`` are the ascending indices of the others.
    """
    kept_before = left_out - np.arange(len(left_out))

    def indices(slots: np.ndarray) -> np.ndarray:
        numbers = sequence(slots)
        return numbers + np.searchsorted(kept_before, numbers, side="right")

    return indices


def shuffled_rows(num_samples: int, seed: int, epoch: int) -> EpochSequence:
    """Return a random permutation of samples that can be read in any order."""
    return permutation(hash64(Purpose.SEQUENCE, seed, epoch, np.arange(num_samples))).__getitem__


def shuffled_positions(length: int, window: int, seed: int, *words: int) -> Iterator[np.ndarray]:
    """Shuffle ``0 .. length - 1`` so that no position is delayed by ``window`` or more places of the sequence.

    Position ``p`` gets the sort key ``p + window * u`` with ``u`` uniform in [0, 1). A reader that goes through the
    sequence in order therefore never has to hold more than ``window`` samples (half of that on average) to hand
    them out in this order.

    A window of 0 leaves the order as it is.

    Yields:
        ``int64`` arrays that together hold every position once.
    """
    waiting_positions, waiting_keys = np.empty(0, np.int64), np.empty(0)
    for begin in range(0, length, _SHUFFLE_BLOCK):
        end = min(begin + _SHUFFLE_BLOCK, length)
        positions = np.arange(begin, end)
        keys = positions + window * uniform(hash64(Purpose.SHUFFLE, seed, *words, positions))
        positions, keys = np.concatenate([waiting_positions, positions]), np.concatenate([waiting_keys, keys])
        # A later position's key is at least `end`.
        ready = keys < end if end < length else np.ones(len(keys), dtype=bool)
        yield positions[ready][np.argsort(keys[ready], kind="stable")]
        waiting_positions, waiting_keys = positions[~ready], keys[~ready]


@dataclass(frozen=True)
class Layout:
    """How an epoch is divided among ranks and workers."""

    world_size: int
    workers: int  # of each rank, at least 1 (the training process itself counts as one)
    batch_size: int  # samples of a micro-batch
    accum_freq: int  # micro-batches of an optimizer step; incomplete steps are dropped
    epoch_samples: int  # slots of the epoch that are used
    shuffle_window: int  # samples that a worker shuffles over (shuffled_positions)

    def replaced(self, entry: Mapping[str, Any]) -> "Layout":
        """Return this layout with the entries of a checkpoint, which may have others as well, or lack some."""
        return replace(self, **{name: int(entry[name]) for name in asdict(self) if name in entry})

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.world_size * self.batch_size * self.accum_freq

    def batches(self, slots: int) -> int:
        """Micro-batches each rank gets out of ``slots`` samples."""
        return slots // self.global_batch * self.accum_freq

    def worker_batches(self, batches: int, worker: int) -> int:
        """How many of the rank's first ``batches`` come from this worker: they take turns."""
        return max(0, (batches - worker + self.workers - 1) // self.workers)

    def piece(self, slots: int, rank: int, worker: int) -> tuple[int, int]:
        """Begin and end of a worker's piece among ``slots`` samples."""
        batches = self.batches(slots)
        before = rank * batches + sum(self.worker_batches(batches, other) for other in range(worker))
        begin = before * self.batch_size
        return begin, begin + self.worker_batches(batches, worker) * self.batch_size


@dataclass(frozen=True)
class Segment:
    """A part of an epoch that was run in one layout: ``batches`` micro-batches on each rank."""

    layout: Layout
    batches: int


class EpochOrder:
    """The order of the rest of an epoch.

    Args:
        sequence: The epoch's samples.
        seed, epoch: The shuffles depend on these.
        seen: The segments that were run in other layouts, in order.
        layout: The layout to go on in: each rank gets ``batches`` micro-batches.

    Raises:
        ValueError: A segment has more batches than there were samples for.
    """

    def __init__(self, sequence: EpochSequence, seed: int, epoch: int, seen: Sequence[Segment], layout: Layout) -> None:
        self._sequence = sequence
        self._seed = seed
        self._epoch = epoch
        self._layout = layout
        self._segment = len(seen)
        self._slots = np.flatnonzero(~self._seen_slots(seen)[: layout.epoch_samples]) if seen else None
        self._num_slots = layout.epoch_samples if self._slots is None else len(self._slots)
        self.batches = layout.batches(self._num_slots)

    def piece_length(self, rank: int, worker: int) -> int:
        """Samples of a worker's piece."""
        begin, end = self._layout.piece(self._num_slots, rank, worker)
        return end - begin

    def piece_indices(self, rank: int, worker: int, positions: np.ndarray) -> np.ndarray:
        """Global indices of the samples at these positions of a worker's piece."""
        slots = positions + self._layout.piece(self._num_slots, rank, worker)[0]
        return self._sequence(slots if self._slots is None else self._slots[slots])

    def shuffled(self, rank: int, worker: int) -> Iterator[np.ndarray]:
        """The positions of a worker's piece in the order in which it hands them out, in parts."""
        return self._shuffled(self._layout, self._num_slots, self._segment, rank, worker)

    def _shuffled(self, layout: Layout, num_slots: int, segment: int, rank: int, worker: int) -> Iterator[np.ndarray]:
        begin, end = layout.piece(num_slots, rank, worker)
        words = (self._epoch, segment, rank, worker)
        return shuffled_positions(end - begin, layout.shuffle_window, self._seed, *words)

    def _seen_slots(self, seen: Sequence[Segment]) -> np.ndarray:
        """Boolean mask over the slots."""
        longest = max([self._layout.epoch_samples, *(segment.layout.epoch_samples for segment in seen)])
        mask = np.zeros(longest, dtype=bool)
        for number, segment in enumerate(seen):
            layout = segment.layout
            slots = np.flatnonzero(~mask[: layout.epoch_samples])
            if not 0 <= segment.batches <= layout.batches(len(slots)):
                raise ValueError(
                    f"cannot resume: the checkpoint says that {segment.batches} batches were done on each rank, "
                    f"but that layout has {layout.batches(len(slots))} ({layout})"
                )
            for rank in range(layout.world_size):
                for worker in range(layout.workers):
                    done = layout.worker_batches(segment.batches, worker) * layout.batch_size
                    begin = layout.piece(len(slots), rank, worker)[0]
                    parts = self._shuffled(layout, len(slots), number, rank, worker)
                    while done > 0:
                        positions = next(parts)[:done]
                        mask[slots[positions + begin]] = True
                        done -= len(positions)
        return mask
