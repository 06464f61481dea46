"""Write the folder that :class:`openclip_ext.data.reference.EmbeddingStore` reads.

Ranks record finished ranges of samples in progress files, so a killed process loses little work. When all ranges are
finished, ``embeddings.json`` is written.
"""

import contextlib
import csv
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.data.reference import ABOUT, IMAGES, TEXTS, EmbeddingStore
from openclip_ext.files import json_lines
from openclip_ext.files.writing import file_lock, write_atomically, write_text

BEGUN, PROGRESS, NAMES = "begun.json", "progress-{}.jsonl", "names-{}.jsonl"
# File with the names of the rows, and its columns. Unreadable samples have no line.
KEYS, KEY_COLUMNS = "keys.csv", ("index", "shard", "key", "caption")
# Keys of `about` on which the embeddings depend, in the order of the checks. The weights' path is excluded: it may change.
_IDENTITY = ("model", "weights", "config", "preprocess", "precision", "samples", "data", "image_key", "caption_key")


class Done(NamedTuple):
    """A finished range of samples. ``bad`` is the number of unreadable samples in the range."""

    begin: int
    end: int
    bad: int


@dataclass(frozen=True)
class EmbeddingFolder:
    """A folder of embeddings that is being written.

    Attributes:
        path: The folder.
        about: The content of ``embeddings.json``.
        flag: The flag that set the folder, for messages.
    """

    path: Path
    about: dict[str, Any]
    flag: str = "--output"

    @contextlib.contextmanager
    def begun(self) -> Iterator[list[Done] | None]:
        """Create the files on rank 0, or check an earlier launch's files. The folder is locked inside the ``with`` block.

        Yields the finished ranges of all ranks; None means that the folder is complete. Raise UsageError if another program
        uses the folder, if the folder has different embeddings or a corrupt file, or if the disk is too small. Collective: all
        ranks call it.
        """
        with contextlib.ExitStack() as stack:
            yield distributed.on_rank0(lambda: self._begin(stack))

    def write(self, batches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> int:
        """Write batches of ascending indices ``(k,)`` and rows ``(k, d)`` of images and texts; return the number of samples.

        The tables are not memory-mapped. In a mapped file, a full disk would kill the process, and two nodes would overwrite
        each other's rows in the same memory page.
        """
        count, paths = 0, [self.path / name for name in (IMAGES, TEXTS)]
        with paths[0].open("r+b") as images, paths[1].open("r+b") as texts:
            first_rows = [np.load(path, mmap_mode="r").offset for path in paths]
            for index, *tables in batches:
                breaks = np.flatnonzero(np.diff(index) != 1) + 1
                for file, first_row, rows in zip((images, texts), first_rows, tables, strict=True):
                    for positions, part in zip(np.split(index, breaks), np.split(rows, breaks), strict=True):
                        file.seek(first_row + int(positions[0]) * rows[0].nbytes)
                        file.write(part.tobytes())
                count += len(index)
            for file in (images, texts):
                file.flush()
                os.fsync(file.fileno())
        return count

    def write_names(self, begin: int, names: Iterable[dict[str, Any]]) -> None:
        """Write the names (of :data:`KEY_COLUMNS`, in ascending order) of the range of samples that starts at ``begin``."""
        text = "".join(f"{json_lines.dumps(line)}\n" for line in names)
        write_text(self.path / NAMES.format(begin), text)

    def note(self, done: Done) -> None:
        """Append a range, whose embeddings are on disk, to this rank's progress file."""
        with (self.path / PROGRESS.format(distributed.rank())).open("a", encoding="utf-8") as file:
            # The text starts with a line break, because a killed process may have left half a line.
            file.write("\n" + json.dumps(done._asdict()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, bad: int) -> None:
        """Write ``keys.csv`` and ``embeddings.json``, and remove the progress files; only rank 0 calls it."""
        write_atomically(self.path / KEYS, self._write_keys)
        content = json.dumps(self.about | {"unreadable": bad}, indent=2) + "\n"
        write_text(self.path / ABOUT, content)
        self._remove_progress()

    def _write_keys(self, file: IO[bytes]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        writer = csv.DictWriter(text, KEY_COLUMNS)
        writer.writeheader()
        # The files of an earlier launch and of this one may cover the same range.
        ranges = sorted(self.path.glob(NAMES.format("*")), key=lambda path: int(path.stem.rpartition("-")[2]))
        last = -1
        for path in ranges:
            for line in json_lines.read(path):
                if line["index"] > last:
                    writer.writerow(line)
                    last = line["index"]
        text.flush()
        text.detach()

    def _begin(self, stack: contextlib.ExitStack) -> list[Done] | None:
        try:
            stack.enter_context(file_lock(self.path))
            if (self.path / ABOUT).is_file():
                self._refuse_other(EmbeddingStore.open(self.path).about)
                self._remove_progress()
                return None
            return self._continue()
        except UsageError:
            raise
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{self.flag} {self.path}: {error}") from error

    def _continue(self) -> list[Done]:
        files = [self.path / name for name in (IMAGES, TEXTS)]
        if (self.path / BEGUN).is_file():
            self._refuse_other(json.loads((self.path / BEGUN).read_text(encoding="utf-8")))
        elif taken := [path for path in files if path.exists()]:
            raise UsageError(f"{taken[0]} exists and belongs to another program: give another {self.flag}")
        samples, width = self.about["samples"], self.about["width"]
        written = sum(path.stat().st_blocks * 512 for path in files if path.exists())
        missing, free = 2 * 2 * samples * width - written, shutil.disk_usage(self.path).free
        if missing > free:
            raise UsageError(
                f"{self.flag} {self.path}: {samples:,} samples of width {width} need {-(-missing // 2**20):,} MiB, but only "
                f"{free // 2**20:,} MiB are free. Give a folder on a larger disk"
            )
        write_text(self.path / BEGUN, json.dumps(self.about))
        done = [Done(**line) for path in self._progress() for line in json_lines.read(path)]
        for path in files:
            if not done:
                np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(samples, width)).flush()
            try:
                np.load(path, mmap_mode="r")
            except (OSError, ValueError):
                fix = "Remove the folder and start the same command again"
                raise UsageError(f"{path}: missing or truncated. {fix}") from None
        return done

    def _refuse_other(self, found: dict[str, Any]) -> None:
        for key in _IDENTITY:
            wanted = self.about.get(key)  # tables have no image_key
            if found.get(key) != wanted:
                raise UsageError(
                    f"{self.flag} {self.path} has different embeddings: their {key} is {found.get(key)}, this command's is "
                    f"{wanted}. Repeat the original command, or give another folder"
                )

    def _progress(self) -> list[Path]:
        return sorted(self.path.glob(PROGRESS.format("*")))

    def _remove_progress(self) -> None:
        for path in (self.path / BEGUN, *self._progress(), *self.path.glob(NAMES.format("*"))):
            path.unlink(missing_ok=True)
