"""Open shards and the files beside them: local files, the output of commands, and whatever fsspec reads.

All errors of reading are OSErrors.
"""

import hashlib
import io
import logging
import os
import re
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from openclip_ext.files import write_atomically

T = TypeVar("T")

_PIPE = "pipe:"
# A remote file is fetched in blocks, some of them ahead of the reader and at the same time.
_BLOCK = 1 << 22
_BLOCKS_AHEAD = 6
# A smaller block for reading the headers of a tar without the images between them.
_HEADER_BLOCK = 1 << 18
_BUFFER = 1 << 20
_HEADER_BUFFER = 1 << 13
# Seconds after which a request without an answer counts as failed.
_STALL = 60.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0


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
    return io.BufferedReader(open(path, "rb", buffering=0), buffer)


def check_protocol(url: str) -> None:
    """Raise ValueError if nothing can open this kind of URL; the message names the missing package."""
    if is_local(url) or url.startswith(_PIPE):
        return
    import fsspec  # takes a tenth of a second, and only remote data need it

    try:
        fsspec.get_filesystem_class(urlparse(url).scheme)
    except (ImportError, ValueError) as error:
        raise ValueError(f"cannot read {url}: {error}") from error


@dataclass(frozen=True)
class Storage:
    """How files are opened that may be remote.

    Attributes:
        patience: Seconds for which a remote file that fails is asked for again, less and less often.
        cache_dir: Folder that keeps remote shards for all processes of the node; None: none are kept.
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
        buffer = _HEADER_BUFFER if headers_only else _BUFFER
        if is_local(url):
            return open_local(local_path(url), buffer)
        file = _RemoteFile(url, self.patience, _HEADER_BLOCK if headers_only else _BLOCK)
        # A file of unknown size may be cut off.
        if self.cache_dir is not None and not headers_only and (file.size is not None or url.startswith(_PIPE)):
            return self._open_cached(Path(self.cache_dir), file)
        return io.BufferedReader(file, buffer)

    def read(self, url: str) -> bytes:
        """Return the whole content of a file, see :meth:`open`."""
        with Storage(self.patience).open(url) as file:
            return file.read()

    def _open_cached(self, folder: Path, file: "_RemoteFile") -> io.BufferedReader:
        """Open the copy of a remote file. The first process that asks for it makes the copy, and the others wait."""
        from filelock import FileLock

        folder.mkdir(parents=True, exist_ok=True)
        # A file that was replaced in the bucket is another one.
        version = hashlib.blake2b(f"{file.url}\0{file.version}".encode(), digest_size=8).hexdigest()
        path = folder / f"{version}-{re.sub(r'[^-.a-zA-Z0-9]', '_', file.url)[-60:]}"
        with FileLock(f"{path}.lock"):
            is_new = not path.exists()
            if is_new:
                write_atomically(path, lambda copy: shutil.copyfileobj(file, copy, _BLOCK))
            now = time.time_ns()  # The kernel's own time of a file is too coarse to tell the order of two uses.
            os.utime(path, ns=(now, now))
            copy = open_local(path, _BUFFER)
        file.close()
        if is_new:
            with FileLock(folder / ".lock"):
                self._remove_oldest(folder)
        return copy

    def _remove_oldest(self, folder: Path) -> None:
        """Remove copies, also unfinished ones of killed runs, until the others fit. Open ones can still be read."""
        found = []
        for path in folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed meanwhile
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.cache_size * 2**30
        for _, size, path in sorted(found):
            if excess > 0 and path.suffix != ".lock":
                path.unlink(missing_ok=True)
                excess -= size


DEFAULT_STORAGE = Storage()


def in_background(action: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _RemoteFile(io.RawIOBase):
    """A remote file, fetched in blocks ahead of the reader if the server has ranges, otherwise read as a stream.

    A request that fails, stalls or comes too short is repeated until the patience is over.

    Attributes:
        url: URL or ``pipe:`` command.
        size: Bytes; None if unknown.
        version: The ETag, or something else that changes when another file gets the same name.
    """

    def __init__(self, url: str, patience: float, block: int) -> None:
        self.url = url
        self._block = block
        self._system: Any = None
        self._position = 0
        self._stream: Any = None
        self._stream_position = 0
        self._blocks: dict[int, Future[bytes]] = {}
        self._blocks_ahead = 0  # none until the server has answered a request for a range with that range
        self._has_ranges = True
        self._persist = partial(persist, url, patience, _is_final)
        self.size, self.version = self._persist(self._describe)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.size is not None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert self.size is not None, "only a file of known size can seek"
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self.size is not None and self._position >= self.size:
            return 0
        in_blocks = self.size is not None and self._has_ranges
        data = self._from_block() if in_blocks else memoryview(self._persist(partial(self._from_stream, len(buffer))))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        self._position += count
        return count

    def close(self) -> None:
        self._blocks = {}
        self._close_stream()
        super().close()

    def _describe(self) -> tuple[int | None, str]:
        """Return size and version."""
        if self.url.startswith(_PIPE):
            return None, ""
        if self._system is None:
            import fsspec

            self._system, self._path = fsspec.core.url_to_fs(self.url)
        info = self._call("info", self._path)
        names = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime", "last_commit")
        version = next((str(info[name]) for name in names if info.get(name)), "")
        return info.get("size") if info.get("partial", True) else None, version

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system; raise TimeoutError if there is no answer."""
        if not self._system.async_impl:
            return getattr(self._system, method)(*args, **options)
        from fsspec.asyn import sync

        return sync(self._system.loop, getattr(self._system, f"_{method}"), *args, timeout=_STALL, **options)

    def _from_block(self) -> memoryview:
        """Return the bytes from the position to the end of its block."""
        assert self.size is not None
        first = self._position // self._block
        last = min(first + self._blocks_ahead, (self.size - 1) // self._block)
        self._blocks = {
            number: self._blocks.get(number) or in_background(partial(self._persist, partial(self._fetch, number)))
            for number in range(first, last + 1)
        }
        return memoryview(self._blocks[first].result())[self._position - first * self._block :]

    def _fetch(self, number: int) -> bytes:
        assert self.size is not None
        begin, end = number * self._block, min((number + 1) * self._block, self.size)
        data = self._call("cat_file", self._path, start=begin, end=end)
        if len(data) == self.size > end - begin:
            self._has_ranges = False  # what follows is read as a stream
            return data[begin:end]
        if len(data) != end - begin:
            raise OSError(f"{len(data):,} bytes came instead of {end - begin:,}")
        if end == self.size and number and self._describe() != (self.size, self.version):
            raise ReplacedError("it was replaced by another file while it was read")
        self._blocks_ahead = _BLOCKS_AHEAD if self._block == _BLOCK else 0
        return data

    def _from_stream(self, count: int) -> bytes:
        """Return at most so many bytes from the position on; read the stream from its beginning if it is further on."""
        try:
            if self._stream is None or self._stream_position > self._position:
                self._close_stream()
                is_command, command = self.url.startswith(_PIPE), self.url[len(_PIPE) :]
                self._stream = _CommandOutput(command) if is_command else self._system.open(self._path, block_size=0)
            while self._stream_position < self._position and self._read_on(self._position - self._stream_position):
                pass
            data = self._read_on(count)
            if not data and self.size is not None:
                raise OSError(f"it ended after {self._stream_position:,} of {self.size:,} bytes")
            return data
        except BaseException:
            self._close_stream()
            raise

    def _read_on(self, count: int) -> bytes:
        data = self._stream.read(min(count, _BUFFER))
        self._stream_position += len(data)
        return data

    def _close_stream(self) -> None:
        stream, self._stream, self._stream_position = self._stream, None, 0
        if stream is not None:
            stream.close()


def persist(url: str, patience: float, is_final: Callable[[Exception], bool], action: Callable[[], T]) -> T:
    """Repeat an action that fails, after waits that double, until the patience is over; log each failure.

    Raises:
        OSError: The last failure, or one that is final.
    """
    start, failures = time.monotonic(), 0
    while True:
        try:
            result = action()
        except Exception as error:
            wait = min(_FIRST_WAIT * 2**failures, _LONGEST_WAIT)
            failures += 1
            if is_final(error) or time.monotonic() + wait > start + patience:
                tried = f" ({failures} attempts in {time.monotonic() - start:.0f} s)" if failures > 1 else ""
                raise OSError(f"{url}: {type(error).__name__}: {error}{tried}") from error
            logging.warning(f"Reading {url} failed ({type(error).__name__}: {error}): again in {wait:g} s.")
            time.sleep(wait)
        else:
            if failures:
                seconds = time.monotonic() - start
                logging.warning(f"Reading {url} goes on after {failures} failures in {seconds:.0f} s.")
            return result


class ReplacedError(OSError):
    """A file is no longer the one that was opened or scanned."""


def _is_final(error: Exception) -> bool:
    """Return whether trying again is useless: the file is not there, may not be read, or is another one."""
    if not isinstance(error, FileNotFoundError | PermissionError | ReplacedError):
        return False
    # fsspec says "not found", too, if an HTTP server does not answer.
    cause = error.__cause__
    no_answer = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return not no_answer or 400 <= getattr(cause, "status", 500) < 500


class _CommandOutput(io.RawIOBase):
    """The output of a shell command; its end raises OSError unless the status is 0."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, bufsize=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _STALL)[0]:
            raise TimeoutError(f"the command wrote nothing for {_STALL:g} s: {self._command}")
        count = self._process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        if not count and (status := self._process.wait()):
            raise OSError(f"the command failed with exit status {status}: {self._command}")
        return count

    def close(self) -> None:
        if not self.closed and self._process.stdout is not None:
            self._process.stdout.close()
            self._process.terminate()
            self._process.wait()
        super().close()
