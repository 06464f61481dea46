"""The manifest contains the number of samples in each shard. These numbers define the index of every sample.

The index of a sample is the first index of its shard plus its position in the tar. Indices are dense, unique, and known
before training starts. They do not change, and do not depend on the names of the tar members.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openclip_ext.cli.messages import for_people, get_logger, without_secrets
from openclip_ext.data.manifest import scan
from openclip_ext.data.manifest.scan import Shard
from openclip_ext.data.remote import ReplacedError
from openclip_ext.data.shards.shardlist import expand_shards, shard_name
from openclip_ext.data.sources.keys import DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage, is_local
from openclip_ext.files.writing import write_text

logger = get_logger(__name__)

FORMAT, VERSION = "openclip_ext.manifest", 1
_SHOWN = 5
_PROBLEM_TEXTS = {
    "without_image": "{:,} samples without image",
    "without_caption": "{:,} samples without caption",
    "duplicate_keys": "{:,} duplicate keys",
    "bad_positions": "at positions {}",
    "gaps": "corrupt: no readable header in the bytes {}",
    "lost": "about {:,} samples lost",
    "error": "corrupt or truncated, so more samples may be lost: {}",
}


class ManifestError(ValueError):
    """The shards or their manifest cannot be used for training."""

    def __init__(self, message: str) -> None:
        super().__init__(for_people(message))


class Manifest:
    """Shards with their sample counts and first indices.

    Args:
        shards: The shards in the order of their indices.
        image_key, caption_key: Fields whose presence the scan checked in each sample.
        left_out: ``(k,)`` int64, ascending indices of samples excluded from training. None (default) excludes none. Excluded
            samples keep their indices.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        image_key: str = DEFAULT_IMAGE_KEY,
        caption_key: str = DEFAULT_CAPTION_KEY,
        left_out: np.ndarray | None = None,
    ) -> None:
        self.shards = list(shards)
        first = 0
        for shard in self.shards:
            shard.first_index, first = first, first + shard.num_samples
        self.image_key = image_key
        self.caption_key = caption_key
        self.left_out = np.empty(0, np.int64) if left_out is None else left_out

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``, including excluded samples."""
        last = self.shards[-1]
        return last.first_index + last.num_samples

    @property
    def num_bad(self) -> int:
        """Number of samples that are known to lack their image or caption."""
        return sum(shard.problems.get("bad", 0) for shard in self.shards)

    @property
    def num_lost(self) -> int:
        """Estimated number of samples lost in corrupt shards. It is a lower bound if a shard is truncated."""
        return sum(shard.problems.get("lost", 0) for shard in self.shards)

    @property
    def digest(self) -> str:
        """Hash of the shards' names, sample counts and members, and of the excluded samples. It ignores folders."""
        return self._hash(_format_ranges(self.left_out))

    @property
    def index_digest(self) -> str | None:
        """The :attr:`digest` as if no sample were excluded; None if a shard was counted without a scan of its members."""
        return self._hash("") if all(shard.digest for shard in self.shards) else None

    def _hash(self, left_out: str) -> str:
        parts = [f"{shard_name(shard.url)}\0{shard.num_samples}\0{shard.digest}\n" for shard in self.shards]
        return hashlib.blake2b("".join([*parts, left_out]).encode(), digest_size=8).hexdigest()

    @classmethod
    def scan(
        cls,
        shards: str | Sequence[str],
        image_key: str = DEFAULT_IMAGE_KEY,
        caption_key: str = DEFAULT_CAPTION_KEY,
        sizes: dict[str, int] | None = None,
        workers: int | None = None,
        storage: Storage = DEFAULT_STORAGE,
        journal: Path | None = None,
    ) -> "Manifest":
        """Count the samples of all shards.

        Args:
            shards: A text for :func:`~openclip_ext.data.shards.shardlist.expand_shards`, or the list that it returned.
            image_key, caption_key: Fields of image and caption. Alternatives are separated by ``;``.
            sizes: Sample counts of remote shards by file name. None (default) means to read them from files
                next to the shards.
            workers: Number of processes for local shards. None (default) means one per core.
            storage: How to read remote files.
            journal: File that stores the progress while remote shards without a count are scanned. None (default) rejects
                such shards.

        Raises:
            ManifestError: The count of a shard is unknown, or a shard or the data set has no usable sample.
            ValueError: ``shards`` is invalid.
        """
        # Expanding a file name again would replace its braces and dollar signs.
        urls = expand_shards(shards) if isinstance(shards, str) else [*shards]
        local = [url for url in urls if is_local(url)]
        remote = [url for url in urls if not is_local(url)]
        found = dict(zip(local, scan.scan_local(local, image_key, caption_key, workers), strict=True))
        if remote:
            found |= scan.count_remote(remote, sizes, storage)
        unknown = [url for url in remote if url not in found]
        if unknown and journal is not None:
            found |= scan.scan_remote(unknown, image_key, caption_key, storage, journal)
        elif unknown:
            storage.reach(unknown[:1])  # a wrong address also has no counts, so report it first
            raise ManifestError(
                f"the number of samples is unknown for {len(unknown)} of {len(urls)} shards, such as {unknown[0]!r}: no "
                "sizes.json or *_stats.json (of img2dataset) is next to it. Count the samples once with openclip-ext "
                "manifest SHARDS --output manifest.json (--sizes FILE has known counts), then "
                "train with --manifest manifest.json"
            )
        scanned = [found[url] for url in urls]
        _refuse_unusable(scanned, image_key, caption_key, storage)
        return cls(scanned, image_key, caption_key)

    def without(self, indices: Iterable[int]) -> "Manifest":
        """Return a manifest that also excludes these samples; raise ManifestError if an index is unknown."""
        given = np.asarray(indices if hasattr(indices, "__array__") else [*indices])
        if given.size and given.dtype.kind not in "iu":
            raise ManifestError(
                f"expected indices of samples to exclude, found {given.dtype}: use np.flatnonzero(mask)"
            )
        left_out = np.union1d(self.left_out, given.astype(np.int64))
        if len(left_out) and not 0 <= left_out[0] <= left_out[-1] < self.num_samples:
            found = left_out[0] if left_out[0] < 0 else left_out[-1]
            raise ManifestError(f"cannot exclude sample {found}: the indices are 0 to {self.num_samples - 1:,}")
        changed = copy.copy(self)
        changed.left_out = left_out
        return changed

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the manifest as JSON, atomically; raise OSError if the folder is not writable."""
        path = Path(path).absolute()
        folder, entries = str(path.parent), []
        for shard in self.shards:
            name = without_secrets(shard.url)
            if shard.is_local and os.path.commonpath([folder, shard.url]) == folder:
                name = Path(os.path.relpath(shard.url, folder)).as_posix()
                name = name if is_local(name) else f"./{name}"  # a colon would make it a URL
            entry = {"name": name, **vars(shard)}
            entries.append({key: value for key, value in entry.items() if key != "url" and value not in (None, {})})
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "image_key": self.image_key,
            "caption_key": self.caption_key,
            "num_samples": self.num_samples,
            "left_out": _format_ranges(self.left_out),
            "shards": entries,
        }
        content["checksum"] = _checksum(content)
        write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Manifest":
        """Read a manifest; raise ManifestError if the file is corrupt, is not a manifest, or has another version."""
        path = Path(path).absolute()
        folder = str(path.parent)
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"expected a JSON object with 'format': '{FORMAT}' and 'version': {VERSION}")
            if content.pop("checksum", None) != _checksum(content):
                raise ValueError("its content does not match its checksum")
            shards = []
            for entry in content["shards"]:
                name = entry.pop("name")
                shards.append(Shard(os.path.normpath(os.path.join(folder, name)) if is_local(name) else name, **entry))
            left_out = _parse_ranges(content["left_out"], content["num_samples"])
            return cls(shards, content["image_key"], content["caption_key"], left_out)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not a manifest, or is corrupt: {error}") from error

    def verify(self, urls: Sequence[str]) -> bool:
        """Check that the manifest still matches the training data; return whether its paths or times were updated.

        Moved shards are recognized by their file names. A local shard with a new modification time and the same size is
        scanned again, and accepted if its members are unchanged. Save an updated manifest to avoid another scan.

        Raises:
            ManifestError: The data and the manifest have different shards, or shards do not exist or were changed.
        """
        moved = self._match(urls)
        gone, changed, touched = [], [], []
        for shard in self.shards:
            try:
                if shard.is_local and _is_touched(shard):
                    touched.append(shard)
            except ReplacedError as error:
                changed.append(f"{shard.url} ({error})")
            except OSError:
                gone.append(shard.url)
        if gone:
            raise ManifestError(
                f"{len(gone)} of {len(self.shards)} shards of the manifest do not exist: {_some(gone)}. Restore "
                "these files"
            )
        if touched and not changed:
            changed = self._rescan(touched)
        if changed:
            raise ManifestError(
                f"{len(changed)} of {len(self.shards)} shards were changed after the manifest was made: "
                f"{_some(changed)}. The indices of the samples are wrong now. Create the manifest again (openclip-ext "
                "manifest SHARDS), and start the training from scratch"
            )
        return bool(moved or touched)

    def check_unchanged(self, shard_number: int) -> None:
        """Check one local shard; raise ReplacedError if its members changed since the scan, OSError if it is missing."""
        shard = self.shards[shard_number]
        if _is_touched(shard) and self._rescan([shard]):
            raise ReplacedError("the shard was replaced by a file with different samples after the manifest was made")

    def check_remote_unchanged(self, shard_number: int, storage: Storage) -> None:
        """Scan a remote shard again; raise ReplacedError if its members changed, OSError if it is unreadable."""
        shard = self.shards[shard_number]
        logger.warning(f"{shard.url} has changed since the manifest was made: it is scanned again.")
        scanned = scan.scan_shard(shard.url, self.image_key, self.caption_key, storage)
        if scanned.digest is None:
            raise OSError(scanned.problems.get("error"))
        if (shard.digest, shard.num_samples) != (scanned.digest, scanned.num_samples):
            raise ReplacedError("the shard was replaced by a file with different samples after the manifest was made")
        shard.version = None  # the new version is accepted

    def _rescan(self, shards: Sequence[Shard]) -> list[str]:
        """Scan shards again; return descriptions of the shards whose members differ."""
        scans = scan.scan_local([shard.url for shard in shards], self.image_key, self.caption_key)
        changed = []
        for shard, scanned in zip(shards, scans, strict=True):
            if (shard.digest, shard.num_samples) == (scanned.digest, scanned.num_samples):
                shard.mtime_ns = scanned.mtime_ns
            else:
                changed.append(f"{shard.url} ({scanned.num_samples:,} samples, were {shard.num_samples:,})")
        return changed

    def _match(self, urls: Sequence[str]) -> bool:
        """Store the given URLs in the shards, matched by file name; return whether a shard has moved."""
        has_moved = not self.is_of(urls)
        name_of = shard_name if has_moved else without_secrets  # URLs in a manifest have no secrets
        by_name = {name_of(url): url for url in urls}
        names = [name_of(shard.url) for shard in self.shards]
        if len(by_name) == len(urls) and sorted(names) == sorted(by_name):
            for shard, name in zip(self.shards, names, strict=True):
                shard.url, shard.version = by_name[name], None if has_moved else shard.version
            return has_moved
        given, known = set(urls), {shard.url for shard in self.shards}
        extra, missing = sorted(given - known), sorted(known - given)
        raise ManifestError(
            f"the manifest does not match the training data: it has {len(known)} shards, {len(given)} were given"
            + (f"; not in the manifest: {_some(extra)}" if extra else "")
            + (f"; only in the manifest: {_some(missing)}" if missing else "")
            + ". Create one for these shards: openclip-ext manifest SHARDS"
        )

    def is_of(self, urls: Iterable[str]) -> bool:
        """Return whether these URLs are the manifest's shards. Passwords and tokens in the URLs are not compared."""
        return {*map(without_secrets, urls)} == {without_secrets(shard.url) for shard in self.shards}

    def report(self, numbers: Iterable[int] | None = None) -> Iterator[str]:
        """Yield one line for each shard with problems. ``numbers`` selects shards; None (default) means all shards."""
        for shard in self.shards if numbers is None else (self.shards[number] for number in numbers):
            if shard.problems:
                found: dict[str, Any] = {**shard.problems}
                texts = (text.format(found[name]) for name, text in _PROBLEM_TEXTS.items() if name in found)
                yield f"{shard.url}: " + ", ".join(texts)
            elif not shard.num_samples:
                yield f"{shard.url}: empty"


def _is_touched(shard: Shard) -> bool:
    """Return whether a local shard's modification time changed since its scan; raise ReplacedError if its size changed."""
    status = os.stat(shard.url)
    if status.st_size != shard.size:
        raise ReplacedError(
            f"the shard has {status.st_size:,} bytes, but had {shard.size or 0:,} when the manifest was made"
        )
    return status.st_mtime_ns != shard.mtime_ns


def _refuse_unusable(shards: Sequence[Shard], image_key: str, caption_key: str, storage: Storage) -> None:
    """Raise ManifestError if all samples of a shard lack an image or a caption, or if all shards are empty."""
    unusable = [
        shard
        for shard in shards
        if shard.problems.get("bad", 0) == shard.num_samples and (shard.num_samples or "error" in shard.problems)
    ]
    if unusable:
        from openclip_ext.data.shards.diagnosis import explain

        reasons = (
            f"{shard.url}: {explain(shard.url, image_key, caption_key, storage, shard.problems.get('error', ''))}"
            for shard in unusable[:_SHOWN]
        )
        raise ManifestError(
            f"{len(unusable)} of {len(shards)} shards have no usable sample, with an image ({image_key}) and a caption "
            f"({caption_key}). " + ". ".join(reasons)
        )
    if not any(shard.num_samples for shard in shards):
        names = _some([shard.url for shard in shards])
        raise ManifestError(f"the data set is empty: {len(shards)} shards without a sample, {names}")


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (" ..." if len(items) > _SHOWN else "")


def _format_ranges(indices: np.ndarray) -> str:
    """Return ascending indices as text: ``3,17,40-52``."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if len(indices) else []
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parse_ranges(text: str, num_samples: int) -> np.ndarray:
    runs = [run.partition("-") for run in text.split(",") if text]
    if wrong := [
        run for run in runs if int(run[2] or run[0]) >= num_samples
    ]:  # checked here, because np.arange of a huge range would fill the memory
        raise ValueError(f"it excludes the samples {''.join(wrong[0])[:80]}, but has only {num_samples:,} samples")
    return np.concatenate([np.empty(0, np.int64), *(np.arange(int(a), int(b or a) + 1) for a, _, b in runs)])


def _checksum(content: dict[str, Any]) -> str:
    """Return the hash of a manifest's JSON without its checksum."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
