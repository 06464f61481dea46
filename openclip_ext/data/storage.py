"""Open shards and the files beside them: local files, the output of commands, and whatever fsspec reads.

All errors of reading are OSErrors.
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

# Bytes of a file of counts, which may never end.
_MAX_FILE = 1 << 26


def is_local(url: str) -> bool:
    """Return whether a shard is a file of this machine rather than a ``pipe:`` command or a URL."""
    return len(urlparse(url).scheme) <= 1 or url.startswith("file:")


def local_path(url: str) -> str:
    """Return the absolute path of a local shard."""
    path = re.sub(r"^file:(//)?", "", url)
    return os.path.abspath(os.path.expanduser(path))


def open_local(path: str | os.PathLike[str], buffer: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a file to read bytes; raise OSError for a named pipe, too, which would be waited for without end."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(f"{path} is no regular file (a folder, named pipe or device)")
    return io.BufferedReader(io.FileIO(path), buffer)


@contextlib.contextmanager
def _unreadable_as_value_error() -> Iterator[None]:
    """Raise ValueError instead of OSError, since the user named the shards."""
    try:
        yield
    except OSError as error:
        raise ValueError(for_people(f"cannot read shards: {error}")) from error


def list_remote(pattern: str) -> list[str]:
    """Return the URLs of the files that a pattern with ``*``, ``?`` or ``[...]`` names, in order.

    Raises:
        ValueError: No file matches, or the place cannot be reached or has no list of its files.
    """

    def find() -> list[str]:
        system, path = file_system(pattern)
        return sorted(map(system.unstrip_protocol, system.glob(path)))

    with _unreadable_as_value_error():
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
    """How files are opened that may be remote.

    Attributes:
        patience: Seconds for which a remote file that fails is asked for again, less and less often.
        cache_dir: Folder that keeps remote shards for all processes of the node; None: none are kept. Shards without a
            version (ETag, date) and ``pipe:`` commands are not kept.
        cache_size: GiB that they may take. Those that nobody has opened for longest are removed.
    """

    patience: float = 300.0
    cache_dir: str | None = None
    cache_size: float = 100.0

    def open(self, url: str, headers_only: bool = False) -> io.BufferedReader:
        """Open a shard or another file to read bytes from its beginning.

        Args:
            url: A path, ``pipe:COMMAND`` (run by the shell, as OpenCLIP does), or a URL that fsspec knows (``https://``,
                ``s3://``, ``gs://``, ``hf://``, ...). The result can seek if the storage can.
            headers_only: Fetch little ahead and keep nothing, because most of a tar will be skipped.

        Raises:
            OSError: It cannot be opened; while reading: the connection or the command failed beyond the patience.
        """
        if is_local(url):
            return open_local(local_path(url), HEADER_BUFFER if headers_only else BUFFER)
        file = RemoteFile(url, self.patience)
        if self.cache_dir is not None and not headers_only and _can_be_kept(file):
            return self._open_copy(Path(self.cache_dir), file)
        return file.open(headers_only)

    def read(self, url: str) -> bytes:
        """Return the whole content of a small file, see :meth:`open`."""
        with Storage(self.patience).open(url) as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise OSError(for_people(f"{url}: expected at most {_MAX_FILE:,} bytes, found more"))
        return content

    def reach(self, urls: Iterable[str]) -> None:
        """Ask each place of remote files for one; raise ValueError if it cannot be reached, or the file not be read."""
        with _unreadable_as_value_error():
            for url in {place_of(url): url for url in urls if not is_local(url)}.values():
                file = RemoteFile(url, self.patience)
                if url.startswith(PIPE):
                    with file.open(headers_only=True) as output:
                        output.peek(1)

    def check_cache(self, url: str, multiple: float, in_flight: str) -> None:
        """Check that the cache keeps copies, and has room for those in use.

        Args:
            url: A remote shard.
            multiple: The size of all shards that the node reads at the same time, as a multiple of this one's.
            in_flight: These shards, for the message.

        Raises:
            ValueError: It has no room for them, or the shard cannot be read.
        """
        with _unreadable_as_value_error():
            file = RemoteFile(url, self.patience)
        if not _can_be_kept(file):
            logging.warning(
                f"--cache-dir keeps no copy of {url}: nothing (length, ETag, date) tells when it is replaced."
            )
        need = multiple * (file.size or 0) / 2**30
        if need > self.cache_size:
            raise ValueError(
                f"--cache-size {self.cache_size:g} GiB is too small for the {need:.2g} GiB of {in_flight}: raise it, lower "
                "--workers, or leave out --cache-dir"
            )

    def _open_copy(self, folder: Path, file: RemoteFile) -> io.BufferedReader:
        """Open the copy of a remote file. The first process that asks for it makes the copy, and the others wait."""
        from filelock import FileLock

        # A file that was replaced in the bucket is another one.
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
                now = time.time_ns()  # The kernel's own time of a file is too coarse to tell the order of two uses.
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
        """Remove copies, also unfinished ones of killed runs, until the others fit.

        Those being written or opened, whose lock is held, stay; open ones can still be read.
        """
        from filelock import FileLock, Timeout

        found = []
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
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


def _can_be_kept(file: RemoteFile) -> bool:
    """Return whether a copy of a file can be known to be whole, and still the file."""
    return file.size is not None and bool(file.version)
