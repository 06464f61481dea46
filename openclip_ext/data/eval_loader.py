"""Batches for evaluation: each usable sample once, in order; the last batch may be smaller."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from openclip_ext.data import tar
from openclip_ext.data.source import (
    BadDataError,
    BadSampleError,
    DecodedImage,
    ImageDecoder,
    RawSample,
    SampleKeys,
    Source,
    decode_image,
)
from openclip_ext.data.storage import open_url
from openclip_ext.data.worker_signals import leave_process_group, start_workers


class ShardPass:
    """The samples of shards, read as streams to their end: no manifest is needed. Workers take shards in turn."""

    has_index = False

    def __init__(self, urls: Sequence[str], image_key: str, caption_key: str) -> None:
        self._urls = list(urls)
        self._keys = SampleKeys(image_key, caption_key)
        self.decode = self._keys.decode

    def groups(self, worker: int, workers: int, batch_size: int) -> Iterator[tuple[str, Iterable[RawSample]]]:
        """Yield the samples of one worker, with the name of the shard or data set that they are from."""
        for url in self._urls[worker::workers]:
            yield url, self._samples(url)

    def _samples(self, url: str) -> Iterator[RawSample]:
        position = 0
        gaps: list[tar.Gap] = []
        try:
            with open_url(url) as file:
                archive = tar.TarArchive(file)
                gaps = archive.gaps
                for position, sample in enumerate(archive.samples(self._keys.fields)):
                    yield RawSample(position, sample.fields, sample.found, sample.key)
        except tar.STREAM_ERRORS as error:
            yield RawSample(position, problem=f"it cannot be read to its end: {type(error).__name__}: {error}")
        for gap in gaps:
            yield RawSample(position, problem=f"damaged: no readable header in the bytes {gap.start:,} to {gap.end:,}")


class SourcePass:
    """The samples of a source with their index, without those that are left out. Workers take batches in turn."""

    has_index = True

    def __init__(self, source: Source) -> None:
        self._source = source
        self.decode = source.decode

    def groups(self, worker: int, workers: int, batch_size: int) -> Iterator[tuple[str, Iterable[RawSample]]]:
        """Yield the samples of one worker, with their name in messages."""
        yield "the data set", self._samples(worker, workers, batch_size)

    def _samples(self, worker: int, workers: int, batch_size: int) -> Iterator[RawSample]:
        read, count = self._source.reader(), self._source.num_samples
        for begin in range(worker * batch_size, count, workers * batch_size):
            for index in range(begin, min(begin + batch_size, count)):
                if not self._source.is_left_out(index):
                    yield read(index)


def _usable(
    name: str, samples: Iterable[RawSample], decode: Callable[[RawSample, ImageDecoder], tuple[DecodedImage, str]]
) -> Iterator[tuple[int, DecodedImage, str]]:
    """Yield index, image and caption of the usable samples, and log how many others there were.

    Raises:
        BadDataError: None is usable.
    """
    usable, bad, reason = 0, 0, ""
    for raw in samples:
        try:
            image, caption = decode(raw, decode_image)
        except BadSampleError as error:
            bad, reason = bad + 1, reason or f"sample {raw.index}: {error}"
            continue
        usable += 1
        yield raw.index, image, caption
    if bad and not usable:
        raise BadDataError(f"{name} has no usable sample: {reason}")
    if bad:
        logging.warning(f"{bad} bad samples or places in {name} are left out; the first: {reason}")


class _EvalDataset(IterableDataset):
    def __init__(
        self, samples: ShardPass | SourcePass, transform: Callable, tokenizer: Callable, batch_size: int
    ) -> None:
        self._samples = samples
        self._transform = transform
        self._tokenizer = tokenizer
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batch = []
        try:
            for sample in self._transformed():
                batch.append(sample)
                if len(batch) == self._batch_size:
                    yield default_collate(batch)
                    batch = []
        except BadDataError as error:
            yield {"error": str(error)}
            return
        if batch:
            yield default_collate(batch)

    def _transformed(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for name, raws in self._samples.groups(worker, workers, self._batch_size):
            for index, image, caption in _usable(name, raws, self._samples.decode):
                sample = {"image": self._transform(image), "text": self._tokenizer(caption)[0]}
                yield sample | ({"index": index} if self._samples.has_index else {})


class EvalLoader:
    """Batches ``{"image", "text"}``, with ``"index"`` where the samples have one; iterate over it as often as needed.

    Bad samples are left out and logged.

    Args:
        samples: :class:`ShardPass` or :class:`SourcePass`.
        preprocess: From an RGB image to a tensor.
        tokenizer: From a caption to token ids of shape ``(1, L)``, as OpenCLIP's.
        batch_size: Samples of a batch; the last one may be smaller.
        workers: Worker processes; 0 works in this process.
        num_samples: For display, or None; the batches end with the data.
        pin_memory: As in ``torch.utils.data.DataLoader``.

    Raises:
        BadDataError: While iterating, if a shard (or a whole file) has no usable sample.
    """

    def __init__(
        self,
        samples: ShardPass | SourcePass,
        *,
        preprocess: Callable[[Image.Image], Tensor],
        tokenizer: Callable[[str], Tensor],
        batch_size: int,
        workers: int = 0,
        num_samples: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.num_samples = num_samples
        self._loader = DataLoader(
            _EvalDataset(samples, preprocess, tokenizer, batch_size),
            batch_size=None,
            num_workers=workers,
            worker_init_fn=leave_process_group,
            pin_memory=pin_memory,
            # A pass over the data takes nothing from the training process's generator.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in start_workers(self._loader):
            if "error" in batch:
                raise BadDataError(batch["error"])
            yield batch
