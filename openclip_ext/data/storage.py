"""Open shards and the files next to them: local files, remote files (through fsspec), and the output of commands.

Every read error is an OSError.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

from openclip_ext.cli.messages import for_people, get_logger, without_secrets
from openclip_ext.data.remote import (
    BUFFER,
    HEADER_BUFFER,
    PIPE,
    RemoteFile,
    ReplacedError,
    file_system,
    is_final,
    persist,
    place_of,
)
from openclip_ext.files.writing import write_atomically

logger = get_logger(__name__)


def is_local(url: str) -> bool:
    """Return whether a shard is a path or ``file:`` URL. Other URLs and ``pipe:`` commands are remote."""
    return ":" not in url or len(urlparse(url).scheme) <= 1 or url.startswith("file:")


def local_path(url: str) -> str:
    """Return the absolute path of a local shard."""
    path = re.sub(r"^file:(//)?", "", url)
    return os.path.abspath(os.path.expanduser(path))


def open_local(path: str | os.PathLike[str], buffer: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a file to read bytes. A named pipe raises OSError, because opening it would block."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(f"{path} is not a regular file (it is a folder, named pipe or device)")
    try:
        return io.BufferedReader(io.FileIO(path), buffer)
    except ValueError as error:
        raise OSError(f"{path!r} is not a path: {error}") from error  # it contains a null byte


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(for_people(f"cannot read shards: {error}")) from error


def list_remote(pattern: str) -> list[str]:
    """Return the sorted URLs of the files that match a pattern (``*``, ``?`` or ``[...]``); raise ValueError if none match."""

    def find() -> list[str]:
        system, path = file_system(pattern)
        return sorted(map(system.unstrip_protocol, system.glob(path)))

    with _as_value_error():
        if pattern.startswith(("http:", "https:")):
            raise OSError(
                f"{pattern}: a web server does not list its files: name them with braces, {{00000..00099}}.tar"
            )
        urls = persist(pattern, DEFAULT_STORAGE.patience, partial(is_final, pattern), find)
        if not urls:
            raise OSError(f"no file matches {pattern!r}: correct the pattern")
    return urls


@dataclass(frozen=True)
class Storage:
    """Settings and methods for opening files that may be remote.

    Attributes:
        patience: Seconds for which failed reads of a remote file are retried, with growing waits.
        cache_dir: Folder that keeps remote shards for all processes of the node, or None. Shards without a version (ETag,
            date) and the output of ``pipe:`` commands are not kept.
        cache_size: Maximum size of the folder in GiB. The least recently opened shards are removed first.
    """

    patience: float = 300.0
    cache_dir: str | None = None
    cache_size: float = 100.0

    def open(self, url: str, headers_only: bool = False, version: str | None = None) -> io.BufferedReader:
        """Open a shard or another file to read bytes from its beginning.

        Args:
            url: A path, ``pipe:COMMAND`` (run by the shell, as in OpenCLIP), or a URL that fsspec supports (``https://``,
                ``s3://``, ``gs://``, ``hf://``, ...). The returned file can seek if the storage supports it.
            headers_only: Whether only the headers of a tar will be read. If so, read small blocks, and do not prefetch or use
                the cache.
            version: Expected :attr:`RemoteFile.version`. None (default) accepts every version.

        Raises:
            ReplacedError: The remote file has another version.
            OSError: Opening or reading still fails after ``patience`` seconds, or a retry cannot help (see ``is_final``).
        """
        if is_local(url):
            return open_local(local_path(url), HEADER_BUFFER if headers_only else BUFFER)
        file = RemoteFile(url, self.patience)
        if version and file.version != version:
            raise ReplacedError(for_people(f"{url}: expected version {version}, found {file.version}"))
        if self.cache_dir is not None and not headers_only and file.version:
            return self._open_copy(Path(self.cache_dir), file)
        return file.open(headers_only)

    def read(self, url: str) -> bytes:
        """Return the content of a small file. For ``url`` and errors, see :meth:`open`."""
        with Storage(self.patience).open(url) as file:
            return file.read()

    def reach(self, urls: Iterable[str]) -> None:
        """Test whether one remote file of each server, bucket or program can be read; if not, raise ValueError."""
        with _as_value_error():
            for url in {place_of(url): url for url in urls if not is_local(url)}.values():
                file = RemoteFile(url, self.patience)
                if url.startswith(PIPE):
                    with file.open(headers_only=True) as output:
                        output.peek(1)

    def check_cache(self, url: str, multiple: float, in_use: str) -> None:
        """Warn if the cache cannot keep copies; raise ValueError if it is too small for the shards in use at the same time.

        ``in_use`` describes the shards in use for the message. Their total size is ``multiple`` times the size of ``url``.
        """
        with _as_value_error():
            file = RemoteFile(url, self.patience)
        if not file.version:
            logger.warning(
                f"--cache-dir keeps no copy of {url}, because the server reports no version (length, ETag, date)."
            )
        need = multiple * (file.size or 0) / 2**30
        if need > self.cache_size:
            raise ValueError(
                f"--cache-size {self.cache_size:g} GiB is too small for the {need:.2g} GiB of {in_use}: increase it, lower "
                "--workers, or remove --cache-dir"
            )

    def _open_copy(self, folder: Path, file: RemoteFile) -> io.BufferedReader:
        """Open the local copy of a remote file. The first process makes the copy; the other processes wait for it."""
        from filelock import FileLock

        name = without_secrets(file.url)
        version = hashlib.blake2b(f"{name}\0{file.version}".encode(), digest_size=8).hexdigest()
        path = folder / f"{version}-{re.sub(r'[^-.a-zA-Z0-9]', '_', name)[-60:]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                is_new = not path.exists()
                if is_new:
                    with file.open() as original:
                        write_atomically(path, lambda copy: shutil.copyfileobj(original, copy, BUFFER))
                now = time.time_ns()  # the kernel's own time stamps are too coarse to order the copies
                os.utime(path, ns=(now, now))
                copy = open_local(path, BUFFER)
            if is_new:
                with FileLock(folder / ".lock"):
                    self._remove_oldest(folder)
        except OSError as error:
            if error.errno is None:  # the error comes from the remote file, not from the cache folder
                raise
            logger.warning(f"--cache-dir {folder} fails ({error}): {file.url} is read without a copy.")
            return file.open()
        return copy

    def _remove_oldest(self, folder: Path) -> None:
        """Remove the oldest copies, including unfinished copies of killed runs, until the folder has at most ``cache_size``.

        A locked copy stays, because a process is writing or opening it. An open copy can be read even after its removal.
        """
        from filelock import FileLock, Timeout

        found = []
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may rename or remove it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.cache_size * 2**30
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            if path.name.endswith(".lock"):  # the suffix of ".lock" is empty
                continue
            # The unfinished copy of NAME is called ``.NAME.RANDOM.partial``.
            name = path.name[1:].rsplit(".", 2)[0] if path.suffix == ".partial" else path.name
            lock = folder / f"{name}.lock"
            with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)  # a process that waits for the removed lock makes a complete copy, too
                excess -= size


DEFAULT_STORAGE = Storage()
