"""Training batches with sample indices. An interrupted epoch resumes exactly. Pixels depend only on (seed, epoch, index)."""

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from openclip_ext import distributed
from openclip_ext.data.loader.bad_samples import BadSamples
from openclip_ext.data.loader.batches import (
    BatchDataset,
    BatchRequest,
    BatchRequests,
    Tokenizer,
    Transform,
    epoch_order,
)
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.loader.workers import WorkerError, leave_process_group, watched_batches
from openclip_ext.data.order import Layout, Segment
from openclip_ext.data.sources.source import BadDataError, ImageDecoder, Source, decode_image

Progress = Sequence[Mapping[str, Any]]
Interruptible = Callable[[], AbstractContextManager[Any]]
ONE_EPOCH = (
    "iterate() or load_state_dict() was called during this epoch, but a loader reads one epoch at a time: build a "
    "second loader"
)


class Interrupted(BaseException):
    """Raised by a signal handler while the training process waits for a batch. ``except Exception`` does not catch it."""


class _Found(enum.IntEnum):
    """The result of requesting the batches of a step on one rank. The largest value of all ranks applies to all ranks."""

    BATCHES = 0
    TOO_FEW_SAMPLES = 1
    FAILED_WORKERS = 2
    INTERRUPTED = 3


class _Step(NamedTuple):
    """The result of requesting the batches of a step."""

    batches: list[dict[str, Any]]
    passed: list[int]  # number of bad samples that each worker has skipped up to the step
    failure: WorkerError | None
    worst: Callable[[], int]  # returns the largest _Found of all ranks


@dataclass
class _Position:
    """The position in an epoch."""

    epoch: int
    seen: tuple[Segment, ...]  # the segments in earlier layouts
    done: int  # number of batches yielded in the current layout
    passed: list[int]  # number of bad samples that each worker has skipped in the current layout
    before: tuple[int, list[int]] | None = None  # ``done`` and ``passed`` before the last step


class TrainLoader:
    """Training batches with global indices.

    On every rank, an epoch has ``batches_per_epoch`` batches of ``batch_size`` samples. Exactly one rank yields each sample,
    except for a remainder smaller than a global batch (``batch_size * world_size * accum_freq``). Bad samples are skipped,
    which may shorten the epoch. Later epochs exclude bad samples, but retry samples that could not be read.

    Args:
        source: The samples.
        config: Batch size, workers, seed and other settings.
        preprocess: Turns an RGB image into a tensor. It may use the generators of torch, numpy and random, which are seeded
            by (seed, epoch, index) before each call.
        decoder: Turns the content of an image file into the input of ``preprocess``, see :mod:`openclip_ext.data.images`.
        tokenizer: Turns a list of B captions into token ids ``(B, L)``, as OpenCLIP's tokenizers do.
        epoch_samples: Number of samples in a shorter epoch. Each epoch then has a different part of the data. Indices do not
            change. None (default) means all samples.
        max_bad_fraction: The run stops when more than this fraction of the samples is bad.

    Raises:
        ValueError: There are too few samples for one global batch, or an argument is out of range.
        BadDataError: More than ``max_bad_fraction`` of the samples are known to be bad.
    """

    def __init__(
        self,
        source: Source,
        config: TrainLoaderConfig,
        *,
        preprocess: Transform,
        tokenizer: Tokenizer,
        decoder: ImageDecoder = decode_image,
        epoch_samples: int | None = None,
        max_bad_fraction: float = 0.05,
    ) -> None:
        self.source = source
        self.seed = config.seed
        self.rank = distributed.rank() if config.rank is None else config.rank
        self._layout = Layout(
            world_size=distributed.world_size() if config.world_size is None else config.world_size,
            workers=max(1, config.workers),
            batch_size=config.batch_size,
            accum_freq=config.accum_freq,
            epoch_samples=source.num_kept if epoch_samples is None else epoch_samples,
            shuffle_window=config.shuffle_window if source.sequential else 0,
        )
        _check_arguments(source, config, self._layout, max_bad_fraction)
        # Whether each rank of the layout is a process of this run.
        self._is_shared = self._layout.world_size == distributed.world_size() > 1
        # If not, this rank does not know the bad samples of the others. An order without its own bad samples would repeat
        # samples of other ranks.
        self._knows_all_ranks = self._is_shared or self._layout.world_size == 1
        self.bad = BadSamples(source, max_bad_fraction, self._layout.epoch_samples)
        self._requests = BatchRequests()
        max_bad = int(max_bad_fraction * self._layout.epoch_samples)
        self._loader: DataLoader[Any] = DataLoader(
            BatchDataset(source, config, decoder, preprocess, tokenizer, self._layout, self.rank, max_bad),
            batch_size=None,
            sampler=self._requests,
            num_workers=config.workers,
            worker_init_fn=leave_process_group,
            pin_memory=config.pin_memory,
            persistent_workers=config.workers > 0,
            # Without this generator, DataLoader would draw from the training process's generator at the start of every pass.
            generator=torch.Generator().manual_seed(config.seed & 0x7FFFFFFF),
        )
        self._patience = config.patience
        self._loaded: Progress = ()
        self._position: _Position | None = None  # None between epochs

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``, including excluded samples."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches of each rank in a full epoch."""
        return self._layout.batches(self._layout.epoch_samples)

    @property
    def layout(self) -> dict[str, Any]:
        """The current layout in plain Python types. :meth:`state_dict` stores it in ``progress``."""
        return asdict(self._layout) | {"seed": self.seed, "data": self.source.digest}

    def _current_segment(self, position: _Position) -> Segment:
        self.bad.exchange()
        bad = np.zeros((self._layout.world_size, self._layout.workers), dtype=np.int64)
        if self._is_shared:
            bad[:] = distributed.all_gather_object(position.passed)
        else:
            bad[self.rank] = position.passed
        return Segment(self._layout, position.done, tuple(bad.ravel().tolist()))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the epoch and the bad samples, in plain types. Collective: all ranks call it.

        ``progress`` is a list of ``loader.layout | {"batches": number on each rank, "bad": number of bad samples that each
        worker has skipped, "excluded": see :class:`Segment`, "epoch": number of the epoch}``, with an entry for each layout of
        the epoch.
        """
        progress, position = list(self._loaded), self._position
        if position is not None:
            common = self.layout | {"epoch": position.epoch}
            progress = [
                common
                | asdict(segment.layout)
                | {"batches": segment.batches, "bad": list(segment.bad), "excluded": list(segment.excluded)}
                for segment in (*position.seen, self._current_segment(position))
            ]
        has_begun = any(entry["batches"] for entry in progress)  # if not, a resume may use other data
        return {"progress": progress if has_begun else [], "bad": self.bad.state_dict()}

    def bad_counts(self) -> tuple[int, int]:
        """Return how many bad samples this epoch skips, see :meth:`BadSamples.counts`."""
        return self.bad.counts()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the next :meth:`iterate` continues from it. For errors, see :meth:`check_progress`."""
        self.bad.load_state_dict(state_dict.get("bad", {}))
        self._loaded, self._position = state_dict.get("progress", ()), None
        self.check_progress(self._loaded)

    def begin(self, epoch: int, is_fresh: bool) -> np.ndarray:
        """Forget an iteration that did not end, and return the result of :meth:`BadSamples.begin`."""
        self._position = None
        return self.bad.begin(epoch, is_fresh)

    def undo_step(self) -> None:
        """Exclude the last yielded step from the progress, because it is not trained on. The iteration must then end."""
        if self._position is not None and self._position.before is not None:
            self._position.done, self._position.passed = self._position.before

    def check_progress(self, progress: Progress) -> tuple[tuple[Segment, ...], Segment]:
        """Return the segments that used other layouts, and the segment in the current layout, which may have no batches.

        Raises:
            ValueError: The progress belongs to another data set or seed.
        """
        segments = []
        for entry in progress:
            for name, what in (("seed", "seed"), ("data", "data set (or manifest)")):
                if entry.get(name, self.layout[name]) != self.layout[name]:
                    raise ValueError(
                        f"cannot resume mid-epoch: the checkpoint was made with {what} {entry[name]}, this run has "
                        f"{self.layout[name]}. Use the same {what}, or --resume an end-of-epoch checkpoint under a new --name"
                    )
            segments.append(
                Segment(
                    self._layout.replaced(entry),
                    int(entry["batches"]),
                    tuple(entry.get("bad", ())),
                    tuple(entry.get("excluded", ())),
                )
            )
        if segments and segments[-1].layout == self._layout:
            return tuple(segments[:-1]), segments[-1]
        return tuple(segments), Segment(self._layout, 0)

    def iterate(self, epoch: int, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield an epoch, or the rest of the epoch whose state :meth:`load_state_dict` has received.

        If the state's last layout is the current layout, the same batches follow. Otherwise the remaining samples are
        distributed by the current layout. A worker may have too few usable samples for its last batch. Then the remaining
        samples of all ranks, without those known to be bad, are distributed again among the workers, as long as they fill a
        step. Ranks that torch.distributed does not connect (``config.world_size``) end their epoch instead, and may have
        different numbers of batches. Their later epochs do not exclude bad samples, but skip them again. After bad samples,
        the state of such a rank can be resumed only by the same rank in the same layout; other layouts would repeat samples.

        Args:
            epoch: Number of the epoch, from 0.
            interruptible: Returns a context for the waits for batches, in which a signal handler may raise
                :class:`Interrupted`.

        Yields:
            ``image`` ``(batch_size, ...)``, ``text`` ``(batch_size, L)`` int64, ``index`` ``(batch_size,)`` int64,
            and if configured ``caption_hash`` and ``image_hash`` ``(batch_size,)`` int64 and ``hard_negative``
            ``(batch_size, L)`` int64.
            With ``text_groups``, these texts are also in groups (:class:`TextGroups`), the hard negatives last.

        Raises:
            ValueError: The loaded state has more batches than the epoch, or belongs to another epoch.
            RuntimeError: A later call has started another iteration or loaded a state, which ends this iteration.
            BadDataError: Too many samples are bad. The ranks must iterate together, because they add up their bad samples.
            WorkerError: A worker of any rank exited or did not answer. All ranks raise it before the same step.
            Interrupted: A signal came while any rank waited. All ranks raise it before the same step.
        """
        if others := {entry.get("epoch", epoch) for entry in self._loaded} - {epoch}:
            raise ValueError(
                f"the loaded state is from the middle of epoch {others.pop()}, not {epoch}: iterate the epoch of the state"
            )
        progress, self._loaded = self._loaded, ()
        seen, current = self.check_progress(progress)
        workers = self._layout.workers
        passed = list(current.bad[self.rank * workers :][:workers]) or [0] * workers
        left_out = self.begin(epoch, is_fresh=not progress)
        self._position = position = _Position(epoch, seen, current.batches, passed)
        if not self._knows_all_ranks:
            left_out = left_out[:0]
        while True:
            order = epoch_order(self.source, self.seed, epoch, position.seen, self._layout, left_out)
            yield from self._until_short(position, order.batches, left_out, interruptible)
            current = self._current_segment(position)
            if position.done == order.batches or not self._knows_all_ranks:
                break
            # Distribute the remaining samples of all ranks again. The worker with too few samples has found a bad one among
            # them, so each pass has fewer samples than the pass before.
            left = epoch_order(self.source, self.seed, epoch, (*position.seen, current), self._layout, left_out)
            current = replace(current, excluded=left.positions(self.bad.known()))
            position.seen, position.done, position.passed = (*position.seen, current), 0, [0] * workers
        if not any(segment.batches for segment in (*position.seen, current)):
            raise BadDataError(
                f"epoch {epoch} has no step: its usable samples do not fill a global batch. Lower --batch-size"
            )
        self._position = None
        self.bad.log_epoch()

    def _until_short(
        self, position: _Position, end: int, left_out: np.ndarray, interruptible: Interruptible
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the batches up to ``end``, or fewer if the workers of any rank have too few samples for a step."""
        numbers, workers = range(position.done, end), self._layout.workers
        seen, passed = position.seen, position.passed
        self._requests.next_pass = requests = (
            BatchRequest(position.epoch, seen, number, passed[number % workers], left_out if place < workers else None)
            for place, number in enumerate(numbers)
        )
        batches = watched_batches(self._loader, self._patience)
        steps = self._steps(batches, numbers, passed, interruptible)
        if self._is_shared:  # the ranks exchange the results of a step while the step before it runs, so no rank waits
            steps = _one_ahead(steps)
        exchange_every = max(1, len(numbers) // self._layout.accum_freq // 10)
        for number, step in enumerate(steps):
            found = step.worst()
            if found == _Found.TOO_FEW_SAMPLES:
                requests.close()
                self._learn_bad_samples(batches)
                return
            if found == _Found.INTERRUPTED:
                raise Interrupted
            if found == _Found.FAILED_WORKERS:
                raise step.failure or WorkerError("the data workers of another rank failed; see its error")
            if self._is_shared and number % exchange_every == 0:
                self.bad.exchange()
            position.before = position.done, position.passed
            position.done += len(step.batches)
            position.passed = step.passed
            for batch in step.batches:
                yield batch
                if self._position is not position:
                    raise RuntimeError(ONE_EPOCH)

    def _learn_bad_samples(self, batches: Iterator[dict[str, Any]]) -> None:
        """Receive the batches that the workers have begun, to know their bad samples. The next pass would wait for them."""
        with suppress(WorkerError):  # the next pass raises it on all ranks
            for batch in batches:
                for sample in batch.get("bad", ()):
                    self.bad.add(sample)

    def _steps(
        self, batches: Iterator[dict[str, Any]], numbers: range, passed: list[int], interruptible: Interruptible
    ) -> Iterator[_Step]:
        for first in numbers[:: self._layout.accum_freq]:
            received, failure, found = self._next_batches(batches, interruptible)
            passed = list(passed)
            for number, batch in enumerate(received, start=first):
                for sample in batch.pop("bad", ()):
                    self.bad.add(sample)
                    passed[number % self._layout.workers] += 1
            worst = distributed.any_rank_soon(found) if self._is_shared else partial(int, found)
            yield _Step(received, passed, failure, worst)

    def _next_batches(
        self, batches: Iterator[dict[str, Any]], interruptible: Interruptible
    ) -> tuple[list[dict[str, Any]], WorkerError | None, _Found]:
        try:
            with interruptible():
                received = list(itertools.islice(batches, self._layout.accum_freq))
        except WorkerError as error:
            return [], error, _Found.FAILED_WORKERS
        except Interrupted:
            return [], None, _Found.INTERRUPTED
        is_short = any("is_short" in batch for batch in received)
        return received, None, _Found.TOO_FEW_SAMPLES if is_short else _Found.BATCHES


def _one_ahead(steps: Iterator[_Step]) -> Iterator[_Step]:
    """Yield all steps, but request each step before the previous step is yielded."""
    following = next(steps, None)
    while following is not None:
        step, following = following, next(steps, None)
        yield step


def _check_arguments(source: Source, config: TrainLoaderConfig, layout: Layout, max_bad_fraction: float) -> None:
    if not 0 <= (config.rank or 0) < layout.world_size:
        raise ValueError(f"rank={config.rank}: expected an integer >= 0, below world_size={layout.world_size}")
    if not layout.batches(layout.epoch_samples):
        raise ValueError(
            f"too few samples: the epoch has {layout.epoch_samples:,}, but one global batch is batch size "
            f"{layout.batch_size} x {layout.world_size} ranks x {layout.accum_freq} accumulated = "
            f"{layout.global_batch:,}. Lower the batch size or use fewer ranks"
        )
    if config.draw_captions and not source.several_captions:
        raise ValueError("--draw-captions needs shards: other data sets have one caption for each image")
    if config.draw_captions and source.reference is not None:
        raise ValueError(
            "--draw-captions: expected no --reference, which has the embedding of one caption for each image. "
            "Remove one of the two flags"
        )
    if config.caption_aware_flip and source.has_hard_negatives:
        raise ValueError(
            "--caption-aware-flip: expected no --hard-negative-key, because a mirrored image may fit a caption that the image "
            "does not fit. Remove one of the two flags"
        )
    bad, where = source.known_bad()
    if bad > max_bad_fraction * source.num_samples:
        raise BadDataError(
            f"{bad:,} of {source.num_samples:,} samples ({bad / source.num_samples:.1%}) are lost or have no image "
            f"or no caption, more than the allowed {max_bad_fraction:.1%} (--max-bad-fraction): {where}"
        )
