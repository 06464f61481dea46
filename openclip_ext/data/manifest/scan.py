"""Count the samples of shards, from the headers of local tars and from img2dataset's counts next to remote tars."""

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from tqdm import tqdm

from openclip_ext.cli.messages import without_secrets
from openclip_ext.data.processes import available_cores, begin_worker
from openclip_ext.data.remote import PIPE, RemoteFile
from openclip_ext.data.shards import tar
from openclip_ext.data.shards.shardlist import shard_name, sibling
from openclip_ext.data.sources.keys import (
    ANY_FIELD,
    DEFAULT_CAPTION_KEY,
    DEFAULT_IMAGE_KEY,
    BadSampleError,
    Key,
    captions_of,
    parse_keys,
)
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage, is_local

T = TypeVar("T")

# Maximum numbers of bad positions and gaps that are listed for a shard, to keep the manifest small.
_MAX_POSITIONS, _MAX_GAPS = 20, 5
_MAX_PROCESSES = 32
# Each process receives its shards in this many chunks, because sending shards one by one takes longer than scanning them.
_CHUNKS = 64
_REQUESTS = 32  # number of remote files that are read in parallel


class Problems(TypedDict, total=False):
    """The problems of a shard; a good shard has none."""

    without_image: int  # number of samples
    without_caption: int
    bad: int  # number of samples without image or without caption
    bad_positions: list[int]  # positions of the bad samples in the shard, if there are at most 20
    duplicate_keys: int  # number of samples whose key has occurred before
    gaps: list[list[int]]  # [start, end] in bytes of the first 5 parts without a readable header
    lost: int  # number of lost samples, estimated from the size of the gaps or from img2dataset's count
    error: str  # why the shard could not be read completely


@dataclass
class Shard:
    """One shard of a data set."""

    url: str  # absolute path, URL or ``pipe:`` command
    num_samples: int  # including bad samples: each has an index
    first_index: int = 0
    size: int | None = None  # bytes of the local file when it was scanned; None if remote
    mtime_ns: int | None = None
    version: str | None = None  # RemoteFile.version of the remote file when it was scanned; None if local or unknown
    digest: str | None = None  # hash of the names and sizes of its members; None if it was not scanned
    problems: Problems = field(default_factory=Problems)

    @property
    def is_local(self) -> bool:
        """Whether the shard is a file on this machine."""
        return is_local(self.url)


def scan_shard(
    url: str,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    storage: Storage = DEFAULT_STORAGE,
) -> Shard:
    """Scan the headers of one tar, also after corrupt parts. A compressed tar or a stream is read completely."""
    image_keys = () if image_key == ANY_FIELD else parse_keys(image_key, allow_json=False)
    caption_keys = () if caption_key == ANY_FIELD else parse_keys(caption_key, allow_json=True)
    try:
        with storage.open(url, headers_only=True) as file:
            shard = _scan_archive(url, tar.TarArchive(file), image_keys, caption_keys)
            if is_local(url):
                status = os.fstat(file.fileno())
                shard.size, shard.mtime_ns = status.st_size, status.st_mtime_ns
    except OSError as error:
        return Shard(url, 0, problems={"error": f"cannot be read: {error.strerror or error}"})
    if "gaps" in shard.problems or "error" in shard.problems:
        # The size of the gaps may underestimate the loss, so also use the count that img2dataset wrote, if there is one.
        lost = (_written_count(url, partial(_read_json, storage)) or 0) - shard.num_samples
        if lost > 0:
            shard.problems["lost"] = max(shard.problems.get("lost", 0), lost)
    return shard


def _scan_archive(path: str, archive: tar.TarArchive, image_keys: Sequence[Key], caption_keys: Sequence[Key]) -> Shard:
    digest = hashlib.blake2b(digest_size=16)
    keys: set[str] = set()
    counts: Counter[str] = Counter()
    bad: list[int] = []
    count, num_bytes, problems = 0, 0, Problems()

    def until_break(items: Iterator[T]) -> Iterator[T]:
        try:
            yield from items
        except tar.STREAM_ERRORS as error:
            problems["error"] = str(error) or type(error).__name__

    json_fields = frozenset(key.field for key in caption_keys if key.entry is not None)
    samples = until_break(archive.samples(json_fields, until_break(archive.members())))
    for count, sample in enumerate(samples, start=1):
        for member in sample.members:
            num_bytes += member.end - member.start
            digest.update(f"{member.name}\0{member.size}\0".encode())
        lacks_image, lacks_caption = _lacks(sample, image_keys), _lacks(sample, caption_keys)
        counts.update(duplicate_keys=sample.key in keys, without_image=lacks_image, without_caption=lacks_caption)
        if lacks_image or lacks_caption:
            bad.append(count - 1)
        keys.add(sample.key)
    gap_bytes = sum(gap.end - gap.start for gap in archive.gaps)
    counts.update(bad=len(bad), lost=math.ceil(gap_bytes * count / num_bytes) if count else 0)
    problems |= {name: number for name, number in sorted(counts.items()) if number}  # type: ignore[typeddict-item]
    if 0 < len(bad) <= _MAX_POSITIONS:
        problems["bad_positions"] = bad
    if archive.gaps:
        problems["gaps"] = [list(gap) for gap in archive.gaps[:_MAX_GAPS]]
    return Shard(path, count, digest=digest.hexdigest(), problems=problems)


def _lacks(sample: tar.TarSample, keys: Sequence[Key]) -> bool:
    """Return whether a sample lacks the image or caption of these keys. As in training, the first existing field is used.

    An empty field counts as missing, because img2dataset writes an empty field for a null caption.
    """
    key = next((key for key in keys if key.field in sample.found), None)
    if key is None or sample.members[sample.found.index(key.field)].size == 0:
        return bool(keys)
    try:
        return key.entry is not None and not captions_of(sample.fields[key.field], key)
    except BadSampleError:
        return True


def scan_local(paths: Sequence[str], image_key: str, caption_key: str, workers: int | None = None) -> list[Shard]:
    """Scan local shards in parallel: one process per CPU core by default, at most 32. A terminal shows a progress bar."""
    scan = partial(scan_shard, image_key=image_key, caption_key=caption_key)
    workers = min(workers or min(available_cores(), _MAX_PROCESSES), len(paths))
    if workers <= 1:
        return list(with_bar(map(scan, paths), len(paths)))
    # PyTorch also uses "fork" for data workers by default. "spawn" would import the training script and torch in each process.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    chunk = max(1, len(paths) // (workers * _CHUNKS))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method), initializer=begin_worker) as pool:
        return list(with_bar(pool.map(scan, paths, chunksize=chunk), len(paths)))


def with_bar(items: Iterable, total: int, task: str = "scanning shards") -> Iterator:
    """Yield the items, and show a progress bar if the output is a terminal."""
    return iter(tqdm(items, total=total, desc=task, unit="shard", disable=None))


def count_remote(urls: Sequence[str], sizes: dict[str, int] | None, storage: Storage) -> dict[str, Shard]:
    """Return the remote shards with a known count, by URL. If ``sizes`` is None, read it from files next to the shards."""
    for name, number in Counter(map(shard_name, set(urls))).items():
        if number > 1 and sizes is not None and name in sizes:
            raise ValueError(
                f"--sizes has one count for {name}, but {number} shards have this name. Instead, put a sizes.json next to the "
                "shards of each folder"
            )
    read = functools.lru_cache(maxsize=64)(partial(_read_json, storage))  # the shards of a folder share its sizes.json
    count = partial(_written_count, read=read) if sizes is None else lambda url: sizes.get(shard_name(url))
    with ThreadPoolExecutor(_REQUESTS) as pool:
        counts = list(with_bar(pool.map(count, urls), len(urls), "looking up counts"))
    return {url: Shard(url, count) for url, count in zip(urls, counts, strict=True) if count is not None and count >= 0}


def scan_remote(
    urls: Sequence[str], image_key: str, caption_key: str, storage: Storage, journal: Path
) -> dict[str, Shard]:
    """Scan remote shards by their headers, 32 at a time.

    The journal stores the result of each readable shard with the version of its file. After an interruption, only shards
    without a result or with another version are scanned.
    """
    written: dict[tuple[str, ...], Any] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # the last line of an interrupted scan may be incomplete
            *identity, entry = json.loads(line)
            written[tuple(identity)] = entry

    def scan(url: str) -> tuple[tuple[str, ...], Shard]:
        version = ""
        with contextlib.suppress(OSError):  # ignored here, because the scan of the shard reports the error
            version = RemoteFile(url, storage.patience).version
        identity = (image_key, caption_key, without_secrets(url), version)
        if version and identity in written:
            return (), Shard(**written[identity] | {"url": url})
        shard = scan_shard(url, image_key=image_key, caption_key=caption_key, storage=storage)
        shard.version = version or None
        return identity if version and "error" not in shard.problems else (), shard

    done: dict[str, Shard] = {}
    with journal.open("a") as file, ThreadPoolExecutor(_REQUESTS) as pool:
        futures = [pool.submit(scan, url) for url in urls]
        for future in with_bar(as_completed(futures), len(futures)):
            identity, shard = future.result()
            done[shard.url] = shard
            if identity:
                file.write(json.dumps([*identity, vars(shard) | {"url": None}]) + "\n")
                file.flush()
    return {url: done[url] for url in urls}


def _written_count(url: str, read: Callable[[str | None], dict[str, Any]]) -> int | None:
    """Return a shard's sample count from the files of img2dataset or OpenCLIP next to it; None if there is no count."""
    name = shard_name(url)
    table = read(sibling(url, "sizes.json"))
    stats = re.sub(r"\.(tar(\.\w+)?|tgz)$", "", name) + "_stats.json"
    count = table[name] if name in table else read(sibling(url, stats)).get("successes")
    return count if isinstance(count, int) else None


def _read_json(storage: Storage, url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    # A failed command may only mean that the file does not exist, so do not retry it.
    storage = Storage(patience=0) if url.startswith(PIPE) else storage
    try:
        content = json.loads(storage.read(url))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
