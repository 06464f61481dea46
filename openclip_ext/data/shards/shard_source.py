"""A source that reads WebDataset shards."""

import contextlib
import copy
import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, groupby, pairwise
from operator import itemgetter

import numpy as np

from openclip_ext.cli.messages import get_logger
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.manifest.scan import Shard
from openclip_ext.data.order import EpochSequence, kept_samples, resampled_shards, shuffled_shards
from openclip_ext.data.remote import ReplacedError, in_background, persist
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import DecodedImage, ImageDecoder, RawSample, SampleKeys, Source, limited
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage

logger = get_logger(__name__)

# Number of remote shards that a reader opens in advance. The shard that it reads now is also in use.
_SHARDS_AHEAD = 3
SHARDS_IN_USE = 1 + _SHARDS_AHEAD


class ShardSource(Source):
    """The samples of the shards in a verified manifest.

    If ``resampled``, shards are drawn with replacement, in proportion to ``weights``. Otherwise, an epoch has each shard once.
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
        storage: Storage = DEFAULT_STORAGE,
        hard_negative_key: str | None = None,
        caption_weights: Sequence[float] = (),
    ) -> None:
        super().__init__(manifest.num_samples, manifest.digest)
        self.num_kept -= len(manifest.left_out)
        self.index_digest = manifest.index_digest
        self.manifest = manifest
        self.keys = SampleKeys(image_key, caption_key, hard_negative_key, caption_weights)
        self.has_hard_negatives = hard_negative_key is not None
        self._has_same_keys = (manifest.image_key, manifest.caption_key) == (image_key, caption_key)
        self._resampled = resampled
        self._weights = np.ones(len(manifest.shards)) if weights is None else np.asarray(weights, dtype=np.float64)
        self._numbers: np.ndarray = np.arange(len(manifest.shards))  # positions of the used shards in the manifest
        self._storage = storage
        self._gave_up = False  # whether the last local shard could not be opened
        self._first_indices = np.array([shard.first_index for shard in manifest.shards], dtype=np.int64)

    def is_left_out(self, index: int) -> bool:
        left_out = self.manifest.left_out
        place = np.searchsorted(left_out, index)
        return bool(place < len(left_out) and left_out[place] == index)

    def part(self, urls: Collection[str]) -> "ShardSource":
        """Return a source with only the samples of these shards. The samples keep their indices."""
        part = copy.copy(self)
        part._numbers = np.array([number for number, shard in enumerate(self.manifest.shards) if shard.url in urls])
        part.num_samples = sum(self.manifest.shards[number].num_samples for number in part._numbers)
        part.num_kept = int(self._kept_counts(self.manifest.left_out)[part._numbers].sum())
        part.digest = f"{self.digest}:{hashlib.blake2b(part._numbers.tobytes(), digest_size=4).hexdigest()}"
        return part

    def share_of(self, epoch_samples: int | None) -> int:
        """Return the number of this part's samples in an epoch of ``epoch_samples`` samples (None: all) from all shards."""
        counts = self._kept_counts(self.manifest.left_out)
        total = int(counts.sum()) if epoch_samples is None else epoch_samples
        if not self._resampled:
            return total * self.num_kept // int(counts.sum())
        drawn = counts * self._weights
        return round(total * drawn[self._numbers].sum() / drawn.sum())

    def sequence(self, seed: int, epoch: int, num_slots: int, bad: np.ndarray) -> tuple[EpochSequence, int | None]:
        left_out = np.union1d(self.manifest.left_out, bad)
        counts = self._kept_counts(left_out)
        if self._resampled:
            weights = np.where(np.isin(np.arange(len(counts)), self._numbers), self._weights, 0)
            return kept_samples(resampled_shards(counts, num_slots, seed, epoch, weights), left_out), None
        order = shuffled_shards(counts, seed, epoch, self._numbers)
        return kept_samples(order, left_out), int(counts[self._numbers].sum())

    def _kept_counts(self, left_out: np.ndarray) -> np.ndarray:
        """Return the number of samples of each shard, without the samples ``left_out``."""
        bounds = np.append(self._first_indices, self.manifest.num_samples)
        return np.diff(bounds - np.searchsorted(left_out, bounds))

    def read(self, indices: Iterable[np.ndarray]) -> Iterator[RawSample]:
        return _ShardReader(self).read(indices)

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        return self.keys.decode(raw, limited(decoder, self.max_pixels), draw)

    def hard_negative(self, raw: RawSample, draw: int) -> str:
        return self.keys.hard_negative(raw, draw)

    def describe(self, raw: RawSample) -> tuple[str, str]:
        return raw.key, self.keys.caption(raw)

    def shard_numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return, for each index, the number of the shard that contains the sample."""
        return np.searchsorted(self._first_indices, indices, side="right") - 1

    def shard_number(self, index: int) -> int:
        """Return the number of the shard that contains a sample."""
        return int(self.shard_numbers(np.array(index)))

    def group_of(self, index: int) -> tuple[str, int, int]:
        shard = self.manifest.shards[self.shard_number(index)]
        return shard.url, shard.first_index, shard.num_samples

    def known_bad(self) -> tuple[int, str]:
        if not self._has_same_keys:
            return 0, ""
        problems = [self.manifest.shards[number].problems for number in self._numbers]
        lines = list(self.manifest.report(self._numbers))
        where = "; ".join(lines[:3]) + (f" and {len(lines) - 3} more shards" if lines[3:] else "")
        return sum(found.get("bad", 0) + found.get("lost", 0) for found in problems), where

    def open_shard(self, number: int) -> io.BufferedReader:
        """Open one shard; raise OSError if it does not exist or changed since its scan. Fetch the start of a remote shard.

        A local shard may be on a file server that does not answer, so retry opening it, unless the previous shard failed.
        """
        shard = self.manifest.shards[number]
        if not shard.is_local:
            try:
                file = self._storage.open(shard.url, version=shard.version)
            except ReplacedError:
                self.manifest.check_remote_unchanged(number, self._storage)
                file = self._storage.open(shard.url)
            file.peek()
            return file

        def open_local() -> io.BufferedReader:
            self.manifest.check_unchanged(number)
            return self._storage.open(shard.url)

        patience = 0.0 if self._gave_up else self._storage.patience
        self._gave_up = True
        file = persist(shard.url, patience, lambda error: isinstance(error, ReplacedError), open_local)
        self._gave_up = False
        return file


class _ShardReader:
    """Read samples of shards from front to back, and open the next remote shards in the background."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._expected: list[int] = []  # numbers of the shards to read, in order
        self._opened: dict[int, Future[io.BufferedReader]] = {}

    def read(self, indices: Iterable[np.ndarray]) -> Iterator[RawSample]:
        """See :meth:`Source.read`."""
        for number, group in groupby(self._numbered(indices), itemgetter(0)):
            yield from self._read_shard(number, (index for _, index in group))

    def _numbered(self, indices: Iterable[np.ndarray]) -> Iterator[tuple[int, int]]:
        """Yield the number of its shard and the index of each sample."""
        for part, following in pairwise(chain(indices, [np.empty(0, np.int64)])):
            self._expected = list(dict.fromkeys(self._source.shard_numbers(np.append(part, following)).tolist()))
            yield from zip(self._source.shard_numbers(part).tolist(), part.tolist(), strict=True)

    def _open(self, number: int) -> io.BufferedReader:
        future = self._opened.pop(number, None)
        file = self._source.open_shard(number) if future is None else future.result()
        upcoming = self._expected[self._expected.index(number) + 1 :] if number in self._expected else []
        self._opened = {
            ahead: self._opened.get(ahead) or in_background(partial(self._source.open_shard, ahead))
            for ahead in upcoming[:_SHARDS_AHEAD]
            if not self._source.manifest.shards[ahead].is_local
        }
        return file

    def _read_shard(self, number: int, indices: Iterator[int]) -> Iterator[RawSample]:
        """Yield samples of one shard. If it becomes unreadable, the rest of the samples have a ``problem``."""
        shard = self._source.manifest.shards[number]
        walk: _Walk | None = None
        problem, has_restarted = "", False
        for index in indices:
            if problem:
                yield RawSample(index, problem=problem)
                continue
            try:
                try:
                    walk = self._walk_to(number, index, walk)
                    sample = walk.advance(index)
                except tar.STREAM_ERRORS as error:
                    if shard.is_local or isinstance(error, OSError) or has_restarted:
                        raise
                    # The connection may have cut off a stream of unknown length, so a second read may succeed.
                    logger.warning(f"{shard.url} is read again from its start: {error}")
                    has_restarted = True
                    walk = self._walk_to(number, index, None)
                    sample = walk.advance(index)
            except tar.STREAM_ERRORS as error:
                text = f"{shard.url} cannot be read: {type(error).__name__}: {error}"
                if shard.is_local and isinstance(error, OSError) and error.errno is not None:
                    walk = None  # The next sample opens the shard again, so a bad disk block costs only one sample.
                else:
                    problem = text
                yield RawSample(index, problem=text)
            else:
                yield RawSample(index, sample.fields, sample.found, sample.key)
        if walk is not None:
            walk.close()

    def _walk_to(self, number: int, index: int, walk: "_Walk | None") -> "_Walk":
        """Return the walk through a shard: a new walk if there is none, or if it has passed the sample."""
        if walk is not None and walk.next <= index:
            return walk
        if walk is not None:
            walk.close()
        return _Walk(self._open(number), self._source.manifest.shards[number], self._source.keys.fields, index)


class _Walk:
    """The samples of an open shard from ``first`` on. The content before it is not read, because it may be unreadable.

    Attributes:
        next: Index of the next sample.
    """

    def __init__(self, file: io.BufferedReader, shard: Shard, fields: frozenset[str], first: int) -> None:
        self.next = shard.first_index
        self._file = file
        self._shard = shard
        self._samples = tar.TarArchive(file).samples(fields, skip=first - shard.first_index)

    def advance(self, index: int) -> tar.TarSample:
        """Return a sample. If the shard is unreadable before this sample, raise one of STREAM_ERRORS."""
        end = self._shard.first_index + self._shard.num_samples
        for sample in self._samples:
            self.next += 1
            if self.next > index:
                if self.next == end:
                    self._warn_of_more()
                return sample
        count = self.next - self._shard.first_index
        raise EOFError(f"the shard has {count} samples, but the manifest has {self._shard.num_samples}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a command fails if its output is not read completely
            self._file.close()

    def _warn_of_more(self) -> None:
        with contextlib.suppress(*tar.STREAM_ERRORS):
            if next(self._samples, None) is not None:
                logger.warning(
                    f"{self._shard.url} has more than the {self._shard.num_samples:,} samples of the manifest, and the rest "
                    "is never used. The count in sizes.json, *_stats.json or --sizes is too low: correct it, and create the "
                    "manifest again"
                )
