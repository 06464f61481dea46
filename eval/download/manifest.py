"""``checksums.json``: the files that a data set consists of, so that it can be checked without a network."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_NAME = "checksums.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    sha256: str


def describe_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file; reads all of it."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The files of a completely fetched data set.

    Attributes:
        repository: hub repository the files come from.
        revision: its commit.
        files: path relative to the data set's folder -> what it must be.
    """

    repository: str
    revision: str
    files: dict[str, FileRecord]

    @classmethod
    def of(cls, repository: str, revision: str, folder: Path, paths: Iterable[str]) -> "Manifest":
        """Describes files as they are now; ``paths`` are relative to ``folder``."""
        return cls(repository, revision, {path: describe_file(folder / path) for path in sorted(paths)})

    @classmethod
    def load(cls, folder: Path) -> "Manifest | None":
        """The folder's manifest, None without one.

        Raises:
            ValueError: if the file is there and unreadable.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            return cls(files=files, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a checksum list ({error}); delete it and download again") from error

    def save(self, folder: Path) -> None:
        """Write the manifest; a reader sees the old one or the new one, never a part."""
        path = folder / MANIFEST_NAME
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def is_complete(self, folder: Path) -> bool:
        """Whether every file is there with its size; ``--verify`` compares the contents."""
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == record.size
            for name, record in self.files.items()
        )

    def problems(self, folder: Path) -> list[str]:
        """Files that are missing or are not what was fetched; reads every byte."""
        found = []
        for name, expected in self.files.items():
            path = folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif (actual := describe_file(path)).size != expected.size:
                found.append(f"{name} has {actual.size:,} bytes, not {expected.size:,}")
            elif actual.sha256 != expected.sha256:
                found.append(f"{name} has SHA-256 {actual.sha256[:12]}…, not {expected.sha256[:12]}…")
        return found
