"""Atomic writing of files, checks of output paths, and locks on folders."""

import argparse
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError without a file name, because the error of a full disk has none.

    On a full disk, ``torch.save`` raises RuntimeError while it handles the OSError, which is raised instead.
    """
    try:
        yield
    except (OSError, RuntimeError) as raised:
        error = raised.__context__ if isinstance(raised, RuntimeError) else raised
        if not isinstance(error, OSError):
            raise
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise error from None


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write or replace a file. ``write`` fills a hidden ``.partial`` file, which is flushed to disk and then renamed.

    Raises:
        OSError: The folder is not writable, or the disk is full. The error names the file. An existing file stays unchanged.
    """
    if path.exists() and not path.is_file():  # a device or pipe, such as /dev/stdout, must not be replaced
        with naming(path), open(path, "wb") as file:
            write(file)
        return
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    opened = open(unfinished, "xb")  # noqa: SIM115  tempfile is not used, because its files ignore the umask
    try:
        with naming(path), opened as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write or replace a UTF-8 text file with :func:`write_atomically`."""
    content = text.encode(errors="backslashreplace")  # a file name may not be UTF-8
    write_atomically(path, lambda file: file.write(content))


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:")


def check_output_path(path: str | None, fix: str = "Give a local path, and copy the output yourself") -> None:
    """Raise ValueError if an output path is empty, is a URL, or starts with ``~/``. None is accepted.

    A URL would create a local folder such as ``s3:``. The shell does not replace ``~`` in ``--output=~/x``.
    """
    if path is not None and _URL.match(path):
        raise ValueError(f"{path} is a URL: expected a local path. {fix}")
    if path is not None and path.startswith("~/"):
        raise ValueError(f"{path}: the shell did not replace ~. Write $HOME{path[1:]}")
    if path == "":
        raise ValueError("the path is empty: remove the flag, or set the shell variable that it contains")


def output_path(text: str) -> Path:
    """Parse the path of a file or folder to write."""
    try:
        check_output_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


@contextmanager
def file_lock(folder: Path, name: str = ".lock", timeout: float = 0) -> Iterator[None]:
    """Create a folder, and lock it inside the ``with`` block.

    Args:
        name: Name of the lock file in the folder. The file is not deleted. Locks with different names are independent.
        timeout: Seconds to wait for another process to release the lock. -1 means no limit.

    Raises:
        ValueError: Another process holds the lock.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / name, timeout=timeout):
            yield
    except Timeout:
        raise ValueError(f"another process writes into {folder}: wait until it ends, or use another --output") from None
