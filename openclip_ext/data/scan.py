"""Count the samples of shards: local tars by their headers, remote ones by what img2dataset leaves next to them."""

import hashlib
import json
import math
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from openclip_ext.data import tar
from openclip_ext.data.shardlist import open_regular, shard_name, sibling
from openclip_ext.machine import available_cores

DEFAULT_IMAGE_KEY = "jpg;png;jpeg;webp"
DEFAULT_CAPTION_KEY = "txt"

# Positions of bad samples are written down only when they are few: a manifest stays small.
_MAX_POSITIONS = 20
_MAX_GAPS = 5
# A read brings in at least this much: the headers around small members (captions, json) come with the one before.
_MIN_READ = 4096
_MAX_READ = 1 << 18
# What all tar formats of today have in their headers.
_MARK = b"ustar"


class Key(NamedTuple):
    """Where an image or a caption lies in a sample: a field of the tar, or an entry of a json field."""

    field: str
    entry: str | None = None


def parse_keys(text: str, allow_json: bool) -> tuple[Key, ...]:
    """Parse ``--image-key`` or ``--caption-key``: alternatives in order of preference, separated by ``;``.

    ``jpg`` names a field of the tar, ``json:caption`` the entry "caption" of the field "json" (``meta.json:caption``
    that of the field "meta.json").

    Raises:
        ValueError: No key, or a json entry where an image is asked for.
    """
    keys = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, entry = part.partition(":")
        if colon and (not allow_json or not entry or name.rpartition(".")[2].lower() != "json"):
            expected = "a field such as 'jpg'" + (
                " or an entry of a json field such as 'json:caption'" if allow_json else ""
            )
            raise ValueError(f"the key {part!r} is not understood: expected {expected}")
        keys.append(Key(name.lower(), entry or None))
    if not keys:
        raise ValueError(f"no key in {text!r}: expected names of tar fields such as 'jpg;png'")
    return tuple(keys)


@dataclass
class ShardScan:
    """Result of scanning one shard.

    Attributes:
        num_samples: Samples in the tar, bad ones included: each has an index.
        size, mtime_ns: Of the file; None for remote shards.
        digest: Hash of the names and sizes of all members; None for remote shards.
        blocks: ``(num_samples,)`` uint32, the length of each sample in 512-byte blocks, headers included; None where
            samples cannot be reached by offset (compressed or remote).
        problems: Counts and messages, empty for a good shard: ``duplicate_keys``, ``without_image``,
            ``without_caption``, ``bad`` (samples without one or the other), ``bad_positions`` (if few), ``gaps``
            (``[start, end]`` bytes without a readable header, the first few), ``lost`` (samples in the gaps, estimated),
            ``error`` (why the shard could not be read to its end).
        fields: How many samples have each field.
    """

    num_samples: int
    size: int | None = None
    mtime_ns: int | None = None
    digest: str | None = None
    blocks: np.ndarray | None = None
    problems: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)


class _HeaderReader:
    """Reads the headers of a tar with few system calls and without the images between them.

    One read brings the headers that lie close together; the read size doubles as long as that pays (tars of small
    members) and falls back when a member's data had to be jumped over.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._chunk = b""
        self._begin = 0
        self._read_size = _MIN_READ

    def __call__(self, offset: int, length: int) -> bytes:
        first = offset - self._begin
        if first < 0 or first + length > len(self._chunk):
            near = offset - (self._begin + len(self._chunk)) < _MIN_READ
            self._read_size = min(2 * self._read_size, _MAX_READ) if near else _MIN_READ
            self._chunk = os.pread(self._descriptor, max(length, self._read_size), offset)
            self._begin, first = offset, 0
        return self._chunk[first : first + length]


class _Grouping:
    """Collects the members of a tar into samples and counts what is wrong with them."""

    def __init__(self, image_keys: Sequence[Key], caption_keys: Sequence[Key]) -> None:
        self._image_fields = {key.field for key in image_keys}
        self._caption_fields = {key.field for key in caption_keys}
        self._keys: set[str] = set()
        self._current: str | None = None
        self._found: set[str] = set()
        self._bytes = 0  # of the current sample
        self._all_bytes = 0  # of all samples before it
        self._digest = hashlib.blake2b(digest_size=16)
        self._between: list[tuple[int, list[tar.Gap]]] = []  # the gaps between samples, and how many come before them
        self.gaps: list[tar.Gap] = []
        self.starts: list[int] = []
        self.end = 0
        self.num_samples = 0
        self.fields: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.bad: dict[int, int] = {}  # positions of incomplete samples, and their bytes

    def take(self, members: Iterator[tar.Member], count_headers: Callable[[tar.Gap], int] = lambda gap: 0) -> ShardScan:
        """Go through the members of a tar, to the end or the first error.

        Args:
            members: Their gaps go to ``self.gaps``.
            count_headers: How many headers can be recognized in a gap; 0 where it cannot be read again.
        """
        error = None
        gaps_seen = 0
        pending: list[tar.Gap] = []
        try:
            for member in members:
                if len(self.gaps) > gaps_seen:
                    pending += self.gaps[gaps_seen:]
                    gaps_seen = len(self.gaps)
                before = len(self.starts)
                if member.is_file and self._add(member) and pending:
                    # A gap between two members of one sample holds no other sample.
                    if len(self.starts) > before:
                        self._between.append((before, pending))
                    pending = []
                self.end = member.end
        except tar.STREAM_ERRORS as broken:
            error = str(broken) or type(broken).__name__
        self._between.append((len(self.starts), pending + self.gaps[gaps_seen:]))
        self._finish()
        return self._result(error, self._lost_samples(count_headers))

    def _add(self, member: tar.Member) -> bool:
        """Returns whether the member belongs to a sample."""
        parts = tar.split_name(member.name)
        if parts is None:
            return False
        key, member_field = parts
        self._digest.update(f"{member.name}\0{member.size}\0".encode())
        if key != self._current or member_field in self._found:
            self._finish()
            self._current = key
            self.starts.append(member.start)
        self._found.add(member_field)
        self._bytes += member.end - member.start
        return True

    def _finish(self) -> None:
        """Close the current sample, if any."""
        if self._current is None:
            return
        if self._current in self._keys:
            self.problems["duplicate_keys"] += 1
        self._keys.add(self._current)
        self.fields.update(self._found)
        has_image = not self._image_fields.isdisjoint(self._found)
        has_caption = not self._caption_fields.isdisjoint(self._found)
        self.problems["without_image"] += not has_image
        self.problems["without_caption"] += not has_caption
        if not (has_image and has_caption):
            self.bad[self.num_samples] = self._bytes
        self._all_bytes += self._bytes
        self.num_samples += 1
        self._current, self._found, self._bytes = None, set(), 0

    def _lost_samples(self, count_headers: Callable[[tar.Gap], int]) -> int:
        """Estimate how many samples the gaps held, from their size and from the headers in them: the larger, rounded up.

        The missing parts of incomplete samples beside a gap are taken off first.
        """
        mean_size = self._all_bytes / self.num_samples if self.num_samples else tar.BLOCK
        mean_fields = sum(self.fields.values()) / self.num_samples if self.num_samples else 1
        lost = 0
        for before, gaps in self._between:
            lacking = [max(0, mean_size - self.bad[i]) for i in (before - 1, before) if i in self.bad]
            room = sum(gap.end - gap.start for gap in gaps) - sum(lacking)
            headers = sum(count_headers(gap) for gap in gaps)
            lost += max(0, math.ceil(room / mean_size), math.ceil(headers / mean_fields) - len(lacking))
        return lost

    def _result(self, error: str | None, lost: int) -> ShardScan:
        counts = {**self.problems, "bad": len(self.bad), "lost": lost}
        problems: dict[str, Any] = {name: count for name, count in sorted(counts.items()) if count}
        if 0 < len(self.bad) <= _MAX_POSITIONS:
            problems["bad_positions"] = list(self.bad)
        if self.gaps:
            problems["gaps"] = [list(gap) for gap in self.gaps[:_MAX_GAPS]]
        if error is not None:
            problems["error"] = error
        return ShardScan(self.num_samples, digest=self._digest.hexdigest(), problems=problems, fields=dict(self.fields))


def scan_shard(path: str, image_key: str = DEFAULT_IMAGE_KEY, caption_key: str = DEFAULT_CAPTION_KEY) -> ShardScan:
    """Scan one local tar; plain ones by their headers only, compressed ones by reading them through.

    After damage the scan goes on at the next readable header; what was lost is told in ``problems``.
    """
    grouping = _Grouping(parse_keys(image_key, allow_json=False), parse_keys(caption_key, allow_json=True))
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if tar.decompressor(os.pread(file.fileno(), 8, 0)) is None:
                result = _scan_headers(file.fileno(), status.st_size, grouping)
            else:
                result = _scan_stream(file, grouping)
    except OSError as error:
        return ShardScan(0, problems={"error": f"cannot be read: {error.strerror or error}"})
    result.size, result.mtime_ns = status.st_size, status.st_mtime_ns
    if "gaps" in result.problems or "error" in result.problems:
        _count_missing(path, result)
    return result


def _scan_headers(descriptor: int, size: int, grouping: _Grouping) -> ShardScan:
    members = tar.iter_members(_HeaderReader(descriptor), size, grouping.gaps)
    result = grouping.take(members, partial(_count_headers, descriptor))
    # Whatever lies between two samples (folders, hidden files) belongs to the one before, and the first begins at 0.
    bounds = np.array([0, *grouping.starts[1:], grouping.end] if grouping.starts else [0], dtype=np.int64)
    result.blocks = (np.diff(bounds) // tar.BLOCK).astype(np.uint32)
    return result


def _count_headers(descriptor: int, gap: tar.Gap) -> int:
    """Count the marks of tar headers in a gap, at any byte: where bytes were inserted or removed, headers are misaligned."""
    count = 0
    for begin in range(gap.start, gap.end, _MAX_READ):
        count += os.pread(descriptor, min(_MAX_READ, gap.end - begin) + len(_MARK) - 1, begin).count(_MARK)
    return count


def _scan_stream(file: BinaryIO, grouping: _Grouping) -> ShardScan:
    return grouping.take(tar.stream_members(file, grouping.gaps)[0])


def _count_missing(path: str, result: ShardScan) -> None:
    """Correct the number of lost samples by the count that img2dataset left next to the shard, if there is one."""
    written = _SizeTables(lambda name: Path(name).read_bytes()).count(path)
    if written is not None and written > result.num_samples:
        result.problems["lost"] = max(result.problems.get("lost", 0), written - result.num_samples)


def scan_local(
    paths: Sequence[str], image_key: str, caption_key: str, workers: int | None = None, progress: bool = True
) -> list[ShardScan]:
    """Scan local shards in parallel processes.

    Args:
        paths: The tars.
        image_key, caption_key: Fields of image and caption, as :func:`parse_keys` takes them.
        workers: Processes; None for one per CPU core, at most 32.
        progress: Show a bar (on a terminal).
    """
    scan = partial(scan_shard, image_key=image_key, caption_key=caption_key)
    workers = min(workers or min(available_cores(), 32), len(paths))
    if workers <= 1:
        return list(_with_bar(map(scan, paths), len(paths), progress))
    # fork, as PyTorch's DataLoader does: spawn would import the training script (and torch) again in each process.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method)) as pool:
        return list(_with_bar(pool.map(scan, paths), len(paths), progress))


def _with_bar(items: Iterable, total: int, progress: bool) -> Iterator:
    # disable=None: no bar where stderr is a file.
    return iter(tqdm(items, total=total, desc="scanning shards", unit="shard", disable=None if progress else True))


def count_remote(
    urls: Sequence[str], read: Callable[[str], bytes], sizes: dict[str, int] | None = None, progress: bool = True
) -> list[ShardScan]:
    """Take the sample counts of remote shards from ``sizes.json`` or ``*_stats.json`` next to them; no tar is read.

    Args:
        urls: ``pipe:`` commands or URLs.
        read: Returns the content of a URL or raises OSError.
        sizes: Counts by file name of the tar, if known; read from next to the shards otherwise.
        progress: Show a bar (on a terminal).

    Raises:
        ValueError: The count of a shard is nowhere to be found.
    """
    tables = _SizeTables(read, sizes)
    with ThreadPoolExecutor(16) as pool:
        counts = list(_with_bar(pool.map(tables.count, urls), len(urls), progress))
    unknown = [url for url, count in zip(urls, counts, strict=True) if count is None]
    if unknown:
        raise ValueError(
            f"the number of samples is unknown for {len(unknown)} of {len(urls)} remote shards, among them "
            f"{unknown[0]!r}: neither sizes.json nor the shard's *_stats.json (img2dataset writes them) "
            'could be read next to it. Write a file {"00000.tar": 9876, ...} and name it with --sizes'
        )
    return [ShardScan(int(count)) for count in counts]


class _SizeTables:
    """Sample counts by file name: given, or from the files next to a shard."""

    def __init__(self, read: Callable[[str], bytes], sizes: dict[str, int] | None = None) -> None:
        self._read = read
        self._sizes = sizes
        self._folders: dict[str, dict[str, Any]] = {}

    def count(self, url: str) -> int | None:
        name = shard_name(url)
        if self._sizes is not None:
            return _as_count(self._sizes.get(name))
        folder_sizes = self._folder_sizes(sibling(url, "sizes.json"))
        if name in folder_sizes:
            return _as_count(folder_sizes[name])
        stats = self._json(sibling(url, re.sub(r"\.(tar(\.\w+)?|tgz)$", "", name) + "_stats.json"))
        return _as_count(stats.get("successes"))

    def _folder_sizes(self, url: str | None) -> dict[str, Any]:
        if url is None:
            return {}
        # Two threads may read the same table at the same time; both get the same.
        if url not in self._folders:
            self._folders[url] = self._json(url)
        return self._folders[url]

    def _json(self, url: str | None) -> dict[str, Any]:
        if url is None:
            return {}
        try:
            content = json.loads(self._read(url))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def _as_count(value: Any) -> int | None:
    """A number of samples as read from JSON; None if it is no such number."""
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else None
