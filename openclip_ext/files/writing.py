"""Writing files so that nobody ever sees half of one."""

import argparse
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file under a temporary name, and rename it when it is complete and on the disk.

    Args:
        path: The file; one of that name is replaced. The temporary one is hidden and ends with ``.partial``.
        write: Writes the content to an open file.

    Raises:
        OSError: The folder cannot be written to, or the disk is full. The file is then as it was.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with open(unfinished, "xb") as file:  # not tempfile, whose files ignore the umask
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:")


def refuse_url(path: str | None, fix: str = "Give a local one, and copy it yourself") -> None:
    """Raise ValueError if an output path is a URL, of which a local folder named ``s3:`` would be made."""
    if path is not None and _URL.match(path):
        raise ValueError(f"{path} is a URL: expected a local path. {fix}")


def output_path(text: str) -> Path:
    """Parse an argument of a command line that names a file or folder to write."""
    try:
        refuse_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


@contextmanager
def held(folder: Path, name: str = ".lock", timeout: float = 0) -> Iterator[None]:
    """Make a folder and keep other processes out of it until the end of the context.

    Args:
        folder: what is locked; the lock goes with the process, the file stays.
        name: the lock's file in the folder, for a lock on less than the whole folder.
        timeout: seconds to wait for another process; -1 waits until it has finished.

    Raises:
        ValueError: Another process holds it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / name, timeout=timeout):
            yield
    except Timeout:
        raise ValueError(
            f"another process writes into {folder}: wait until it ends, or give another --output"
        ) from None
