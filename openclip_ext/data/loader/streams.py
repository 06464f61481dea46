"""Read the samples of an epoch in its order, and find replacements for bad samples."""

from collections import deque
from collections.abc import Iterator
from itertools import chain, tee
from typing import Protocol

import numpy as np

from openclip_ext.data.order import EpochOrder
from openclip_ext.data.sources.source import RawSample, Source


class SampleStream(Protocol):
    """The samples of a lane in shuffled order."""

    def take(self, position: int) -> RawSample:
        """Return the sample at a position of the shuffled lane. Positions must increase from call to call."""

    def later(self, number: int) -> RawSample | None:
        """Return readable sample ``number``, counted from 0, after the last taken sample; None if there are none.

        If there are too few, the count continues with the first of them.
        """


def open_stream(source: Source, order: EpochOrder, lane: int, start: int) -> SampleStream:
    """Return the samples of a lane from a position of its shuffled order."""
    return _Shuffled(source, order, lane, start) if source.sequential else _Rows(order, lane)


class _Shuffled:
    """A lane that is read from front to back. Up to one shuffle window of undecoded samples is in memory.

    The sample of a position depends only on the order. So does the replacement of a bad sample: it comes from later
    positions, which would be read in any case. The lane is followed by the next lane.
    """

    def __init__(self, source: Source, order: EpochOrder, lane: int, start: int) -> None:
        lanes = [*range(lane, len(order.lanes)), *range(lane + 1)]
        self._samples = chain.from_iterable(
            _read_shuffled(source, order, each, start if place == 0 else 0) for place, each in enumerate(lanes)
        )
        self._ahead: deque[RawSample] = deque()
        self._next = start

    def take(self, position: int) -> RawSample:
        while True:  # other workers use the samples between two positions, if the epoch began with other workers
            raw = self._ahead.popleft() if self._ahead else next(self._samples)
            self._next += 1
            if self._next > position:
                return raw

    def later(self, number: int) -> RawSample | None:
        readable = [raw for raw in self._ahead if raw.problem is None]
        while len(readable) <= number and (raw := next(self._samples, None)) is not None:
            self._ahead.append(raw)
            readable += [raw] if raw.problem is None else []
        return readable[number % len(readable)] if readable else None


class _Rows:
    """A lane of a source whose samples can be read in any order."""

    def __init__(self, order: EpochOrder, lane: int) -> None:
        self._order = order
        self._lane = lane
        self._latest = 0

    def take(self, position: int) -> RawSample:
        self._latest = position
        return RawSample(int(self._order.indices(self._lane, np.array([position]))[0]))

    def later(self, number: int) -> RawSample | None:
        position = (self._latest + 1 + number) % self._order.length(self._lane)
        return RawSample(int(self._order.indices(self._lane, np.array([position]))[0]))


def _read_shuffled(source: Source, order: EpochOrder, lane: int, start: int) -> Iterator[RawSample]:
    """Yield the samples of a lane in shuffled order from a position, but read them in ascending order."""
    waiting: dict[int, RawSample] = {}
    of_positions, of_indices = tee(order.unread(lane, start))
    raws = source.read(order.indices(lane, positions) for positions in of_indices)
    ahead = zip(chain.from_iterable(positions.tolist() for positions in of_positions), raws, strict=True)
    for part in order.shuffled(lane, start):
        for position in part.tolist():
            while position not in waiting:
                place, raw = next(ahead)
                waiting[place] = raw
            yield waiting.pop(position)
