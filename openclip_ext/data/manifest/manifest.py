"""The manifest: the number of samples in each shard, and so the index of every sample.

The index of a sample is the first index of its shard plus its position in the tar. It is dense, unique, stable, and
known before training starts, independent of the keys in the tar. The command line::

    openclip-ext manifest 'data/{00000..00099}.tar' [--output PATH]
"""

import argparse
import copy
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openclip_ext.cli.messages import for_people, say, without_secrets
from openclip_ext.data.manifest import scan
from openclip_ext.data.manifest.scan import Problems, Shard
from openclip_ext.data.shards.diagnosis import explain
from openclip_ext.data.shards.shardlist import expand_shards, refuse_repeated, shard_name
from openclip_ext.data.sources.spec import ANY_FIELD, DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY, parse_keys
from openclip_ext.data.storage import DEFAULT_STORAGE, ReplacedError, Storage, is_local
from openclip_ext.files.schema import read_as
from openclip_ext.files.writing import output_path, write_atomically

FORMAT = "openclip_ext.manifest"
# A program that knows version 1 only would train on samples that are left out.
VERSION, VERSION_WITH_LEFT_OUT = 1, 2
_SHOWN = 5
# Their indices take 8 GB.
_MAX_LEFT_OUT = 10**9
_RUN = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")


class ManifestError(ValueError):
    """The shards, or a manifest of them, would train wrongly."""

    def __init__(self, message: str) -> None:
        super().__init__(for_people(message))


@dataclass
class _ManifestFile:
    """The JSON of a manifest."""

    format: str
    version: int
    image_key: str
    caption_key: str
    num_samples: int
    shards: list[dict[str, Any]]
    offsets: str | None = None  # written by earlier versions, for a file that is no longer needed
    left_out: str = ""
    checksum: str | None = None


class Manifest:
    """Shards with their sample counts and first indices.

    Args:
        shards: The shards in the order of their indices.
        image_key, caption_key: The fields that the samples were checked for.
        left_out: ``(k,)`` int64, ascending indices of samples that are not trained on. No index changes.
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
        """Size ``n`` of the index space."""
        last = self.shards[-1]
        return last.first_index + last.num_samples

    @property
    def num_bad(self) -> int:
        """Samples known to lack their image or caption."""
        return sum(shard.problems.get("bad", 0) for shard in self.shards)

    @property
    def num_lost(self) -> int:
        """Estimate of the samples that damaged shards have lost, at least if a shard ends too soon. They have no index."""
        return sum(shard.problems.get("lost", 0) for shard in self.shards)

    @property
    def digest(self) -> str:
        """Hash of what is trained on: shard names, counts, members and left-out samples, but not where the shards lie."""
        return self._hash(_format_ranges(self.left_out))

    @property
    def index_digest(self) -> str | None:
        """As :attr:`digest`, without the left-out samples; None if a shard is remote, since its members are unknown."""
        return self._hash("") if all(shard.digest for shard in self.shards) else None

    def _hash(self, left_out: str) -> str:
        parts = [f"{shard_name(shard.url)}\0{shard.num_samples}\0{shard.digest}\n" for shard in self.shards]
        return hashlib.blake2b("".join([*parts, left_out]).encode(), digest_size=8).hexdigest()

    # ---------------------------------------------------------------- making

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
            shards: As :func:`~openclip_ext.data.shards.shardlist.expand_shards` takes them.
            image_key, caption_key: Fields of image and caption, alternatives separated by ``;``.
            sizes: Counts of remote shards by file name, instead of the files next to them.
            workers: Processes for local shards; None for one per core.
            storage: How remote files are read.
            journal: File that keeps the progress of scanning remote shards without a count; None: such shards are refused.

        Raises:
            ManifestError: A shard cannot be read, has no sample with image and caption, or no shard has any sample; or a
                remote shard has no count.
            ValueError: The specification is wrong.
        """
        urls = expand_shards(shards)
        local = [url for url in urls if is_local(url)]
        remote = [url for url in urls if not is_local(url)]
        found = dict(zip(local, scan.scan_local(local, image_key, caption_key, workers), strict=True))
        if remote:
            found |= scan.count_remote(remote, sizes, storage)
        unknown = [url for url in remote if url not in found]
        if unknown and journal is None:
            try:
                storage.reach(unknown[:1])
            except OSError as error:  # a wrong address has no counts, either
                raise ManifestError(f"cannot read shards: {error}") from error
            raise ManifestError(
                f"the number of samples is unknown for {len(unknown)} of {len(urls)} shards, among them {unknown[0]!r}: "
                "neither sizes.json nor the shard's *_stats.json (img2dataset writes them) lies next to it. Count them "
                "once with: openclip-ext manifest SHARDS --output manifest.json (it reads the headers of the tars, or "
                "takes the counts of a file that --sizes names), then train with --manifest manifest.json"
            )
        if unknown and journal is not None:
            found |= scan.scan_remote(unknown, image_key, caption_key, storage, journal)
        scanned = [found[url] for url in urls]
        _refuse_unusable(scanned, image_key, caption_key, storage)
        return cls(scanned, image_key, caption_key)

    def without(self, indices: Iterable[int]) -> "Manifest":
        """Return a manifest that leaves more samples out of training. No index changes.

        Args:
            indices: The indices of the samples, in any order.

        Raises:
            ManifestError: An index is out of range, or no sample would be left.
        """
        left_out = np.union1d(self.left_out, np.fromiter(indices, np.int64))
        if len(left_out) and not 0 <= left_out[0] <= left_out[-1] < self.num_samples:
            found = left_out[0] if left_out[0] < 0 else left_out[-1]
            raise ManifestError(f"cannot leave out sample {found}: the indices are 0 to {self.num_samples - 1:,}")
        if len(left_out) == self.num_samples:
            raise ManifestError(f"all {self.num_samples:,} samples would be left out: none is left to train on")
        changed = copy.copy(self)
        changed.left_out = left_out
        return changed

    # ---------------------------------------------------------------- files

    def save(self, path: str | os.PathLike) -> None:
        """Write the manifest as JSON, atomically; raise OSError if the folder cannot be written to."""
        path = Path(path).absolute()
        left_out = _format_ranges(self.left_out)
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION_WITH_LEFT_OUT if left_out else VERSION,
            "image_key": self.image_key,
            "caption_key": self.caption_key,
            "num_samples": self.num_samples,
        }
        content |= {"left_out": left_out} if left_out else {}
        content["shards"] = [_shard_to_json(shard, str(path.parent)) for shard in self.shards]
        content["checksum"] = _checksum(content)
        write_atomically(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Manifest":
        """Read a manifest.

        Raises:
            FileNotFoundError: There is none.
            ManifestError: The file is no manifest, one of another version, or not as it was written.
        """
        path = Path(path).absolute()
        text = path.read_bytes()
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ManifestError(f"{path} is no manifest: expected a JSON object with 'format': '{FORMAT}'")
            if content.get("version") not in (VERSION, VERSION_WITH_LEFT_OUT):
                raise ManifestError(
                    f"{path} has version {content.get('version')}, expected {VERSION} or {VERSION_WITH_LEFT_OUT}: make it "
                    "again"
                )
            if content.get("checksum", _checksum(content)) != _checksum(content):
                raise ValueError("its content does not match its checksum")
            file = read_as(_ManifestFile, content, "the manifest")
            shards = [_shard_from_json(e, str(path.parent), f"shards[{i}]") for i, e in enumerate(file.shards)]
            if sum(shard.num_samples for shard in shards) != file.num_samples or not file.num_samples:
                raise ValueError(f"num_samples is {file.num_samples}, not the sum of those of its shards, at least 1")
            left_out = _parse_ranges(file.left_out, file.num_samples)
        except ManifestError:
            raise
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is no manifest, or a damaged one: {error}") from error
        return cls(shards, file.image_key, file.caption_key, left_out)

    # ---------------------------------------------------------------- checking

    def verify(self, shards: str | Sequence[str] | None = None) -> bool:
        """Check that the manifest still describes the data.

        A local shard of the same size with another modification time is scanned again, and accepted if its members are the
        same.

        Args:
            shards: The training data, of which moved shards are found by their file names; None to check the files only.

        Returns:
            Whether paths or times were updated, so that saving the manifest again would save time.

        Raises:
            ManifestError: Shards are missing on either side, gone, or changed.
        """
        moved = shards is not None and self._match(expand_shards(shards))
        gone, changed, touched = [], [], []
        for shard in self.shards:
            if not shard.is_local:
                continue
            try:
                status = os.stat(shard.url)
            except OSError:
                gone.append(shard.url)
                continue
            if status.st_size != shard.size:
                changed.append(f"{shard.url} (size {status.st_size:,}, was {shard.size or 0:,} bytes)")
            elif status.st_mtime_ns != shard.mtime_ns:
                touched.append(shard)
        if gone:
            raise ManifestError(f"{len(gone)} of {len(self.shards)} shards of the manifest are gone: {_some(gone)}")
        if touched and not changed:
            changed = self._rescan(touched)
        if changed:
            raise ManifestError(
                f"{len(changed)} of {len(self.shards)} shards were changed after the manifest was made: "
                f"{_some(changed)}. The indices of the samples are no longer right. Make the manifest again: "
                "python -m openclip_ext.data.manifest SHARDS (and start the training afresh)"
            )
        return bool(moved or touched)

    def _rescan(self, shards: Sequence[Shard]) -> list[str]:
        """Scan shards again; return those whose members differ."""
        scans = scan.scan_local([shard.url for shard in shards], self.image_key, self.caption_key)
        changed = []
        for shard, scanned in zip(shards, scans, strict=True):
            if not _has_same_members(shard, scanned):
                changed.append(f"{shard.url} ({scanned.num_samples:,} samples, were {shard.num_samples:,})")
            shard.mtime_ns = scanned.mtime_ns
        return changed

    def _match(self, urls: Sequence[str]) -> bool:
        """Find the manifest's shards among ``urls``; returns whether some were found under another path."""
        refuse_repeated(urls)
        if self.is_of(urls):
            given_as = {without_secrets(url): url for url in urls}  # a manifest does not keep secrets
            for shard in self.shards:
                shard.url = given_as[without_secrets(shard.url)]
            return False
        given, known = set(urls), {shard.url for shard in self.shards}
        by_name = {shard_name(url): url for url in urls}
        names = [shard_name(shard.url) for shard in self.shards]
        if len(by_name) == len(urls) and len(set(names)) == len(names) and set(names) == set(by_name):
            for shard, name in zip(self.shards, names, strict=True):
                shard.url = by_name[name]
            return True
        extra, missing = sorted(given - known), sorted(known - given)
        raise ManifestError(
            f"the manifest does not match the training data: it has {len(known)} shards, {len(given)} were given"
            + (f"; not in the manifest: {_some(extra)}" if extra else "")
            + (f"; only in the manifest: {_some(missing)}" if missing else "")
            + ". Make one for these shards: python -m openclip_ext.data.manifest SHARDS"
        )

    def is_of(self, urls: Iterable[str]) -> bool:
        """Return whether these are its shards, whatever secrets (passwords, tokens) their URLs have."""
        return {*map(without_secrets, urls)} == {without_secrets(shard.url) for shard in self.shards}

    def check_unchanged(self, shard_number: int) -> None:
        """Check a local shard as :meth:`verify` does, before it is read; raise ReplacedError, or OSError if it is gone."""
        shard = self.shards[shard_number]
        status = os.stat(shard.url)
        if status.st_size != shard.size:
            raise ReplacedError(f"it has {status.st_size:,} bytes, {shard.size or 0:,} when the manifest was made")
        if status.st_mtime_ns != shard.mtime_ns:
            found = scan.scan_shard(shard.url, self.image_key, self.caption_key)
            if not _has_same_members(shard, found):
                raise ReplacedError("it was replaced by a file with other samples after the manifest was made")
            shard.mtime_ns = found.mtime_ns

    def report(self) -> Iterator[str]:
        """One line for each shard with problems."""
        for shard in self.shards:
            if shard.problems:
                yield f"{shard.url}: " + ", ".join(_describe(shard.problems))
            elif not shard.num_samples:
                yield f"{shard.url}: empty"


def _shard_to_json(shard: Shard, folder: str) -> dict[str, Any]:
    """Return the entry of a shard in a manifest in ``folder``; local shards below the folder have relative names."""
    entry = {"name": without_secrets(shard.url), **vars(shard)}
    if shard.is_local and os.path.commonpath([folder, shard.url]) == folder:
        entry["name"] = Path(os.path.relpath(shard.url, folder)).as_posix()
    return {name: value for name, value in entry.items() if name != "url" and value not in (None, {})}


def _shard_from_json(entry: dict[str, Any], folder: str, where: str) -> Shard:
    name = read_as(str, entry.pop("name", None), f"{where}.name")
    entry.pop("seekable", None)  # written by earlier versions
    url = os.path.normpath(os.path.join(folder, name)) if is_local(name) else name
    return read_as(Shard, entry | {"url": url}, where)


def _has_same_members(first: Shard, second: Shard) -> bool:
    return (first.digest, first.num_samples) == (second.digest, second.num_samples)


def _describe(problems: Problems) -> Iterator[str]:
    if "without_image" in problems:
        yield f"{problems['without_image']:,} samples without image"
    if "without_caption" in problems:
        yield f"{problems['without_caption']:,} samples without caption"
    if "duplicate_keys" in problems:
        yield f"{problems['duplicate_keys']:,} keys that occur again"
    if "bad_positions" in problems:
        yield f"at positions {problems['bad_positions']}"
    if "gaps" in problems:
        yield "damaged: no readable header in the bytes " + ", ".join(f"{a:,} to {b:,}" for a, b in problems["gaps"])
    if "lost" in problems:
        # What was behind the end is unknown.
        yield f"{'at least' if 'error' in problems else 'about'} {problems['lost']:,} samples lost"
    if "error" in problems:
        yield f"corrupt or truncated, how much is missing is unknown: {problems['error']}"


def _refuse_unusable(shards: Sequence[Shard], image_key: str, caption_key: str, storage: Storage) -> None:
    unusable = [
        shard for shard in shards if "error" in shard.problems and shard.problems.get("bad", 0) == shard.num_samples
    ]
    if unusable:
        keys = parse_keys(image_key, allow_json=False), parse_keys(caption_key, allow_json=True)
        rest = len(unusable) - _SHOWN
        raise ManifestError(
            f"{len(unusable)} of {len(shards)} shards have no sample with both an image ({image_key}) and a caption "
            f"({caption_key}). "
            + " ".join(
                f"{shard.url}: {explain(shard.url, *keys, storage, shard.problems['error'])}."
                for shard in unusable[:_SHOWN]
            )
            + (f" And {rest} more." if rest > 0 else "")
        )
    if not any(shard.num_samples for shard in shards):
        names = _some([shard.url for shard in shards])
        raise ManifestError(f"the data set is empty: {len(shards)} shards without a single sample, {names}")


def _some(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _format_ranges(indices: np.ndarray) -> str:
    """Ascending indices as text: ``3,17,40-52``."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if len(indices) else []
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parse_ranges(text: str, num_samples: int) -> np.ndarray:
    """Return the indices, ``int64``; ValueError if they do not ascend from 0 to ``num_samples - 1``."""
    parts = [np.empty(0, np.int64)]
    end = left_out = 0
    for run in filter(None, text.split(",")):
        match = _RUN.fullmatch(run)
        bounds = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if not end <= bounds[0] <= bounds[1] < num_samples:
            raise ValueError(f"it leaves out {run[:80]!r}: expected ascending indices from 0 to {num_samples - 1:,}")
        left_out += bounds[1] - bounds[0] + 1
        if left_out > _MAX_LEFT_OUT:
            raise ValueError(f"it leaves out more than {_MAX_LEFT_OUT:,} samples")
        end = bounds[1] + 1
        parts.append(np.arange(bounds[0], end))
    indices = np.concatenate(parts)
    if len(indices) == num_samples:
        raise ValueError("it leaves out all samples")
    return indices


def _checksum(content: dict[str, Any]) -> str:
    """Hash of all of a manifest's JSON but the checksum itself."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=8).hexdigest()


# -------------------------------------------------------------------- finding one for a run


def find_or_create_manifest(
    train_data: str | Sequence[str],
    manifest: str | os.PathLike | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    storage: Storage = DEFAULT_STORAGE,
) -> Manifest:
    """Return the manifest of a training run: the given one, the one next to the shards, or a new one.

    With several processes rank 0 looks and scans, and the others get the result. A new one is written to the first of
    :func:`_places` that is free. One that no longer fits its shards is an error, because after a new scan the indices in a
    checkpoint could mean other samples. For the arguments, see :meth:`Manifest.scan`.

    Raises:
        ManifestError: On every rank, with the reason.
    """
    # The manifest's own command line does without torch.
    from openclip_ext import distributed

    found: Manifest | None = None
    failure: Exception | None = None
    if distributed.is_master():
        try:
            urls = expand_shards(train_data)
            if manifest is None:
                found = _find_or_create(urls, image_key, caption_key, storage)
            else:
                found = Manifest.load(manifest)
                found.verify(urls)
            _log_report(found)
        except Exception as error:
            failure = error
    found, message = distributed.broadcast_object((found, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise ManifestError(message)
    return found


def _find_or_create(urls: Sequence[str], image_key: str, caption_key: str, storage: Storage) -> Manifest:
    free = []
    for path in _places(urls, image_key, caption_key):
        try:
            manifest = _load_if_of(path, urls, image_key, caption_key)
        except FileNotFoundError:
            free.append(path)
            continue
        if manifest is not None:
            if manifest.verify(urls):
                _save_somewhere(manifest, [path])
            logging.info(f"Using the manifest {path}: {manifest.num_samples:,} samples in {len(urls):,} shards.")
            return manifest
    logging.info(f"No manifest yet: counting the samples of {len(urls):,} shards.")
    manifest = Manifest.scan(urls, image_key, caption_key, storage=storage)
    _save_somewhere(manifest, free)
    return manifest


def _places(urls: Sequence[str], image_key: str, caption_key: str) -> list[Path]:
    """Return the paths that a manifest of these shards may have, in order of preference; the last is in the user's cache."""
    identity = "\n".join([image_key, caption_key, *sorted(map(without_secrets, urls))])
    named = f"manifest-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}.json"
    home = os.path.expanduser("~")  # "~" for a user without one, as in some containers
    kept = os.path.join(home, ".cache") if home != "~" else tempfile.gettempdir()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or kept) / "openclip_ext" / named
    if not all(map(is_local, urls)):
        return [cache]
    folder = Path(os.path.commonpath([os.path.dirname(url) for url in urls]))
    return [folder / "manifest.json", folder / named, cache]


def _load_if_of(path: Path, urls: Sequence[str], image_key: str, caption_key: str) -> Manifest | None:
    """Return the manifest at ``path`` if it has exactly these shards and keys, else None; raise FileNotFoundError.

    If any field will do, it is that of any keys: the indices are the same.
    """
    try:
        manifest = Manifest.load(path)
    except FileNotFoundError:
        raise
    except (OSError, ManifestError) as error:
        logging.warning(f"{error}. It stays as it is.")
        return None
    same_keys = (manifest.image_key, manifest.caption_key) == (image_key, caption_key)
    return manifest if manifest.is_of(urls) and (same_keys or image_key == ANY_FIELD) else None


def _save_somewhere(manifest: Manifest, places: Sequence[Path]) -> None:
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.save(path)
        except OSError as error:
            logging.debug(f"Cannot write the manifest {path}: {error}")
            continue
        logging.info(f"Wrote the manifest {path}.")
        return
    logging.warning("The manifest could not be written anywhere: the shards will be scanned again next time.")


def _log_report(manifest: Manifest) -> None:
    report = list(manifest.report())
    for line in report[:20]:
        logging.warning(line)
    if report[20:]:
        logging.warning(f"... and {len(report) - 20} more shards with problems")
    if len(manifest.left_out):
        logging.info(
            f"The manifest leaves out {len(manifest.left_out):,} of {manifest.num_samples:,} samples; no index changes."
        )


# -------------------------------------------------------------------- command line


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="openclip-ext manifest", description="Count the samples of shards, and so fix the index of every sample."
    )
    parser.add_argument(
        "shards", nargs="+", help="paths, globs, brace notation, pipe: commands or URLs; also joined by ::"
    )
    parser.add_argument(
        "--output",
        type=output_path,
        help="where to write (default: manifest.json in the shards' common folder, manifest-HASH.json if that name is "
        "taken by one of other shards)",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument(
        "--image-key", default=DEFAULT_IMAGE_KEY, help="fields that hold the image (default: %(default)s)"
    )
    parser.add_argument(
        "--caption-key",
        default=DEFAULT_CAPTION_KEY,
        help="fields that hold the caption, or json:ENTRY (default: %(default)s)",
    )
    parser.add_argument("--sizes", help='JSON file {"00000.tar": count, ...} for remote shards')
    parser.add_argument(
        "--remote-patience",
        type=float,
        default=Storage.patience,
        help="seconds for which a remote file that fails is asked for again (default: %(default)g)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parse_arguments(argv)
    try:
        sizes = read_as(dict[str, int], json.loads(Path(args.sizes).read_bytes()), args.sizes) if args.sizes else None
        urls = expand_shards(args.shards)
        output = Path(args.output) if args.output else _place_beside(urls, args.image_key, args.caption_key)
        _refuse_other_file(output)
        journal, storage = output.with_name(f".{output.name}.journal"), Storage(args.remote_patience)
        manifest = Manifest.scan(urls, args.image_key, args.caption_key, sizes, args.workers, storage, journal)
        manifest.save(output)
        journal.unlink(missing_ok=True)
    except (OSError, ValueError, RecursionError) as error:
        say(f"error: {error}", sys.stderr)
        return 1
    for line in manifest.report():
        say(line)
    n, bad, lost = manifest.num_samples, manifest.num_bad, ""
    if manifest.num_lost:
        ends_too_soon = any("error" in shard.problems for shard in manifest.shards)
        lost = f", {'at least' if ends_too_soon else 'about'} {manifest.num_lost:,} more lost in damaged shards"
    say(f"{n:,} samples in {len(urls):,} shards, {bad:,} ({bad / n:.2%}) without image or caption{lost}: {output}")
    return 0


def _place_beside(urls: Sequence[str], image_key: str, caption_key: str) -> Path:
    """Return the path of a new manifest beside its shards, where training finds it; raise ValueError if there is none."""
    for path in _places(urls, image_key, caption_key)[:-1]:
        try:
            if _load_if_of(path, urls, image_key, caption_key) is not None:
                return path
        except FileNotFoundError:
            return path
    raise ValueError("the shards are remote, or both names beside them are taken: say with --output where to write")


def _refuse_other_file(path: Path) -> None:
    """Raise ValueError rather than overwrite a file that is no manifest, such as a shard."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if FORMAT.encode() in file.read(4096):  # a damaged one may be replaced
                return
    raise ValueError(f"{path} is there and no manifest: give another --output")
