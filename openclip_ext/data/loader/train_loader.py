"""Training batches with sample indices. An interrupted epoch resumes exactly. Pixels depend only on (seed, epoch, index)."""

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
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
from openclip_ext.data.order import Lanes
from openclip_ext.data.sources.source import BadDataError, ImageDecoder, Source, decode_image

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
    failure: WorkerError | None
    worst: Callable[[], int]  # returns the largest _Found of all ranks


@dataclass
class _Position:
    """The position in an epoch."""

    epoch: int
    lanes: Lanes
    steps: int  # number of completed steps


class TrainLoader:
    """Training batches with global indices.

    On every rank, an epoch has ``batches_per_epoch`` batches of ``batch_size`` samples. Exactly one rank yields each sample,
    except for a remainder smaller than a global batch (``batch_size * world_size * accum_freq``). A bad sample is replaced by
    another sample of the epoch, which the epoch then has twice. Later epochs exclude bad samples, but retry samples that
    could not be read.

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
        self._accum_freq = config.accum_freq
        self._workers = max(1, config.workers)
        rank = distributed.rank() if config.rank is None else config.rank
        world_size = distributed.world_size() if config.world_size is None else config.world_size
        self.lanes = _lanes(source, config, world_size, source.num_kept if epoch_samples is None else epoch_samples)
        _check_arguments(source, config, self.lanes, world_size, max_bad_fraction)
        # Whether each rank is a process of this run. If not, this rank does not know the bad samples of the others, and an
        # order without its own bad samples would repeat samples of other ranks.
        self._is_shared = world_size == distributed.world_size() > 1
        self._knows_all_ranks = self._is_shared or world_size == 1
        self.bad = BadSamples(source, max_bad_fraction, self.lanes.epoch_samples)
        self._requests = BatchRequests()
        max_bad = int(max_bad_fraction * self.lanes.epoch_samples)
        self._loader: DataLoader[Any] = DataLoader(
            BatchDataset(source, config, decoder, preprocess, tokenizer, rank, max_bad),
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
        self._loaded: Mapping[str, Any] = {}
        self._position: _Position | None = None  # None between epochs
        self._steps_left = 0
        self._left_out = np.empty(0, np.int64)  # bad samples that the epoch excludes

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``, including excluded samples."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches of each rank in an epoch without excluded samples."""
        return self.lanes.steps(self.lanes.epoch_samples) * self._accum_freq

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the epoch and the bad samples, in plain types. Collective: all ranks call it.

        ``progress`` has ``epoch``, ``steps`` (number of steps of which a batch was yielded), ``seed``, ``data`` (digest) and
        ``lanes`` of the epoch. It is empty before the first step, because a resume may then use other data.
        """
        progress, position = self._loaded, self._position
        if position is not None:
            self.bad.exchange()
            progress = {
                "epoch": position.epoch,
                "steps": position.steps,
                "seed": self.seed,
                "data": self.source.digest,
                "lanes": asdict(position.lanes),
            }
        return {"progress": dict(progress) if progress.get("steps") else {}, "bad": self.bad.state_dict()}

    def bad_counts(self) -> tuple[int, int]:
        """Return how many bad samples this epoch replaces or excludes, see :meth:`BadSamples.counts`."""
        return self.bad.counts()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the next :meth:`iterate` continues from it.

        Raises:
            ValueError: The state is from the middle of an epoch of another data set, seed or global batch.
        """
        progress = state_dict.get("progress") or {}
        for name, what, own in (
            ("seed", "seed", self.seed),
            ("data", "data set (or manifest)", self.source.digest),
            ("lanes", "global batch", self.lanes.global_batch),
        ):
            found = progress.get(name, own)
            found = Lanes(**found).global_batch if isinstance(found, Mapping) else found
            if found != own:
                raise ValueError(
                    f"cannot resume mid-epoch: the checkpoint was made with {what} {found}, this run has {own}. Use the same "
                    f"{what}, or --resume an end-of-epoch checkpoint under a new --name"
                )
        self.bad.load_state_dict(state_dict.get("bad", {}))
        self._loaded, self._position = progress, None

    def undo_step(self) -> None:
        """Exclude the last yielded step from the progress, because it is not trained on. The iteration must then end."""
        assert self._position is not None
        self._position.steps -= 1

    def begin(self, epoch: int) -> int:
        """Begin an epoch, or continue the loaded one, whose batches :meth:`rest` yields; return the number of steps left.

        Raises:
            ValueError: The loaded state belongs to another epoch, or has more steps than the epoch.
        """
        progress = self._loaded
        if progress.get("epoch", epoch) != epoch:
            raise ValueError(
                f"the loaded state is from the middle of epoch {progress['epoch']}, not {epoch}: iterate the epoch of the "
                "state"
            )
        self._loaded = {}
        lanes = Lanes(**progress["lanes"]) if progress else self.lanes
        self._position = _Position(epoch, lanes, progress.get("steps", 0))
        self._left_out = self.bad.begin(epoch, is_fresh=not progress)
        if not self._knows_all_ranks:
            self._left_out = self._left_out[:0]
        steps = epoch_order(self.source, self.seed, epoch, lanes, self._left_out).steps
        if steps < self._position.steps:
            raise ValueError(
                f"cannot resume: the checkpoint has {self._position.steps} steps, but its epoch has only {steps}. Use an "
                "end-of-epoch checkpoint"
            )
        self._steps_left = steps - self._position.steps
        return self._steps_left

    def iterate(self, epoch: int, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield an epoch, or the rest of the epoch whose state :meth:`load_state_dict` has received.

        The rest of an epoch has the same global batches on any number of ranks and workers. Each rank yields consecutive
        samples of a global batch.

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
            ValueError: The loaded state has more steps than the epoch, or belongs to another epoch.
            RuntimeError: A later call has started another iteration or loaded a state, which ends this iteration.
            BadDataError: Too many samples are bad. The ranks must iterate together, because they add up their bad samples.
            WorkerError: A worker of any rank exited or did not answer. All ranks raise it before the same step.
            Interrupted: A signal came while any rank waited. All ranks raise it before the same step.
        """
        self.begin(epoch)
        yield from self.rest(interruptible)

    def rest(self, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield the batches that are left in the epoch that :meth:`begin` has begun, see :meth:`iterate`."""
        position, left = self._position, self._steps_left
        assert position is not None, "begin() comes first"
        steps = self._steps(range(position.steps, position.steps + left), interruptible)
        if self._is_shared:  # the ranks exchange the results of a step while the step before it runs, so no rank waits
            steps = _one_ahead(steps)
        exchange_every = max(1, left // 10)
        for number, step in enumerate(steps):
            found = step.worst()
            if found == _Found.INTERRUPTED:
                raise Interrupted
            if found == _Found.FAILED_WORKERS:
                raise step.failure or WorkerError("the data workers of another rank failed; see its error")
            if found == _Found.TOO_FEW_SAMPLES:
                error = self.bad.error(f"epoch {position.epoch} has too few usable samples to replace its bad samples")
                self.bad.exchange()
                raise error
            if self._is_shared and number % exchange_every == 0:
                self.bad.exchange()
            position.steps += 1
            for batch in step.batches:
                yield batch
                if self._position is not position:
                    raise RuntimeError(ONE_EPOCH)
        self.bad.exchange()
        self._position = None
        self.bad.log_epoch()

    def _steps(self, steps: range, interruptible: Interruptible) -> Iterator[_Step]:
        position, accum_freq = self._position, self._accum_freq
        assert position is not None
        self._requests.next_pass = (
            BatchRequest(position.epoch, position.lanes, number, self._left_out if place < self._workers else None)
            for place, number in enumerate(range(steps.start * accum_freq, steps.stop * accum_freq))
        )
        batches = watched_batches(self._loader, self._patience)
        for _ in steps:
            received, failure, found = self._next_batches(batches, interruptible)
            for batch in received:
                for sample in batch.pop("bad", ()):
                    self.bad.add(sample)
            worst = distributed.any_rank_soon(found) if self._is_shared else partial(int, found)
            yield _Step(received, failure, worst)

    def _next_batches(
        self, batches: Iterator[dict[str, Any]], interruptible: Interruptible
    ) -> tuple[list[dict[str, Any]], WorkerError | None, _Found]:
        try:
            with interruptible():
                received = list(itertools.islice(batches, self._accum_freq))
        except WorkerError as error:
            return [], error, _Found.FAILED_WORKERS
        except Interrupted:
            return [], None, _Found.INTERRUPTED
        has_too_few = any("has_too_few" in batch for batch in received)
        return received, None, _Found.TOO_FEW_SAMPLES if has_too_few else _Found.BATCHES


def _one_ahead(steps: Iterator[_Step]) -> Iterator[_Step]:
    """Yield all steps, but request each step before the previous step is yielded."""
    following = next(steps, None)
    while following is not None:
        step, following = following, next(steps, None)
        yield step


def _lanes(source: Source, config: TrainLoaderConfig, world_size: int, epoch_samples: int) -> Lanes:
    """Return the lanes of an epoch that begins now. A source that can be read in any order needs only one lane."""
    workers = max(1, config.workers)
    if source.sequential:
        return Lanes(world_size, workers, config.batch_size, config.accum_freq, epoch_samples, config.shuffle_window)
    return Lanes(1, 1, world_size * config.batch_size * config.accum_freq, 1, epoch_samples, 0)


def _check_arguments(
    source: Source, config: TrainLoaderConfig, lanes: Lanes, world_size: int, max_bad_fraction: float
) -> None:
    if not 0 <= (config.rank or 0) < world_size:
        raise ValueError(f"rank={config.rank}: expected an integer >= 0, below world_size={world_size}")
    if not lanes.steps(lanes.epoch_samples):
        raise ValueError(
            f"too few samples: the epoch has {lanes.epoch_samples:,}, but a global batch needs {lanes.global_batch:,} of them "
            f"({config.batch_size} per micro-batch × --accum-freq {config.accum_freq} × {world_size} ranks). Lower "
            "--batch-size or use fewer ranks"
        )
    if config.draw_captions and not source.several_captions:
        raise ValueError(
            "--draw-captions: each image of this data set has one caption. Remove the flag, or name several columns: "
            "--csv-caption-key 'title;description'"
        )
    drawn = {"--draw-captions": config.draw_captions, "--draw-sentences": config.draw_sentences}
    for flag in (name for name, is_used in drawn.items() if is_used and source.reference is not None):
        raise ValueError(
            f"{flag}: expected no --reference, which has the embedding of one caption for each image. "
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
