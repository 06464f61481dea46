"""The work of a data worker: read a stream of samples in order, decode and transform them, and make batches on request."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate, get_worker_info

from openclip_ext.data.flip import flip_at_random
from openclip_ext.data.hashing import Purpose, hash_int, hash_text
from openclip_ext.data.loader.bad_samples import BadSample
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.order import EpochOrder, Layout, Segment
from openclip_ext.data.reference import REFERENCE_KEYS
from openclip_ext.data.sources.source import (
    MAX_CAPTION,
    BadSampleError,
    DecodedImage,
    ImageDecoder,
    RawSample,
    Source,
    decode_with_hash,
)
from openclip_ext.data.text_groups import group_texts, texts_of

Transform = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]
_READ_AHEAD = 4096  # a reader may open the shards of this many upcoming samples


class BatchRequest(NamedTuple):
    """A request to a worker for one batch. Workers persist across epochs, so each request contains the epoch."""

    epoch: int
    seen: tuple[Segment, ...]
    batch: int
    passed: int  # number of bad samples that this worker has skipped in the epoch before this pass
    left_out: np.ndarray | None  # (k,) int64, bad samples that the epoch excludes; only in a worker's first request

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:3]


class BatchRequests(Sampler[BatchRequest]):
    """A sampler of batch requests. Set ``next_pass`` before each pass over the DataLoader."""

    next_pass: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.next_pass


@dataclass(eq=False)
class BatchDataset(Dataset):
    """A data set that makes one batch per request. Each worker has a copy, which reads one stream of samples at a time."""

    _source: Source
    _config: TrainLoaderConfig
    _decoder: ImageDecoder
    _transform: Transform
    _tokenizer: Tokenizer
    _layout: Layout
    _rank: int
    _max_bad: int  # maximum number of bad samples per batch
    _stream: Iterator[RawSample] = field(default_factory=lambda: iter(()))
    _expected: tuple[Any, ...] | None = None

    def __getitem__(self, request: BatchRequest) -> dict[str, Any]:
        if request.key != self._expected:
            self._stream = self._open_stream(request)
        with _generators_kept():
            is_hashed = request.epoch == 0 and request.batch < self._config.hashed_steps * self._config.accum_freq
            batch = self._make_batch(request.epoch, is_hashed or self._config.caption_hash)
        self._expected = request._replace(batch=request.batch + self._layout.workers).key
        return batch

    def _open_stream(self, request: BatchRequest) -> Iterator[RawSample]:
        assert request.left_out is not None
        order = epoch_order(
            self._source, self._config.seed, request.epoch, request.seen, self._layout, request.left_out
        )
        worker = request.batch % self._layout.workers
        start = request.batch // self._layout.workers * self._layout.batch_size + request.passed
        return _stream_shuffled(self._source, order, self._rank, worker, start)

    def _make_batch(self, epoch: int, is_hashed: bool) -> dict[str, Any]:
        """Make a batch of the next usable samples. The key ``is_short`` means that too few samples were left."""
        images, indices, captions, negatives, hashes = [], [], [], [], []
        bad: list[BadSample] = []
        for raw in self._stream:
            try:
                draw = self._hash(Purpose.CAPTION, epoch, raw.index) if self._config.draw_captions else 0
                if is_hashed:
                    image, caption, image_hash = decode_with_hash(self._source, raw, self._decoder, draw)
                else:
                    (image, caption), image_hash = self._source.decode(raw, self._decoder, draw), 0
                if self._source.has_hard_negatives:
                    draw = self._hash(Purpose.HARD_NEGATIVE, epoch, raw.index)
                    negatives.append(self._source.hard_negative(raw, draw)[:MAX_CAPTION])
            except BadSampleError as error:
                bad.append(BadSample(raw.index, str(error), raw.problem is None))
                if len(bad) > self._max_bad:
                    break
                continue
            pixels, caption = self._views(image, caption[:MAX_CAPTION], epoch, raw.index)
            images.append(pixels)
            indices.append(raw.index)
            captions.append(caption)
            hashes.append(image_hash)
            if len(indices) == self._layout.batch_size:
                break
        if len(indices) < self._layout.batch_size:
            return {"is_short": True, "bad": bad}
        batch = {"image": default_collate(images), "text": self._tokenizer(captions), "index": torch.tensor(indices)}
        if negatives:
            batch["hard_negative"] = self._tokenizer(negatives)
        if self._config.text_groups > 0:
            most, of_equal_size = self._config.text_groups, self._config.equal_text_groups
            batch["text_groups"] = group_texts(texts_of(batch), most, of_equal_size)
        if self._source.reference is not None:
            batch |= dict(zip(REFERENCE_KEYS, self._source.reference.rows(batch["index"]), strict=True))
        if is_hashed:
            batch["caption_hash"] = torch.tensor([hash_text(caption) for caption in captions])
            batch["image_hash"] = torch.tensor(hashes)
        return batch | ({"bad": bad} if bad else {})

    def _views(self, image: DecodedImage, caption: str, epoch: int, index: int) -> tuple[Tensor, str]:
        """Return the pixels, ``(views, ...)`` if there are several views, and the caption of the first view."""
        pixels, shown = self._view(image, caption, epoch, index)
        if self._config.views > 1:
            others = [self._view(image, shown, epoch, index, view)[0] for view in range(1, self._config.views)]
            pixels = torch.stack([pixels, *others])
        return pixels, shown

    def _view(self, image: DecodedImage, caption: str, epoch: int, index: int, *view: int) -> tuple[Tensor, str]:
        bits = self._hash(Purpose.PIXELS, epoch, index, *view)
        torch.default_generator.manual_seed(bits >> 1)  # torch.manual_seed would also seed the GPUs
        random.seed(bits)
        np.random.seed(bits & 0xFFFFFFFF)
        if self._config.caption_aware_flip:
            image, caption = flip_at_random(image, caption)
        return self._transform(image), caption

    def _hash(self, purpose: Purpose, *words: int) -> int:
        return hash_int(purpose, self._config.seed, *words)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the random generators after the block if it runs in the training process. Workers do not need this."""
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


def epoch_order(
    source: Source, seed: int, epoch: int, seen: Sequence[Segment], layout: Layout, bad: np.ndarray
) -> EpochOrder:
    """Return the order of the samples of an epoch that are neither ``seen`` nor ``bad``."""
    sequence, num_slots = source.sequence(seed, epoch, layout.epoch_samples, bad)
    return EpochOrder(sequence, seed, epoch, seen, layout, num_slots)


def _stream_shuffled(source: Source, order: EpochOrder, rank: int, worker: int, start: int) -> Iterator[RawSample]:
    """Yield the samples of one worker in order, from sample number ``start``. Up to one shuffle window is in memory."""
    waiting: dict[int, RawSample] = {}
    ahead = _read_in_sequence(source, order, rank, worker, start)
    for part in order.shuffled(rank, worker, start):
        for position in part.tolist():
            while position not in waiting:
                place, raw = next(ahead)
                waiting[place] = raw
            yield waiting.pop(position)


def _read_in_sequence(
    source: Source, order: EpochOrder, rank: int, worker: int, start: int
) -> Iterator[tuple[int, RawSample]]:
    reader = source.reader()
    unread = order.unread(rank, worker, start)

    def part(begin: int) -> tuple[np.ndarray, np.ndarray]:
        positions = unread[np.arange(begin, min(begin + _READ_AHEAD, len(unread)))]
        return positions, order.piece_indices(rank, worker, positions)

    following = part(0)
    for begin in range(0, len(unread), _READ_AHEAD):
        (positions, indices), following = following, part(begin + _READ_AHEAD)
        reader.expect(np.concatenate([indices, following[1]]))
        for position, index in zip(positions.tolist(), indices.tolist(), strict=True):
            yield position, reader(index)
