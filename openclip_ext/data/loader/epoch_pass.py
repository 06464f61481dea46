"""One pass over the rest of an epoch: which batches come, what is noted of them, and what all ranks agree on before a step."""

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.data.loader.bad_samples import BadSamples
from openclip_ext.data.loader.batches import Beginning, epoch_order
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.order import Layout, Segment
from openclip_ext.data.sources.source import BadDataError, Source

Progress = Sequence[Mapping[str, Any]]
# The batches of a step, the bad samples of each worker up to it, and the worst that any rank found: see :class:`_Found`.
_Step = tuple[list[dict[str, Tensor]], list[int], Callable[[], int]]


class Interrupted(BaseException):
    """Raised by a signal handler while the training process waits for a batch: nothing should catch and retry it."""


class _Found(enum.IntEnum):
    """What a rank found when it asked for the batches of a step; the largest of all ranks counts for all."""

    BATCHES = 0
    TOO_FEW_SAMPLES = 1
    FAILED_WORKERS = 2
    INTERRUPTED = 3


@dataclass(frozen=True)
class EpochData:
    """What the passes over all epochs share.

    Attributes:
        source, seed: decide the order.
        layout: how samples are laid out over ranks, workers and batches.
        rank: of this process.
        bad: the bad samples of the run.
        batches: opens the batches that this rank's workers make: epoch, segments seen before, numbers, where they begin.
    """

    source: Source
    seed: int
    layout: Layout
    rank: int
    bad: BadSamples
    batches: Callable[[int, tuple[Segment, ...], range, Beginning], Iterator[dict[str, Any]]]

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of the layout are processes that work side by side."""
        return self.layout.world_size == distributed.world_size() > 1

    def entry(self, batches: int, bad: Sequence[int] = ()) -> dict[str, Any]:
        """Return a progress entry of the layout, in plain types: so many batches of each rank are done."""
        own = asdict(self.layout) | {"seed": self.seed, "data": self.source.digest, "batches": batches}
        return own | ({"bad": list(bad)} if bad else {})

    def segments(self, progress: Progress) -> tuple[tuple[Segment, ...], int]:
        """Return the segments in other layouts, and how many batches of the current one are done.

        Raises:
            ValueError: The progress is of another data set or seed.
        """
        segments = []
        for entry in progress:
            for name, own in (("seed", self.seed), ("data", self.source.digest)):
                if entry.get(name, own) != own:
                    what = "data set (or manifest)" if name == "data" else name
                    raise ValueError(
                        f"cannot go on in mid-epoch: the checkpoint was made with {what} {entry[name]}, this run has "
                        f"{own}. Use the same, or begin a run of another --name with --resume and the checkpoint of a "
                        "completed epoch"
                    )
            segments.append(Segment(self.layout.replaced(entry), int(entry["batches"]), tuple(entry.get("bad", ()))))
        if segments and segments[-1].layout == self.layout:
            return tuple(segments[:-1]), segments[-1].batches
        return tuple(segments), 0


@dataclass
class EpochPass:
    """A pass over the rest of an epoch.

    Attributes:
        epoch: number of the epoch.
        entries: the progress at the beginning of the pass, later at the last change of the layout.
        interruptible: makes the context in which batches are waited for, and a signal handler may raise :class:`Interrupted`.
        handed_out: batches since then.
        passed: bad samples of each worker before the last batch that was handed out.
        received: bad samples of each worker before the last batch that was made.
        num_cut: captions that were cut.
    """

    data: EpochData
    epoch: int
    entries: list[dict[str, Any]]
    interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
    handed_out: int = 0
    passed: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    num_cut: int = 0
    _failure: WorkerError | None = None

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress in the epoch after the batches that were handed out. All ranks must call it."""
        layout = self.data.layout
        bad = np.zeros((layout.world_size, layout.workers), dtype=np.int64)
        own = self.passed or [0] * layout.workers
        if self.data.is_shared:
            bad[:] = distributed.all_gather_object(own)
        else:
            bad[self.data.rank] = own
        seen, done = self.data.segments(self.entries)
        return [*self.entries[: len(seen)], self.data.entry(done + self.handed_out, bad.ravel().tolist())]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches; see :meth:`openclip_ext.data.loader.train_loader.TrainLoader.iterate`."""
        data = self.data
        left_out = data.bad.begin(self.epoch, is_fresh=not self.entries)
        while True:
            seen, start = data.segments(self.entries)
            order = epoch_order(data.source, data.seed, self.epoch, seen, data.layout, left_out)
            if order.batches < start:
                raise ValueError(
                    f"cannot resume: the checkpoint says {start} batches of the epoch are done, it has {order.batches}"
                )
            yield from self._until_short(seen, range(start, order.batches), left_out)
            done = start + self.handed_out
            data.bad.exchange()
            self.entries, self.handed_out = self.progress(), 0
            if done in (0, order.batches):
                break
            # The samples that are left on all ranks are laid out anew.
            self.entries.append(data.entry(0))
        if not any(entry["batches"] for entry in self.entries):
            raise BadDataError(f"epoch {self.epoch} has no step: its usable samples do not fill one")

    def _until_short(
        self, seen: tuple[Segment, ...], numbers: range, left_out: np.ndarray
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches in the current layout, until the workers of some rank have too few samples for a step.

        Several ranks make a step's batches before they take the step in front of it, so that none has to wait to hear of this.
        """
        data, layout = self.data, self.data.layout
        known = self.entries[-1].get("bad", ()) if len(self.entries) > len(seen) else ()
        self.received = list(known[data.rank * layout.workers :][: layout.workers]) or [0] * layout.workers
        self.handed_out, self.passed = 0, list(self.received)
        batches = self._noted(
            data.batches(self.epoch, seen, numbers, Beginning(left_out, tuple(self.received))), numbers
        )
        firsts = numbers[:: layout.accum_freq]
        steps: Iterator[_Step] = (self._next_step(batches) for _ in firsts)
        if data.is_shared:
            end: _Step = [], [], int
            steps = (step for step, _ in itertools.pairwise(itertools.chain(steps, [end])))
        for step, received, worst in steps:
            found = worst()
            if found == _Found.TOO_FEW_SAMPLES:
                return
            if found == _Found.INTERRUPTED:
                raise Interrupted
            if found == _Found.FAILED_WORKERS:
                raise self._failure or WorkerError("the data workers of another rank failed; see its error")
            if data.is_shared and self.handed_out % max(1, len(firsts) // 10 * layout.accum_freq) == 0:
                data.bad.exchange()
            self.handed_out += len(step)
            self.passed = received
            yield from step

    def _next_step(self, batches: Iterator[dict[str, Any]]) -> _Step:
        step: list[dict[str, Any]] = []
        try:
            with self.interruptible():
                step = list(itertools.islice(batches, self.data.layout.accum_freq))
            found = _Found.TOO_FEW_SAMPLES if any("is_short" in batch for batch in step) else _Found.BATCHES
        except WorkerError as error:
            self._failure, found = error, _Found.FAILED_WORKERS
        except Interrupted:
            found = _Found.INTERRUPTED
        worst = distributed.any_rank_soon(int(found)) if self.data.is_shared else lambda: found
        return step, list(self.received), worst

    def _noted(self, batches: Iterator[dict[str, Any]], numbers: range) -> Iterator[dict[str, Any]]:
        """Yield batches, and note their bad samples."""
        for number, batch in zip(numbers, batches, strict=True):
            bad = batch.pop("bad", ())
            self.received[number % self.data.layout.workers] += len(bad)
            for sample in bad:
                self.data.bad.add(sample)
            self.num_cut += batch.pop("num_cut", 0)
            yield batch
