"""Batches for evaluation. They contain each usable sample once. The last batch of each worker may be smaller."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from openclip_ext.cli.messages import get_logger
from openclip_ext.data.hashing import hash_text
from openclip_ext.data.loader.workers import leave_process_group, watched_batches
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import (
    MAX_CAPTION,
    BadDataError,
    BadSampleError,
    DecodedImage,
    ImageDecoder,
    RawSample,
    SampleKeys,
    Source,
    decode_image,
    decode_with_hash,
    limited,
)
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage

logger = get_logger(__name__)


@dataclass(frozen=True)
class ShardStreams:
    """Shards that are read completely, without a manifest. The samples have no index."""

    urls: list[str]
    keys: SampleKeys
    storage: Storage = DEFAULT_STORAGE
    max_pixels: int | None = None  # as in Source

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        """Return the image and the caption, like :meth:`Source.decode`."""
        return self.keys.decode(raw, limited(decoder, self.max_pixels), draw)


def read_shard(url: str, wanted: frozenset[str], storage: Storage) -> Iterator[RawSample]:
    """Yield the samples of a shard, and for each corrupt part a sample with a ``problem``."""
    position = 0
    gaps: list[tar.Gap] = []
    try:
        with storage.open(url) as file:
            archive = tar.TarArchive(file)
            gaps = archive.gaps
            for position, sample in enumerate(archive.samples(wanted)):
                yield RawSample(position, sample.fields, sample.found, sample.key)
    except tar.STREAM_ERRORS as error:
        yield RawSample(position, problem=f"the shard cannot be read to its end: {type(error).__name__}: {error}")
    for gap in gaps:
        yield RawSample(position, problem=f"corrupt: no readable header in the bytes {gap.start:,} to {gap.end:,}")


@dataclass(eq=False)
class _EvalDataset(IterableDataset):
    _samples: Source | ShardStreams
    _transform: Callable
    _tokenizer: Callable
    _batch_size: int
    _span: range | None
    _names: bool

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = self._usable()
        try:
            while rows := list(itertools.islice(samples, self._batch_size)):
                batch = default_collate(rows)
                yield batch | {"text": self._tokenizer(batch["text"])}
        except BadDataError as error:
            yield {"error": str(error)}

    def _usable(self) -> Iterator[dict[str, Any]]:
        """Yield the usable samples, log the bad samples; raise BadDataError if a group has none for this worker."""
        for name, raws in self._groups():
            usable, bad, reason = 0, 0, ""
            for raw in raws:
                try:
                    image, caption, image_hash = decode_with_hash(self._samples, raw, decode_image)
                except BadSampleError as error:
                    bad, reason = bad + 1, reason or f"sample {raw.index}: {error}"
                    continue
                usable += 1
                sample = {"image": self._transform(image), "text": caption[:MAX_CAPTION]}
                sample |= {"image_hash": image_hash, "caption_hash": hash_text(sample["text"])}
                if isinstance(self._samples, Source):
                    sample["index"] = raw.index
                    if self._names:
                        sample["key"], sample["caption"] = self._samples.describe(raw)[0], sample["text"]
                yield sample
            if bad:
                logger.warning(f"{bad} bad samples or corrupt parts in {name} are skipped; the first: {reason}")
            if bad and not usable and not self._span:  # all samples of a span may be bad
                raise BadDataError(f"{name} has no usable sample: {reason}")

    def _groups(self) -> Iterator[tuple[str, Iterable[RawSample]]]:
        """Yield the name and the samples of each group of this worker. A group is one shard, or a whole ``Source``."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if isinstance(self._samples, Source):
            yield "the data set", self._read_source(self._samples, worker, workers)
        else:
            for url in self._samples.urls[worker::workers]:
                yield url, read_shard(url, self._samples.keys.fields, self._samples.storage)

    def _read_source(self, source: Source, worker: int, workers: int) -> Iterator[RawSample]:
        """Yield this worker's samples."""
        return source.read(map(np.array, self._parts(source, worker, workers)))

    def _parts(self, source: Source, worker: int, workers: int) -> Iterator[list[int]]:
        """Yield the indices of this worker's samples. Workers take turns by shard, or by batch if there are too few shards."""
        span = self._span or range(source.num_samples)
        first = source.group_of(span.start)[2]
        by_shard = first < len(span) if self._span else first * workers <= len(span)
        turn, end = 0, span.start
        while end < span.stop:
            begin, end = end, min(end + self._batch_size, span.stop)
            if by_shard:
                _, begin, samples = source.group_of(begin)
                end = begin + samples
            if turn % workers == worker:
                yield [index for index in range(begin, end) if self._span or not source.is_left_out(index)]
            turn += 1


class EvalLoader:
    """Batches of ``image``, ``text``, and ``index`` if the samples have indices. Bad samples are skipped and logged.

    ``image_hash`` and ``caption_hash`` ``(B,)`` int64 are equal for equal image files and equal captions.

    Args:
        samples: A source, or shards without a manifest.
        preprocess, tokenizer: As for :class:`~openclip_ext.data.loader.train_loader.TrainLoader`.
        batch_size: Samples of a batch; the last batch of each worker may be smaller.
        workers: Worker processes; 0 means this process.
        span: Range of indices to read from a source: complete shards, including samples that are excluded from training.
            None (default) means all samples that are not excluded.
        names: Whether batches of a source also have lists ``key`` and ``caption`` of texts.

    Raises:
        BadDataError: A shard (or a file) has no usable sample. Raised while iterating.
        WorkerError: A worker exited. Raised while iterating.
    """

    def __init__(
        self,
        samples: Source | ShardStreams,
        *,
        preprocess: Callable[[Image.Image], Tensor],
        tokenizer: Callable[[list[str]], Tensor],
        batch_size: int,
        workers: int = 0,
        span: range | None = None,
        names: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self._is_of_shards = isinstance(samples, ShardStreams)
        self._loader = DataLoader(
            _EvalDataset(samples, preprocess, tokenizer, batch_size, span, names),
            batch_size=None,
            num_workers=workers,
            worker_init_fn=leave_process_group,
            pin_memory=torch.cuda.is_initialized(),
            # Without this generator, DataLoader would draw from the training process's generator.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        failure, has_usable = "", False
        for batch in watched_batches(self._loader, patience=None):
            if "error" not in batch:
                has_usable = True
                yield batch
            elif self._is_of_shards:
                raise BadDataError(batch["error"])
            else:  # all samples of one worker are bad; other workers may have usable samples
                failure = batch["error"]
        if failure and not has_usable:
            raise BadDataError(failure)
