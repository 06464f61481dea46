"""Training batches with indices: exact order, exact resuming, pixels that depend on (seed, epoch, index) alone.

:mod:`openclip_ext.data.order` has the order, and the sources read. Here workers decode and transform samples, pass over bad
ones, and make batches ``{"image", "text", "index"}``.
"""

import enum
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from openclip_ext import distributed
from openclip_ext.cli.options import flag
from openclip_ext.data.flip import flip_at_random
from openclip_ext.data.hashing import Purpose, hash_int, hash_text
from openclip_ext.data.loader.bad_samples import BadSample, BadSamples
from openclip_ext.data.loader.workers import WorkerError, kill_workers, leave_process_group, watched_batches
from openclip_ext.data.order import EpochOrder, Layout, Segment
from openclip_ext.data.sources.source import (
    MAX_CAPTION,
    BadDataError,
    BadSampleError,
    DecodedImage,
    ImageDecoder,
    RawSample,
    Source,
    decode_image,
)

Transform = Callable[[Any], Tensor]
Tokenizer = Callable[[str], Tensor]
Progress = Sequence[Mapping[str, Any]]
# The batches of a step, the bad samples of each worker up to it, and the worst that any rank found: see :class:`_Found`.
_Step = tuple[list[dict[str, Tensor]], list[int], Callable[[], int]]


@dataclass(frozen=True)
class TrainLoaderConfig:
    """Configuration of :class:`TrainLoader`."""

    batch_size: int = flag(minimum=1)  # samples of a micro-batch on one rank
    accum_freq: int = flag(1, minimum=1)  # micro-batches of an optimizer step
    workers: int = flag(0, minimum=0, maximum=1024)  # processes of each rank; 0 works in the training process
    seed: int = flag(0, minimum=0, maximum=2**32 - 1)  # of order and pixels
    rank: int | None = None  # None: that of torch.distributed, as world_size
    world_size: int | None = None
    shuffle_window: int = 10_000  # samples that a worker shuffles over; about half of them are in memory
    views: int = 1  # of each image: ``image`` is (batch_size, views, ...) if there are several, the text the first's
    caption_aware_flip: bool = flag(
        False, "mirror half of the images, with 'left' and 'right' exchanged in their captions"
    )
    draw_captions: bool = flag(
        False,
        "draw one of a sample's captions in each epoch: of all that --caption-key names, and of lists in json",
    )
    caption_hash: bool = False  # batches have ``caption_hash``, equal for equal captions
    pin_memory: bool = False
    patience: float | None = None  # seconds to wait for a worker before it is ended; None: for ever


class Interrupted(BaseException):
    """Raised by a signal handler while the training process waits for a batch: nothing should catch and retry it."""


class _Found(enum.IntEnum):
    """What a rank found when it asked for the batches of a step; the largest of all ranks counts for all."""

    BATCHES = 0
    TOO_FEW_SAMPLES = 1
    FAILED_WORKERS = 2
    INTERRUPTED = 3


class _Beginning(NamedTuple):
    """The state of the bad samples where the workers of a rank begin."""

    left_out: np.ndarray  # (k,) int64, ascending indices of bad samples that are not in the epoch
    passed: tuple[int, ...]  # number of bad samples that each worker has passed over before


class _Request(NamedTuple):
    """A request to a worker for one batch. It says everything, so that persistent workers never work on an old epoch."""

    epoch: int
    seen: tuple[Segment, ...]
    batch: int
    beginning: _Beginning | None = None  # with a worker's first request

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:3]


class _Requests(Sampler[_Request]):
    """The requests of the next pass over the DataLoader."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.epoch = 0
        self.seen: tuple[Segment, ...] = ()
        self.batches = range(0)
        self.beginning: _Beginning | None = None

    def __iter__(self) -> Iterator[_Request]:
        for place, batch in enumerate(self.batches):
            yield _Request(self.epoch, self.seen, batch, self.beginning if place < self._workers else None)

    def __len__(self) -> int:
        return len(self.batches)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the process's random generators at the end; only the training process needs that."""
    if get_worker_info() is not None:
        yield
        return
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _seed_generators(bits: int) -> None:
    # torch.manual_seed would seed the GPUs, too.
    torch.default_generator.manual_seed(bits >> 1)
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)


@dataclass(eq=False)
class _BatchDataset(Dataset):
    """Makes batches on request; each worker has an instance, which reads one stream of samples at a time."""

    _source: Source
    _config: TrainLoaderConfig
    _decoder: ImageDecoder
    _transform: Transform
    _tokenizer: Tokenizer
    _layout: Layout
    _rank: int
    _max_bad: int  # samples, in one batch
    _stream: Iterator[RawSample] = field(default_factory=lambda: iter(()))
    _expected: tuple[Any, ...] | None = None

    def __getitem__(self, request: _Request) -> dict[str, Any]:
        if request.key != self._expected:
            self._stream = self._open_stream(request)
        with _generators_kept():
            batch = self._make_batch(request.epoch)
        self._expected = request._replace(batch=request.batch + self._layout.workers).key
        return batch

    def _open_stream(self, request: _Request) -> Iterator[RawSample]:
        """Return the worker's samples from a batch on. Earlier ones are neither read nor decoded."""
        assert request.beginning is not None
        left_out, passed = request.beginning
        order = epoch_order(self._source, self._config.seed, request.epoch, request.seen, self._layout, left_out)
        worker = request.batch % self._layout.workers
        start = request.batch // self._layout.workers * self._layout.batch_size + passed[worker]
        return _stream_shuffled(self._source, order, self._rank, worker, start)

    def _make_batch(self, epoch: int) -> dict[str, Any]:
        """Make a batch of the next usable samples; ``is_short`` says that too few were left for one."""
        images, texts, indices, captions = [], [], [], []
        bad: list[BadSample] = []
        num_cut = 0
        for raw in self._stream:
            try:
                image, caption = self._decode(raw, epoch)
            except BadSampleError as error:
                bad.append(BadSample(raw.index, str(error), raw.problem is None))
                if len(bad) > self._max_bad:
                    break
                continue
            num_cut += len(caption) > MAX_CAPTION
            pixels, text, caption = self._view(image, caption[:MAX_CAPTION], epoch, raw.index)
            if self._config.views > 1:
                others = [
                    self._view(image, caption, epoch, raw.index, view)[0] for view in range(1, self._config.views)
                ]
                pixels = torch.stack([pixels, *others])
            images.append(pixels)
            texts.append(text)
            indices.append(raw.index)
            captions.append(caption)
            if len(indices) == self._layout.batch_size:
                break
        if len(indices) < self._layout.batch_size:
            return {"is_short": True, "bad": bad}
        batch = {"image": default_collate(images), "text": default_collate(texts), "index": torch.tensor(indices)}
        if self._config.caption_hash:
            batch["caption_hash"] = torch.tensor([hash_text(caption) for caption in captions])
        return batch | ({"bad": bad} if bad else {}) | ({"num_cut": num_cut} if num_cut else {})

    def _view(
        self, image: DecodedImage, caption: str, epoch: int, index: int, *view: int
    ) -> tuple[Tensor, Tensor, str]:
        """Return pixels, token ids ``(L,)`` and caption, random in (seed, epoch, index) and the number of a later view."""
        _seed_generators(hash_int(Purpose.PIXELS, self._config.seed, epoch, index, *view))
        if self._config.caption_aware_flip:
            image, caption = flip_at_random(image, caption)
        return self._transform(image), self._tokenizer(caption)[0], caption

    def _decode(self, raw: RawSample, epoch: int) -> tuple[DecodedImage, str]:
        draw = hash_int(Purpose.CAPTION, self._config.seed, epoch, raw.index) if self._config.draw_captions else 0
        return self._source.decode(raw, self._decoder, draw)

    def __getstate__(self) -> dict[str, Any]:
        # Streams have open files, which belong to one process.
        return self.__dict__ | {"_stream": iter(()), "_expected": None}


def epoch_order(
    source: Source, seed: int, epoch: int, seen: Sequence[Segment], layout: Layout, bad: np.ndarray
) -> EpochOrder:
    """Return the order of the rest of an epoch without the samples ``bad``."""
    sequence, num_slots = source.sequence(seed, epoch, layout.epoch_samples, bad)
    return EpochOrder(sequence, seed, epoch, seen, layout, num_slots)


def _stream_shuffled(source: Source, order: EpochOrder, rank: int, worker: int, start: int) -> Iterator[RawSample]:
    """Yield the samples of one worker in order, from the ``start``-th on; hold at most as many as the shuffle's window."""
    skipped = np.zeros(order.piece_length(rank, worker) if start else 0, dtype=bool)
    waiting: dict[int, RawSample] = {}
    ahead: Iterator[tuple[int, RawSample]] | None = None
    for positions in _skip(order.shuffled(rank, worker), start, skipped):
        # The first part comes when all skipped positions are marked.
        ahead = ahead or _read_in_sequence(source, order, rank, worker, skipped)
        for position in positions.tolist():
            while position not in waiting:
                place, raw = next(ahead)
                waiting[place] = raw
            yield waiting.pop(position)


def _skip(parts: Iterator[np.ndarray], count: int, skipped: np.ndarray) -> Iterator[np.ndarray]:
    """Drop the first ``count`` positions and mark them."""
    for part in parts:
        if count:
            skipped[part[:count]] = True
            part, count = part[count:], count - min(count, len(part))
        if len(part) or not count:
            yield part


def _read_in_sequence(
    source: Source, order: EpochOrder, rank: int, worker: int, skipped: np.ndarray
) -> Iterator[tuple[int, RawSample]]:
    reader = source.reader()
    length, step = order.piece_length(rank, worker), 4096

    def part(begin: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(begin, min(begin + step, length))
        if len(skipped):
            positions = positions[~skipped[positions]]
        return positions, order.piece_indices(rank, worker, positions)

    following = part(0)
    for begin in range(0, length, step):
        (positions, indices), following = following, part(begin + step)
        reader.expect(np.concatenate([indices, following[1]]))
        for position, index in zip(positions.tolist(), indices.tolist(), strict=True):
            yield position, reader(index)


class TrainLoader:
    """Training batches with global indices.

    On every rank, an epoch has ``batches_per_epoch`` batches of ``batch_size`` samples. Every sample comes once over all
    ranks, except for a remainder that does not fill a global batch (``batch_size * world_size * accum_freq``). Bad samples
    are passed over; if they leave too few, the epoch has fewer batches. Later epochs leave out the bad samples of all ranks,
    but try those again that could not be read.

    Args:
        source: The samples.
        config: How to batch them.
        preprocess: Makes a tensor of an RGB image. It may draw from the generators of torch, numpy and random, which are
            seeded by (seed, epoch, index) before each call.
        decoder: Makes what ``preprocess`` takes of the content of an image file; see :mod:`openclip_ext.data.images`.
        tokenizer: Makes token ids ``(1, L)`` of a caption, as OpenCLIP's.
        epoch_samples: Length of a shorter epoch, which has another part of the data each time. No index changes.
        max_bad_fraction: The run stops when more of the samples than this are bad.

    Raises:
        ValueError: There are too few samples for one global batch, or an argument is out of range.
        BadDataError: More samples than ``max_bad_fraction`` are known to be bad.
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
        self.max_bad_fraction = max_bad_fraction
        self._draws_captions = config.draw_captions
        self._layout = Layout(
            world_size=distributed.world_size() if config.world_size is None else config.world_size,
            workers=max(1, config.workers),
            batch_size=config.batch_size,
            accum_freq=config.accum_freq,
            epoch_samples=source.num_kept if epoch_samples is None else epoch_samples,
            shuffle_window=config.shuffle_window if source.sequential else 0,
        )
        self._check_arguments()
        self._config = config
        self._is_shared = self._layout.world_size == distributed.world_size() > 1
        self.bad = BadSamples(source, max_bad_fraction, self._layout.epoch_samples)
        self._num_cut = 0
        self._entries: list[dict[str, Any]] = []  # the progress at the beginning of the pass
        self._handed_out = 0  # batches since then
        self._passed = [0] * self._layout.workers  # bad samples of each worker before the last of them
        self._received = self._passed  # bad samples of each worker before the last batch that was made
        self._requests = _Requests(self._layout.workers)
        self._failure: WorkerError | None = None
        self._interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        max_bad = int(max_bad_fraction * self._layout.epoch_samples)
        self._dataset = _BatchDataset(source, config, decoder, preprocess, tokenizer, self._layout, self.rank, max_bad)
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._requests,
            num_workers=config.workers,
            worker_init_fn=leave_process_group,
            pin_memory=config.pin_memory,
            persistent_workers=config.workers > 0,
            # DataLoader would draw from the training process's generator at the start of every pass.
            generator=torch.Generator().manual_seed(config.seed & 0x7FFFFFFF),
        )

    def _check_arguments(self) -> None:
        layout, source = self._layout, self.source
        if min(layout.batch_size, layout.accum_freq, layout.world_size, layout.epoch_samples) < 1:
            raise ValueError(f"batch size, accumulation, ranks and samples must be at least 1, got {layout}")
        if not layout.batches(layout.epoch_samples):
            raise ValueError(
                f"too few samples: the epoch has {layout.epoch_samples:,}, one global batch is batch size "
                f"{layout.batch_size} x {layout.world_size} ranks x {layout.accum_freq} accumulated = "
                f"{layout.global_batch:,}. Lower the batch size or use fewer ranks"
            )
        if self._draws_captions and not source.several_captions:
            raise ValueError("--draw-captions is for shards: other data sets have one caption for each image")
        bad, where = source.known_bad()
        if bad > self.max_bad_fraction * source.num_samples:
            raise BadDataError(
                f"{bad:,} of {source.num_samples:,} samples ({bad / source.num_samples:.1%}) are lost or have no image "
                f"or no caption, more than the allowed {self.max_bad_fraction:.1%} (--max-bad-fraction): {where}"
            )

    @property
    def num_samples(self) -> int:
        """Size ``n`` of the index space."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of each rank in a whole epoch."""
        return self._layout.batches(self._layout.epoch_samples)

    @property
    def layout(self) -> dict[str, Any]:
        """The current layout as a progress entry without ``batches``, in plain types."""
        return asdict(self._layout) | {"seed": self.seed, "data": self.source.digest}

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress in the epoch after the batches that :meth:`iterate` has handed out. All ranks must call it.

        It also tells the ranks each other's bad samples.
        """
        self.bad.share()
        layout = self._layout
        bad = np.zeros((layout.world_size, layout.workers), dtype=np.int64)
        if self._is_shared:
            bad[:] = distributed.all_gather_object(self._passed)
        else:
            bad[self.rank] = self._passed
        seen, done = self.check_progress(self._entries)
        entry = self.layout | {"batches": done + self._handed_out, "bad": bad.ravel().tolist()}
        return [*self._entries[: len(seen)], entry]

    @contextmanager
    def interrupted_by(self, interruptible: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Wait for batches inside of a context in which a signal handler may raise :class:`Interrupted`.

        If the block ends with an exception, the workers are killed: the process would wait for one that hangs.
        """
        self._interruptible = interruptible
        try:
            yield
        except BaseException:
            kill_workers(self._loader)
            raise
        finally:
            self._interruptible = nullcontext

    def check_progress(self, progress: Progress | None) -> tuple[tuple[Segment, ...], int]:
        """Return the segments in other layouts, and how many batches of the current one are done.

        Raises:
            ValueError: The progress is of another data set or seed.
        """
        segments = []
        for entry in progress or ():
            for name, own in (("seed", self.seed), ("data", self.source.digest)):
                if entry.get(name, own) != own:
                    what = "data set (or manifest)" if name == "data" else name
                    raise ValueError(
                        f"cannot go on in mid-epoch: the checkpoint was made with {what} {entry[name]}, this run has "
                        f"{own}. Use the same, or begin a run of another --name with --resume and the checkpoint of a "
                        "completed epoch"
                    )
            segments.append(Segment(self._layout.replaced(entry), int(entry["batches"]), tuple(entry.get("bad", ()))))
        if segments and segments[-1].layout == self._layout:
            return tuple(segments[:-1]), segments[-1].batches
        return tuple(segments), 0

    def iterate(self, epoch: int, progress: Progress | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield the rest of an epoch.

        If bad samples leave a worker with too few for its last batch, the samples that are left on all ranks are laid out
        anew, as long as they fill a step.

        Args:
            epoch: Number of the epoch, from 0.
            progress: The part that was seen, from :meth:`progress`: entries ``loader.layout | {"batches": those of each rank,
                "bad": ...}``. If the last layout is the current one, the same batches follow; otherwise the unseen
                samples are laid out anew.

        Yields:
            ``image`` ``(batch_size, ...)``, ``text`` ``(batch_size, L)`` int64, ``index`` ``(batch_size,)`` int64,
            and where configured ``caption_hash`` ``(batch_size,)`` int64.

        Raises:
            ValueError: The progress is not of this data set and seed, or has more batches than the epoch.
            BadDataError: Too many samples are bad. The ranks add up theirs now and then, so they must iterate side by side.
            WorkerError: A worker of some rank exited or did not answer; all ranks raise it before the same step.
            Interrupted: a signal came while some rank waited, see :meth:`interrupted_by`; all ranks raise it before the same
                step.
        """
        self._entries = [dict(entry) for entry in progress or ()]
        left_out = self.bad.begin(epoch, is_fresh=not progress)
        while True:
            seen, start = self.check_progress(self._entries)
            order = epoch_order(self.source, self.seed, epoch, seen, self._layout, left_out)
            if order.batches < start:
                raise ValueError(
                    f"cannot resume: the checkpoint says {start} batches of the epoch are done, it has {order.batches}"
                )
            yield from self._until_short(epoch, seen, start, order, left_out)
            done = start + self._handed_out
            self._entries, self._handed_out = self.progress(), 0
            if done in (0, order.batches):
                break
            self._entries.append(self.layout | {"batches": 0})
        if not any(entry["batches"] for entry in self._entries):
            raise BadDataError(f"epoch {epoch} has no step: its usable samples do not fill one")
        self.bad.log_epoch()
        if self._num_cut:
            logging.warning(
                f"Rank {self.rank} has cut {self._num_cut:,} captions to their first {MAX_CAPTION:,} characters so far."
            )

    def _until_short(
        self, epoch: int, seen: tuple[Segment, ...], start: int, order: EpochOrder, left_out: np.ndarray
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches in the current layout, until the workers of some rank have too few samples for a step.

        Several ranks make a step's batches before they take the step in front of it, so that none has to wait to hear of this.
        """
        layout = self._layout
        known = self._entries[-1].get("bad", ()) if len(self._entries) > len(seen) else ()
        self._received = list(known[self.rank * layout.workers :][: layout.workers]) or [0] * layout.workers
        self._handed_out, self._passed = 0, list(self._received)
        batches = self._batches(epoch, seen, range(start, order.batches), left_out)
        firsts = range(start, order.batches, layout.accum_freq)
        steps: Iterator[_Step] = (self._next_step(batches) for _ in firsts)
        if self._is_shared:
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
            if self._is_shared and self._handed_out % max(1, len(firsts) // 10 * layout.accum_freq) == 0:
                self.bad.share()
            self._handed_out += len(step)
            self._passed = received
            yield from step

    def _next_step(self, batches: Iterator[dict[str, Any]]) -> _Step:
        step: list[dict[str, Any]] = []
        try:
            with self._interruptible():
                step = list(itertools.islice(batches, self._layout.accum_freq))
            found = _Found.TOO_FEW_SAMPLES if any("is_short" in batch for batch in step) else _Found.BATCHES
        except WorkerError as error:
            self._failure, found = error, _Found.FAILED_WORKERS
        except Interrupted:
            found = _Found.INTERRUPTED
        worst = distributed.any_rank_soon(int(found)) if self._is_shared else lambda: found
        return step, list(self._received), worst

    def _batches(
        self, epoch: int, seen: tuple[Segment, ...], numbers: range, left_out: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """Yield batches, and note their bad samples."""
        self._requests.epoch, self._requests.seen, self._requests.batches = epoch, seen, numbers
        self._requests.beginning = _Beginning(left_out, tuple(self._received))
        for number, batch in zip(numbers, watched_batches(self._loader, self._config.patience), strict=True):
            bad = batch.pop("bad", ())
            self._received[number % self._layout.workers] += len(bad)
            for sample in bad:
                self.bad.add(sample)
            self._num_cut += batch.pop("num_cut", 0)
            yield batch
