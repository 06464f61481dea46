"""The work of a data worker: read samples in order, decode and transform them, and make batches on request."""

import random
from collections.abc import Callable, Iterator
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
from openclip_ext.data.loader.streams import SampleStream, open_stream
from openclip_ext.data.order import EpochOrder, Lanes
from openclip_ext.data.reference import REFERENCE_KEYS
from openclip_ext.data.sources.keys import sentences_of
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
# A bad sample is replaced by one of this many later samples, so that few of a batch's replacements are equal. These samples
# are then in memory in addition to the shuffle window.
_REPLACEMENTS = 512
_ATTEMPTS = 1000


class BatchRequest(NamedTuple):
    """A request to a worker for one batch. Workers persist across epochs, so each request contains the epoch."""

    epoch: int
    lanes: Lanes
    batch: int  # number of the micro-batch in the epoch
    left_out: np.ndarray | None  # (k,) int64, bad samples that the epoch excludes; only in a worker's first request

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:3]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A decoded sample."""

    index: int
    pixels: Tensor
    caption: str
    hard_negative: str
    image_hash: int


class BatchRequests(Sampler[BatchRequest]):
    """A sampler of batch requests. Set ``next_pass`` before each pass over the DataLoader."""

    next_pass: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.next_pass


@dataclass(eq=False)
class BatchDataset(Dataset):
    """A data set that makes one batch per request. Each worker has a copy, which reads one epoch at a time."""

    _source: Source
    _config: TrainLoaderConfig
    _decoder: ImageDecoder
    _transform: Transform
    _tokenizer: Tokenizer
    _rank: int
    _max_bad: int  # maximum number of bad samples per batch
    _order: EpochOrder | None = None
    _streams: dict[int, SampleStream] = field(default_factory=dict)  # of the lanes that this worker reads
    _expected: tuple[Any, ...] | None = None

    def __getitem__(self, request: BatchRequest) -> dict[str, Any]:
        if request.key != self._expected:
            assert request.left_out is not None
            self._order = epoch_order(self._source, self._config.seed, request.epoch, request.lanes, request.left_out)
            self._streams = {}
        with _generators_kept():
            batch = self._make_batch(request)
        self._expected = request._replace(batch=request.batch + max(1, self._config.workers)).key
        return batch

    def _make_batch(self, request: BatchRequest) -> dict[str, Any]:
        """Make a batch. The key ``has_too_few`` means that so many samples were bad that the batch is not made."""
        epoch, config = request.epoch, self._config
        is_hashed = config.caption_hash or (epoch == 0 and request.batch < config.hashed_steps * config.accum_freq)
        samples: list[_Sample] = []
        bad: dict[int, BadSample] = {}
        for stream, position in self._places(request.batch):
            sample = self._good_sample(stream, position, epoch, is_hashed, bad)
            if sample is None:
                return {"has_too_few": True, "bad": [*bad.values()]}
            samples.append(sample)
        batch: dict[str, Any] = {
            "text": self._tokenizer([sample.caption for sample in samples]),
            "index": torch.tensor([sample.index for sample in samples]),
        }
        if self._source.image_features is None:
            batch["image"] = default_collate([sample.pixels for sample in samples])
        else:
            batch["image_features"], _ = self._source.image_features.rows(batch["index"])
        if self._source.has_hard_negatives:
            batch["hard_negative"] = self._tokenizer([sample.hard_negative for sample in samples])
        if config.text_groups > 0:
            batch["text_groups"] = group_texts(texts_of(batch), config.text_groups, config.equal_text_groups)
        if self._source.reference is not None:
            batch |= dict(zip(REFERENCE_KEYS, self._source.reference.rows(batch["index"]), strict=True))
        if is_hashed:
            batch["caption_hash"] = torch.tensor([hash_text(sample.caption) for sample in samples])
            batch["image_hash"] = torch.tensor([sample.image_hash for sample in samples])
        return batch | ({"bad": [*bad.values()]} if bad else {})

    def _places(self, batch: int) -> Iterator[tuple[SampleStream, int]]:
        """Yield the lane and the position of each sample of a micro-batch of this rank."""
        order, size = self._order, self._config.batch_size
        assert order is not None
        step, micro_batch = divmod(batch, self._config.accum_freq)
        first = (self._rank * self._config.accum_freq + micro_batch) * size
        lanes, positions = order.lanes.locate(step, first + np.arange(size))
        for lane, position in zip(lanes.tolist(), positions.tolist(), strict=True):
            if lane not in self._streams:
                self._streams[lane] = open_stream(self._source, order, lane, position)
            yield self._streams[lane], position

    def _good_sample(
        self, stream: SampleStream, position: int, epoch: int, is_hashed: bool, bad: dict[int, BadSample]
    ) -> "_Sample | None":
        """Return the sample at a position. A bad sample is replaced by one of the next samples, drawn by a hash.

        Bad samples are added to ``bad``. None means that the batch has more of them than are allowed.
        """
        first = stream.take(position)
        raw: RawSample | None = first
        for attempt in range(_ATTEMPTS):
            if raw is None or len(bad) > self._max_bad:
                return None
            try:
                return self._sample(raw, epoch, is_hashed)
            except BadSampleError as error:
                bad[raw.index] = BadSample(raw.index, str(error), raw.problem is None)
            raw = stream.later(self._hash(Purpose.REPLACEMENT, epoch, first.index, attempt) % _REPLACEMENTS)
        return None

    def _sample(self, raw: RawSample, epoch: int, is_hashed: bool) -> "_Sample":
        source, image_hash, hard_negative = self._source, 0, ""
        draw = self._hash(Purpose.CAPTION, epoch, raw.index) if self._config.draw_captions else 0
        if is_hashed:
            image, caption, image_hash = decode_with_hash(source, raw, self._decoder, draw)
        else:
            image, caption = source.decode(raw, self._decoder, draw)
        features = source.image_features
        if features is not None and not features.has_image(raw.index):
            raise BadSampleError("the image did not decode when --image-features was written")
        if self._config.draw_sentences:
            sentences = sentences_of(caption)
            caption = sentences[self._hash(Purpose.SENTENCE, epoch, raw.index) % len(sentences)]
        if source.has_hard_negatives:
            draw = self._hash(Purpose.HARD_NEGATIVE, epoch, raw.index)
            hard_negative = source.hard_negative(raw, draw)[:MAX_CAPTION]
        pixels, caption = self._views(image, caption[:MAX_CAPTION], epoch, raw.index)
        return _Sample(raw.index, pixels, caption, hard_negative, image_hash)

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


def epoch_order(source: Source, seed: int, epoch: int, lanes: Lanes, bad: np.ndarray) -> EpochOrder:
    """Return the order of the samples of an epoch that are not ``bad`` ``(k,)`` int64."""
    sequence, num_slots = source.sequence(seed, epoch, lanes.epoch_samples, bad)
    return EpochOrder(sequence, seed, epoch, lanes, num_slots)
