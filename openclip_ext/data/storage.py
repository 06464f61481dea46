"""Open shards and the files next to them: local files, the output of commands, and all files that fsspec reads.

All read errors are OSErrors.
"""

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

from openclip_ext.cli.messages import for_people, without_secrets
from openclip_ext.data.remote import BUFFER, HEADER_BUFFER, PIPE, RemoteFile, file_system, is_final, persist, place_of
from openclip_ext.files.writing import write_atomically

_MAX_FILE = 1 << 26  # bytes of a file of counts; a server may send without end


def is_local(url: str) -> bool:
    """Return whether a shard is a file of this machine, and no ``pipe:`` command or URL."""
    return ":" not in url or len(urlparse(url).scheme) <= 1 or url.startswith("file:")


def local_path(url: str) -> str:
    """Return the absolute path of a local shard."""
    path = re.sub(r"^file:(//)?", "", url)
    return os.path.abspath(os.path.expanduser(path))


def open_local(path: str | os.PathLike[str], buffer: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a file to read bytes; OSError also for a named pipe, which would block."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(f"{path} is no regular file (a folder, named pipe or device)")
    return io.BufferedReader(io.FileIO(path), buffer)


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(for_people(f"cannot read shards: {error}")) from error


def list_remote(pattern: str) -> list[str]:
    """Return the URLs of the files that match a pattern with ``*``, ``?`` or ``[...]``, in order; ValueError if none."""

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
            raise OSError(f"no file matches {pattern!r}")
    return urls


@dataclass(frozen=True)
class Storage:
    """How to open files that may be remote.

    Attributes:
        patience: Seconds for which a failing remote file is retried, with growing waits.
        cache_dir: Folder that keeps remote shards for all processes of the node, or None. Shards without a version (ETag,
            date) and ``pipe:`` commands are not kept.
        cache_size: GiB of the folder. The least recently opened shards are removed.
    """

    patience: float = 300.0
    cache_dir: str | None = None
    cache_size: float = 100.0

    def open(self, url: str, headers_only: bool = False) -> io.BufferedReader:
        """Open a shard or another file to read bytes from its beginning.

        Args:
            url: A path, ``pipe:COMMAND`` (run by the shell, as in OpenCLIP), or a URL that fsspec knows (``https://``,
                ``s3://``, ``gs://``, ``hf://``, ...). The result can seek if the storage can.
            headers_only: Prefetch little and keep nothing, because most of a tar will be skipped.

        Raises:
            OSError: Opening, or reading later, fails for longer than the patience.
        """
        if is_local(url):
            return open_local(local_path(url), HEADER_BUFFER if headers_only else BUFFER)
        file = RemoteFile(url, self.patience)
        if self.cache_dir is not None and not headers_only and file.version:
            return self._open_copy(Path(self.cache_dir), file)
        return file.open(headers_only)

    def read(self, url: str) -> bytes:
        """Return the content of a small file, see :meth:`open`."""
        with Storage(self.patience).open(url) as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise OSError(for_people(f"{url}: expected at most {_MAX_FILE:,} bytes, found more"))
        return content

    def reach(self, urls: Iterable[str]) -> None:
        """Check one remote file of each place; ValueError if the place cannot be reached, or the file cannot be read."""
        with _as_value_error():
            for url in {place_of(url): url for url in urls if not is_local(url)}.values():
                file = RemoteFile(url, self.patience)
                if url.startswith(PIPE):
                    with file.open(headers_only=True) as output:
                        output.peek(1)

    def check_cache(self, url: str, multiple: float, in_use: str) -> None:
        """Check that the cache keeps copies, and has room for the shards ``in_use``; ValueError if it has none.

        Together, these shards are ``multiple`` times as large as ``url``.
        """
        with _as_value_error():
            file = RemoteFile(url, self.patience)
        if not file.version:
            logging.warning(f"--cache-dir keeps no copy of {url}: it has no version (length, ETag, date).")
        need = multiple * (file.size or 0) / 2**30
        if need > self.cache_size:
            raise ValueError(
                f"--cache-size {self.cache_size:g} GiB is too small for the {need:.2g} GiB of {in_use}: increase it, lower "
                "--workers, or remove --cache-dir"
            )

    def _open_copy(self, folder: Path, file: RemoteFile) -> io.BufferedReader:
        """Open the copy of a remote file. The first process that opens it makes the copy; the others wait."""
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
                now = time.time_ns()  # finer than the kernel's time of a file
                os.utime(path, ns=(now, now))
                copy = open_local(path, BUFFER)
            if is_new:
                with FileLock(folder / ".lock"):
                    self._remove_oldest(folder)
        except OSError as error:
            if error.errno is None:  # of the remote file
                raise
            logging.warning(f"--cache-dir {folder} fails ({error}): {file.url} is read without a copy.")
            return file.open()
        return copy

    def _remove_oldest(self, folder: Path) -> None:
        """Remove copies, including unfinished copies of killed runs, until the rest fits.

        Copies whose lock is held are being written or opened and stay. Open copies can still be read.
        """
        from filelock import FileLock, Timeout

        found = []
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed by another process
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.cache_size * 2**30
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            if path.suffix == ".lock":
                continue
            # ``.NAME.RANDOM.partial`` is the unfinished copy NAME.
            name = path.name[1:].rsplit(".", 2)[0] if path.suffix == ".partial" else path.name
            with contextlib.suppress(Timeout), FileLock(folder / f"{name}.lock", timeout=0):
                path.unlink(missing_ok=True)
                excess -= size


DEFAULT_STORAGE = Storage()
