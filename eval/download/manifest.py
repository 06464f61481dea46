"""``checksums.json``: which files a data set consists of, so that it can be checked without a network."""

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

MANIFEST_NAME = "checksums.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    sha256: str


def describe_file(path: Path) -> FileRecord:
    """Read a file once and say what it is."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())


@dataclass
class Manifest:
    """What was fetched into one data set folder.

    Attributes:
        folder: the data set's folder.
        repository: hub repository the files come from.
        revision: its commit.
        files: path relative to the folder -> what it must be.
        complete: whether every file of the data set is recorded.
    """

    folder: Path
    repository: str = ""
    revision: str = ""
    files: dict[str, FileRecord] = field(default_factory=dict)
    complete: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

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
            return cls(folder, files=files, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a checksum list ({error}); delete it and download again") from error

    def save(self) -> None:
        """Write the manifest; a reader sees the old one or the new one, never a part."""
        values = {
            "repository": self.repository,
            "revision": self.revision,
            "complete": self.complete,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        path = self.folder / MANIFEST_NAME
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def record(self, name: str, record: FileRecord) -> None:
        """Add a finished file and save, from any thread."""
        with self._lock:
            self.files[name] = record
            self.save()

    def has(self, name: str, size: int) -> bool:
        """Whether a file was recorded and still has its size (its content is ``--verify``'s business)."""
        record = self.files.get(name)
        path = self.folder / name
        return record is not None and record.size == size and path.is_file() and path.stat().st_size == size

    def is_complete(self) -> bool:
        """Whether the data set was fetched completely and every file is still there with its size."""
        return self.complete and all(self.has(name, record.size) for name, record in self.files.items())

    def problems(self) -> list[str]:
        """Files that are missing or are not what was fetched; reads every byte."""
        found = []
        for name, expected in sorted(self.files.items()):
            path = self.folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif (actual := describe_file(path)).size != expected.size:
                found.append(f"{name} has {actual.size:,} bytes, not {expected.size:,}")
            elif actual.sha256 != expected.sha256:
                found.append(f"{name} has SHA-256 {actual.sha256[:12]}…, not {expected.sha256[:12]}…")
        return found
