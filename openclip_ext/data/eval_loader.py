"""Batches for evaluation: each usable sample once, in order; the last batch may be smaller."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from openclip_ext.data import tar
from openclip_ext.data.scan import parse_keys
from openclip_ext.data.shardlist import is_local, local_path
from openclip_ext.data.shards import open_stream
from openclip_ext.data.source import (
    BadDataError,
    BadSampleError,
    DecodedImage,
    RawSample,
    Source,
    decode_fields,
    decode_image,
)
from openclip_ext.data.worker_signals import leave_process_group, start_workers

# Index in the data set, or None where nobody counted; image; caption.
Sample = tuple[int | None, DecodedImage, str]


class ShardSamples:
    """Samples of shards, read as streams; no manifest is needed."""

    def __init__(self, urls: Sequence[str], image_key: str, caption_key: str) -> None:
        self._urls = list(urls)
        self._image_keys = parse_keys(image_key, allow_json=False)
        self._caption_keys = parse_keys(caption_key, allow_json=True)
        self._wanted = frozenset(key.field for key in (*self._image_keys, *self._caption_keys))

    def part(self, worker: int, workers: int, batch_size: int) -> Iterator[Sample]:
        """The samples of one worker: workers take shards in turn."""
        for url in self._urls[worker::workers]:
            usable = 0
            reasons: list[str] = []
            for sample in self._decoded(url, reasons):
                usable += 1
                yield sample
            if reasons:
                logging.warning(f"{len(reasons)} bad samples or places in {url} are left out; the first: {reasons[0]}")
            if not usable and reasons:
                raise BadDataError(f"{url} has no usable sample: {reasons[0]}")

    def _decoded(self, url: str, reasons: list[str]) -> Iterator[Sample]:
        gaps: list[tar.Gap] = []
        try:
            with open_stream(url) as stream:
                size = os.path.getsize(local_path(url)) if is_local(url) else None
                for position, (fields, found) in enumerate(tar.stream_samples(stream, self._wanted, gaps, size)):
                    try:
                        raw = RawSample(position, fields, found)
                        yield None, *decode_fields(raw, self._image_keys, self._caption_keys, decode_image)
                    except BadSampleError as error:
                        reasons.append(f"position {position}: {error}")
        except tar.STREAM_ERRORS as error:
            reasons.append(f"cannot be read to its end: {type(error).__name__}: {error}")
        reasons += [f"damaged: no readable header in the bytes {gap.start:,} to {gap.end:,}" for gap in gaps]


class SourceSamples:
    """Samples of a source by index."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def part(self, worker: int, workers: int, batch_size: int) -> Iterator[Sample]:
        """The samples of one worker: workers take batches in turn, which keeps the order."""
        reader = self._source.reader()
        usable, bad, reason = 0, 0, ""
        for begin in range(worker * batch_size, self._source.num_samples, workers * batch_size):
            for index in range(begin, min(begin + batch_size, self._source.num_samples)):
                if self._source.is_left_out(index):
                    continue
                try:
                    sample = index, *self._source.decode(reader.read(index), decode_image)
                except BadSampleError as error:
                    bad, reason = bad + 1, str(error)
                    continue
                usable += 1
                yield sample
        if bad:
            logging.warning(f"{bad} bad samples are left out; the last: {reason}")
        if bad and not usable:
            raise BadDataError(f"no usable sample: {reason}")


class _EvalDataset(IterableDataset):
    def __init__(
        self, samples: ShardSamples | SourceSamples, transform: Callable, tokenizer: Callable, batch_size: int
    ) -> None:
        self._samples = samples
        self._transform = transform
        self._tokenizer = tokenizer
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        samples = []
        try:
            for index, image, caption in self._samples.part(worker, workers, self._batch_size):
                sample = {"image": self._transform(image), "text": self._tokenizer(caption)[0]}
                samples.append(sample if index is None else sample | {"index": index})
                if len(samples) == self._batch_size:
                    yield default_collate(samples)
                    samples = []
        except BadDataError as error:
            yield {"error": str(error)}
            return
        if samples:
            yield default_collate(samples)


class EvalLoader:
    """Batches ``{"image", "text"}``, with ``"index"`` where the samples have one; iterate over it as often as needed.

    Bad samples are left out and logged. ``num_samples`` is what the caller gave, or None: the batches end with the
    data.

    Raises:
        BadDataError: While iterating, if a shard (or a whole file) has no usable sample.
    """

    def __init__(
        self,
        samples: ShardSamples | SourceSamples,
        transform: Callable[[Image.Image], Tensor],
        tokenizer: Callable[[str], Tensor],
        *,
        batch_size: int,
        workers: int = 0,
        num_samples: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.num_samples = num_samples
        self._loader = DataLoader(
            _EvalDataset(samples, transform, tokenizer, batch_size),
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
