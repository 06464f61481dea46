"""Training batches with indices: exact order, exact resuming, pixels that depend on (seed, epoch, index) alone.

The order is in :mod:`openclip_ext.data.order`, the reading in the sources. Here samples become batches: workers decode
and transform, bad samples are replaced and counted, and the training process gets
``{"image", "text", "index"}``.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from openclip_ext import distributed
from openclip_ext.data.flip import flip_at_random
from openclip_ext.data.hashing import Purpose, hash_int, hash_text
from openclip_ext.data.order import EpochOrder, Layout, Segment
from openclip_ext.data.source import (
    BadDataError,
    BadSampleError,
    DecodedImage,
    ImageDecoder,
    RawSample,
    Reader,
    Source,
    decode_image,
)
from openclip_ext.data.worker_signals import leave_process_group, start_workers
from openclip_ext.options import flag

Transform = Callable[[Any], Tensor]
Tokenizer = Callable[[str], Tensor]
Progress = Sequence[Mapping[str, Any]]

_MAX_LOGGED = 20
# Candidates tried for one bad sample between two looks at whether the data as a whole are too bad.
_PATIENCE = 1000


@dataclass(frozen=True)
class TrainLoaderConfig:
    """Configuration of :class:`TrainLoader`."""

    batch_size: int = flag(minimum=1)  # samples of a micro-batch on one rank
    accum_freq: int = flag(1, minimum=1)  # micro-batches of an optimizer step
    workers: int = flag(0, minimum=0)  # processes of each rank; 0 works in the training process
    seed: int = flag(0, minimum=0)  # order, pixels and replacements depend on it
    rank: int | None = None  # None for those of torch.distributed
    world_size: int | None = None
    shuffle_window: int = 10_000  # samples that a worker shuffles over; it holds about half as many in memory
    views: int = (
        1  # of each image; with 2 or more, ``image`` is (batch_size, views, ...). The text is the first view's.
    )
    caption_aware_flip: bool = flag(
        False, "mirror half of the images, with 'left' and 'right' exchanged in their captions"
    )
    draw_captions: bool = flag(
        False,
        "draw one of a sample's captions in each epoch: of all that --caption-key names, and of lists in json",
    )
    caption_hash: bool = False  # batches have ``caption_hash``, equal for equal captions
    pin_memory: bool = False


class _Request(NamedTuple):
    """A request to a worker for one batch; complete, so that persistent workers never work on an old epoch."""

    epoch: int
    seen: tuple[Segment, ...]
    batch: int


class _Requests(Sampler[_Request]):
    """The requests of the next pass over the DataLoader."""

    def __init__(self) -> None:
        self.epoch = 0
        self.seen: tuple[Segment, ...] = ()
        self.batches = range(0)

    def __iter__(self) -> Iterator[_Request]:
        return (_Request(self.epoch, self.seen, batch) for batch in self.batches)

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
    _max_bad_fraction: float
    _stream: Iterator[RawSample] = field(default_factory=lambda: iter(()))
    _expected: _Request | None = None
    _spare_reader: Reader | None = None
    _bad: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, request: _Request) -> dict[str, Any]:
        try:
            if request != self._expected:
                self._stream = self._open_stream(request)
            with _generators_kept():
                batch = self._make_batch(request.epoch)
        except BadDataError as error:
            # Exceptions of workers arrive wrapped in their traceback; this one is a message to the user.
            self._expected = None
            return {"error": str(error)}
        self._expected = request._replace(batch=request.batch + self._layout.workers)
        return batch

    def _open_stream(self, request: _Request) -> Iterator[RawSample]:
        """The worker's samples from a batch on. What comes before is neither read nor decoded."""
        seed = self._config.seed
        sequence = self._source.sequence(seed, request.epoch, self._layout.epoch_samples)
        order = EpochOrder(sequence, seed, request.epoch, request.seen, self._layout)
        worker = request.batch % self._layout.workers
        start = request.batch // self._layout.workers * self._layout.batch_size
        return _stream_shuffled(self._source, order, self._rank, worker, start)

    def _make_batch(self, epoch: int) -> dict[str, Any]:
        images, texts, indices, captions = [], [], [], []
        bad: list[tuple[int, str]] = []
        for _ in range(self._layout.batch_size):
            index, image, caption = self._usable(next(self._stream), epoch, bad)
            pixels, text, caption = self._view(image, caption, epoch, index)
            if self._config.views > 1:
                others = [self._view(image, caption, epoch, index, view)[0] for view in range(1, self._config.views)]
                pixels = torch.stack([pixels, *others])
            images.append(pixels)
            texts.append(text)
            indices.append(index)
            captions.append(caption)
        batch = {"image": default_collate(images), "text": default_collate(texts), "index": torch.tensor(indices)}
        if self._config.caption_hash:
            batch["caption_hash"] = torch.tensor([hash_text(caption) for caption in captions])
        return batch | ({"bad": bad} if bad else {})

    def _view(
        self, image: DecodedImage, caption: str, epoch: int, index: int, *view: int
    ) -> tuple[Tensor, Tensor, str]:
        """Pixels, token ids ``(L,)`` and caption, random in (seed, epoch, index) and, for later views, their number."""
        _seed_generators(hash_int(Purpose.PIXELS, self._config.seed, epoch, index, *view))
        if self._config.caption_aware_flip:
            image, caption = flip_at_random(image, caption)
        return self._transform(image), self._tokenizer(caption)[0], caption

    def _usable(self, raw: RawSample, epoch: int, bad: list[tuple[int, str]]) -> tuple[int, DecodedImage, str]:
        """Decode a sample, or the first of its replacements that decodes."""
        try:
            return raw.index, *self._decode(raw, epoch)
        except BadSampleError as error:
            reason = str(error)
        bad.append((raw.index, reason))
        self._bad[raw.index] = reason
        self._spare_reader = self._spare_reader or self._source.reader()
        for tried, candidate in enumerate(self._source.replacements(raw.index, self._config.seed, epoch), start=1):
            if tried % _PATIENCE == 0 and len(self._bad) > self._max_bad_fraction * self._source.num_samples:
                raise BadDataError(
                    f"{len(self._bad):,} bad samples, more than the allowed {self._max_bad_fraction:.1%} "
                    f"(--max-bad-fraction) of {self._source.num_samples:,}; sample {raw.index}: {reason}"
                )
            if candidate in self._bad:
                continue
            try:
                return candidate, *self._decode(self._spare_reader(candidate), epoch)
            except BadSampleError as error:
                self._bad[candidate] = str(error)
        name, _, count = self._source.group_of(raw.index)
        raise BadDataError(f"{name} has no usable sample among its {count:,}; sample {raw.index}: {reason}")

    def _decode(self, raw: RawSample, epoch: int) -> tuple[DecodedImage, str]:
        draw = hash_int(Purpose.CAPTION, self._config.seed, epoch, raw.index) if self._config.draw_captions else 0
        return self._source.decode(raw, self._decoder, draw)

    def __getstate__(self) -> dict[str, Any]:
        # Streams and open files stay in the process they belong to.
        return self.__dict__ | {"_stream": iter(()), "_expected": None, "_spare_reader": None}


def _stream_shuffled(source: Source, order: EpochOrder, rank: int, worker: int, start: int) -> Iterator[RawSample]:
    """Yield the samples of one worker in order, from the ``start``-th on; holds at most as many as the shuffle's window.

    Samples before ``start`` are not read; shards with nothing else in them are not opened.
    """
    skipped = np.zeros(order.piece_length(rank, worker) if start else 0, dtype=bool)
    waiting: dict[int, RawSample] = {}
    ahead: Iterator[tuple[int, RawSample]] | None = None
    for positions in _skip(order.shuffled(rank, worker), start, skipped):
        # The first part of `upcoming` comes when all skipped positions are marked.
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

    On every rank, an epoch has ``batches_per_epoch`` batches of ``batch_size`` samples; over all ranks every sample of
    the epoch comes once, up to the remainder that does not fill a global batch (``batch_size * world_size *
    accum_freq``).

    Args:
        source: The samples.
        config: How to batch them.
        preprocess: From an RGB image to a tensor. It may draw from the generators of torch, numpy and random: these are
            seeded by (seed, epoch, index) before each call.
        decoder: From the content of an image file to what ``preprocess`` takes; see :mod:`openclip_ext.data.images`.
        tokenizer: From a caption to token ids of shape ``(1, L)``, as OpenCLIP's.
        epoch_samples: Shorter epoch; another part of the data in each. The indices do not change.
        max_bad_fraction: The run stops when more of the epoch's samples than this are bad.

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
        self._bad: dict[int, str] = {}
        self._bad_this_epoch = 0
        self._requests = _Requests()
        self._loader = DataLoader(
            _BatchDataset(source, config, decoder, preprocess, tokenizer, self._layout, self.rank, max_bad_fraction),
            batch_size=None,
            sampler=self._requests,
            num_workers=config.workers,
            worker_init_fn=leave_process_group,
            pin_memory=config.pin_memory,
            persistent_workers=config.workers > 0,
            # DataLoader draws from this at the start of every pass, otherwise from the training process's generator.
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
        """The current layout as a progress entry, without ``batches``; plain types."""
        return asdict(self._layout) | {"seed": self.seed, "data": self.source.digest}

    def remaining_batches(self, epoch: int, progress: Progress | None = None) -> int:
        """Micro-batches that :meth:`iterate` yields on each rank."""
        seen, start = self.check_progress(progress)
        if not seen:
            return self.batches_per_epoch - start
        sequence = self.source.sequence(self.seed, epoch, self._layout.epoch_samples)
        return EpochOrder(sequence, self.seed, epoch, seen, self._layout).batches - start

    def extend_progress(self, progress: Progress | None, batches: int) -> list[dict[str, Any]]:
        """Progress in the epoch after ``batches`` more micro-batches on each rank; goes into a checkpoint."""
        entries = [dict(entry) for entry in progress or ()]
        seen, done = self.check_progress(entries)
        return [*entries[: len(seen)], self.layout | {"batches": done + batches}]

    def check_progress(self, progress: Progress | None) -> tuple[tuple[Segment, ...], int]:
        """Return the segments that were run in other layouts, and how many batches of the current one are done.

        Raises:
            ValueError: An epoch that was begun so cannot go on with this loader.
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
            segments.append(Segment(self._layout.replaced(entry), int(entry["batches"])))
        if segments and segments[-1].layout == self._layout:
            return tuple(segments[:-1]), segments[-1].batches
        return tuple(segments), 0

    def iterate(self, epoch: int, progress: Progress | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield the rest of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            progress: The part that was seen, as :meth:`extend_progress` returns it: a list of entries
                ``loader.layout | {"batches": micro-batches done on each rank}``. If the last entry has the current
                layout, the same batches follow; otherwise the unseen samples are laid out anew.

        Yields:
            ``image`` ``(batch_size, ...)``, ``text`` ``(batch_size, L)`` int64, ``index`` ``(batch_size,)`` int64,
            and where configured ``caption_hash`` ``(batch_size,)`` int64.

        Raises:
            ValueError: The progress is not of this data set and seed, or has more batches than the epoch.
            BadDataError: Too many samples are bad, or none of a shard is usable. The ranks add up their bad samples ten
                times an epoch (a small collective, so all of them have to go through the batches side by side).
        """
        seen, start = self.check_progress(progress)
        total = start + self.remaining_batches(epoch, progress)
        if total < start:
            raise ValueError(
                f"cannot resume: the checkpoint says {start} batches of the epoch are done, it has {total}"
            )
        self._bad_this_epoch = 0
        is_shared = self._layout.world_size == distributed.world_size() > 1
        self._requests.epoch, self._requests.seen, self._requests.batches = epoch, seen, range(start, total)
        for number, batch in enumerate(start_workers(self._loader), start=start):
            if "error" in batch:
                raise BadDataError(batch["error"])
            self._count_bad(batch.pop("bad", ()))
            # Ten times an epoch and at its end, after the same batches on each rank.
            if is_shared and (number + 1 == total or (number + 1) % max(1, self.batches_per_epoch // 10) == 0):
                self.check_bad_samples()
            yield batch

    def _count_bad(self, bad: Sequence[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self._bad and len(self._bad) < _MAX_LOGGED:
                logging.warning(f"Bad sample {index} in {self.source.group_of(index)[0]} is replaced: {reason}")
            self._bad[index] = reason
        self._bad_this_epoch += len(bad)
        self._refuse_too_many(self._bad_this_epoch)

    def _refuse_too_many(self, bad: int) -> None:
        if bad > self.max_bad_fraction * self._layout.epoch_samples:
            examples = "; ".join(f"sample {index}: {reason}" for index, reason in list(self._bad.items())[:3])
            raise BadDataError(
                f"{bad:,} bad samples in this epoch of {self._layout.epoch_samples:,}, more than the allowed "
                f"{self.max_bad_fraction:.1%} (--max-bad-fraction). By shard: {dict(self.bad_samples().most_common(5))}. "
                f"{examples}"
            )

    def bad_samples(self) -> Counter[str]:
        """Return the bad samples by shard that this rank has met so far (each counted once)."""
        return Counter(self.source.group_of(index)[0] for index in self._bad)

    def check_bad_samples(self) -> Counter[str]:
        """Return the bad samples by shard over all ranks; collective: every rank calls it at the same point.

        :meth:`iterate` does so a few times an epoch.

        Raises:
            BadDataError: On every rank, if the ranks together have met too many in this epoch.
        """
        counts = distributed.all_gather_object((self._bad_this_epoch, self.bad_samples()))
        self._refuse_too_many(sum(count for count, _ in counts))
        return sum((by_shard for _, by_shard in counts), Counter())
