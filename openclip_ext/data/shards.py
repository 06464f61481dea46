"""WebDataset shards as a source: local tars are read by offset, remote and compressed ones as streams."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import BinaryIO

import numpy as np

from openclip_ext.data import tar
from openclip_ext.data.hashing import Purpose, hash_int
from openclip_ext.data.manifest import Manifest
from openclip_ext.data.order import EpochSequence, kept_samples, resampled_shards, shuffled_shards
from openclip_ext.data.source import BadSampleError, DecodedImage, ImageDecoder, RawSample, Reader, SampleKeys, Source
from openclip_ext.data.storage import open_local, open_url

# Consecutive samples of small images come with one system call.
_READ_BUFFER = 1 << 20
# Stand-ins for bad samples of a remote shard are taken from its head, so that fetching one does not read it through.
_STREAM_HEAD = 64
_STREAM_ATTEMPTS = 3


class ShardSource(Source):
    """The samples of a verified manifest.

    With ``resampled``, shards are drawn with replacement by their ``weights`` instead of taken once an epoch.
    """

    sequential = True
    several_captions = True

    def __init__(
        self,
        manifest: Manifest,
        image_key: str,
        caption_key: str,
        resampled: bool = False,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(manifest.num_samples, manifest.digest)
        self.num_kept -= len(manifest.left_out)
        self.index_digest = manifest.index_digest
        self.manifest = manifest
        self.keys = SampleKeys(image_key, caption_key)
        self._manifest_knows_keys = (manifest.image_key, manifest.caption_key) == (image_key, caption_key)
        self._resampled = resampled
        self._weights = weights
        self._first_indices = np.array([shard.first_index for shard in manifest.shards], dtype=np.int64)
        bounds = np.append(self._first_indices, manifest.num_samples)
        self._kept_counts = np.diff(bounds - np.searchsorted(manifest.left_out, bounds))

    def is_left_out(self, index: int) -> bool:
        left_out = self.manifest.left_out
        place = np.searchsorted(left_out, index)
        return bool(place < len(left_out) and left_out[place] == index)

    def sequence(self, seed: int, epoch: int, num_slots: int) -> EpochSequence:
        if self._resampled:
            kept = resampled_shards(self._kept_counts, num_slots, seed, epoch, self._weights)
        else:
            kept = shuffled_shards(self._kept_counts, seed, epoch)
        return kept_samples(kept, self.manifest.left_out) if len(self.manifest.left_out) else kept

    def reader(self) -> Reader:
        return _ShardReader(self).read

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        image, caption = self.keys.decode(raw, decoder, draw)
        if not caption.strip():
            raise BadSampleError("no caption: the text is empty")
        return image, caption

    def describe(self, raw: RawSample) -> tuple[str, str]:
        return raw.key, self.keys.caption(raw)

    def shard_number(self, index: int) -> int:
        """Number of the shard that holds a sample."""
        return int(np.searchsorted(self._first_indices, index, side="right")) - 1

    def group_of(self, index: int) -> tuple[str, int, int]:
        shard = self.manifest.shards[self.shard_number(index)]
        return shard.url, shard.first_index, shard.num_samples

    def known_bad(self) -> tuple[int, str]:
        if not self._manifest_knows_keys:
            return 0, ""
        lines = list(self.manifest.report())
        where = "; ".join(lines[:3]) + (f" and {len(lines) - 3} more shards" if lines[3:] else "")
        return self.manifest.num_bad + self.manifest.num_lost, where

    def replacements(self, index: int, seed: int, epoch: int) -> Iterator[int]:
        shard = self.manifest.shards[self.shard_number(index)]
        head = shard.num_samples if shard.seekable else min(_STREAM_HEAD, shard.num_samples)
        offset = hash_int(Purpose.REPLACEMENT, seed, epoch, index) % head
        for position in chain(range(offset, head), range(offset), range(head, shard.num_samples)):
            other = shard.first_index + position
            if other != index and not self.is_left_out(other):
                yield other

    def open_shard(self, number: int) -> "_OffsetShard | _StreamedShard":
        """Open one shard, to read its samples by position; OSError if it is gone or was changed since its scan."""
        shard = self.manifest.shards[number]
        if shard.is_local:
            self.manifest.check_unchanged(number)
        offsets = self.manifest.sample_offsets(number)
        if offsets is not None:
            return _OffsetShard(shard.url, offsets, self.keys.fields)
        return _StreamedShard(shard.url, shard.num_samples, self.keys.fields)


class _ShardReader:
    """Keeps the shard of the last sample open."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._shard: _OffsetShard | _StreamedShard | None = None
        self._first = self._end = 0

    def read(self, index: int) -> RawSample:
        try:
            if self._shard is None or not self._first <= index < self._end:
                self._open(index)
            assert self._shard is not None
            sample = self._shard.sample(index - self._first)
        except tar.STREAM_ERRORS as error:
            name = self._source.group_of(index)[0]
            return RawSample(index, problem=f"{name} cannot be read: {type(error).__name__}: {error}")
        return RawSample(index, sample.fields, sample.found, sample.key)

    def _open(self, index: int) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None
        self._shard = self._source.open_shard(self._source.shard_number(index))
        _, self._first, count = self._source.group_of(index)
        self._end = self._first + count


class _OffsetShard:
    """A local tar with known offsets."""

    def __init__(self, path: str, offsets: np.ndarray, wanted: frozenset[str]) -> None:
        self._file = open_local(path, _READ_BUFFER)
        self._offsets = offsets
        self._wanted = wanted

    def sample(self, position: int) -> tar.TarSample:
        begin, end = self._offsets[position : position + 2].tolist()
        self._file.seek(begin)
        data = self._file.read(end - begin)
        if len(data) < end - begin or not data:
            raise EOFError(f"sample {position} should end at byte {end}, the file ends before")
        return tar.read_sample(data, self._wanted)

    def close(self) -> None:
        self._file.close()


class _StreamedShard:
    """A tar that can only be read forward; going back opens it again.

    A read that fails is tried again from the beginning of the shard. After the last attempt everything from there on
    counts as unreadable.
    """

    def __init__(self, url: str, num_samples: int, wanted: frozenset[str]) -> None:
        self._url = url
        self._num_samples = num_samples
        self._wanted = wanted
        self._stream: BinaryIO | None = None
        self._samples: Iterator[tar.TarSample] = iter(())
        self._next = 0
        self._unreadable: tuple[int, str] | None = None

    def sample(self, position: int) -> tar.TarSample:
        for attempt in range(1, _STREAM_ATTEMPTS + 1):
            if self._unreadable is not None and position >= self._unreadable[0]:
                raise EOFError(self._unreadable[1])
            try:
                return self._advance(position)
            except tar.STREAM_ERRORS as error:
                logging.warning(f"Reading {self._url} failed ({error}), attempt {attempt} of {_STREAM_ATTEMPTS}.")
                reached, reason = self._next, f"{type(error).__name__}: {error}"
                self.close()
                if attempt < _STREAM_ATTEMPTS:
                    time.sleep(attempt)
        self._unreadable = reached, reason
        raise EOFError(reason)

    def _advance(self, position: int) -> tar.TarSample:
        if self._stream is None or position < self._next:
            self.close()
            self._stream = open_url(self._url)
            self._samples = tar.TarArchive(self._stream).samples(self._wanted)
        for sample in self._samples:
            self._next += 1
            if self._next > position:
                if self._next == self._num_samples:
                    self._warn_of_more()
                return sample
        raise EOFError(f"it has {self._next} samples, the manifest says {self._num_samples}")

    def _warn_of_more(self) -> None:
        """Warn if the shard has samples beyond the promised number: they have no index and are never read."""
        try:
            more = next(self._samples, None) is not None
        except tar.STREAM_ERRORS:
            more = True
        if more:
            logging.warning(
                f"{self._url} has more than the {self._num_samples:,} samples of the manifest: the others are never "
                "trained on. The sizes.json or *_stats.json next to it, or the file named with --sizes, is too low: "
                "correct it and make the manifest again"
            )

    def close(self) -> None:
        stream, self._stream, self._samples, self._next = self._stream, None, iter(()), 0
        if stream is not None:
            try:
                stream.close()
            except OSError as error:  # a command that is not read to its end may complain
                logging.debug(f"Closing {self._url}: {error}")
