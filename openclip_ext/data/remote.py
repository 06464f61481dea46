"""Remote files (read by fsspec) and the output of shell commands. Failed reads are retried until a timeout.

Every read error is an OSError.
"""

import asyncio
import io
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlparse

from openclip_ext.cli.messages import for_people, get_logger

logger = get_logger(__name__)

T = TypeVar("T")

PIPE = "pipe:"
BUFFER = 1 << 20
HEADER_BUFFER = 1 << 13
# Bytes per block of a file, and number of blocks that are prefetched in parallel.
_BLOCK, _BLOCKS_AHEAD = 1 << 22, 6
# Bytes per block when only the headers of a tar are read, and the images between them are skipped.
_HEADER_BLOCK = 1 << 18
# Timeout of a request in seconds, and the minimum number of bytes that a stream must deliver in this time.
_STALL, _LEAST = 60.0, 1 << 20
# Entries of fsspec's file information, one or more per file system, that change when a file is replaced.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "generation", "blob_id", "last_commit"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime"),
)
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between attempts
# Servers and buckets from which this process has read. Later connection failures there are retried.
_reached: set[str] = set()


class ReplacedError(OSError):
    """A file was replaced after it was opened or scanned."""


class _CommandFailed(OSError):
    """The exit status of a command is not 0."""


_NO_CONNECTION = (ConnectionRefusedError, socket.gaierror, _CommandFailed)
_NO_ACCESS = re.compile("Credential|TokenRetrieval|ProfileNotFound|ClientConnector|EndpointConnection")
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, futures.TimeoutError)  # three different types before Python 3.11


def persist(url: str, patience: float, is_final: Callable[[Exception], bool], action: Callable[[], T]) -> T:
    """Call an action. After an error, retry it for ``patience`` seconds, with doubling waits.

    Raises:
        OSError: The last attempt failed, or ``is_final`` returned True for an error.
    """
    start, failures = time.monotonic(), 0
    while True:
        try:
            result = action()
        except Exception as error:
            wait = min(_FIRST_WAIT * 2 ** min(failures, 10), _LONGEST_WAIT)
            failures += 1
            # fsspec raises a FileNotFoundError with only the URL also if the server refuses access or does not answer.
            reason = (str(error) == url and error.__cause__) or error
            if is_final(error) or time.monotonic() + wait > start + patience:
                tried = f" ({failures} attempts in {time.monotonic() - start:.0f} s)" if failures > 1 else ""
                raise OSError(for_people(f"{url}: {type(reason).__name__}: {reason}{tried}")) from error
            logger.warning(f"Reading {url} failed ({type(reason).__name__}: {reason}): retry in {wait:g} s.")
            time.sleep(wait)
        else:
            if failures:
                seconds = time.monotonic() - start
                logger.warning(f"Reading {url} continues after {failures} failures in {seconds:.0f} s.")
            return result


def place_of(url: str) -> str:
    """Return the server or bucket of a URL, or the program of a command."""
    return url.split()[0] if url.startswith(PIPE) else "{0.scheme}://{0.netloc}".format(urlparse(url))


def is_final(url: str, error: Exception) -> bool:
    """Return whether a retry is useless: the file does not exist, may not be read, or was replaced.

    Without a connection or credentials, a retry is useless if this process has never read from the server or bucket. A retry
    is also useless if fsspec does not support the protocol or lacks its package.
    """
    if isinstance(error, ReplacedError | ImportError) or "Protocol not known" in str(error):
        return True
    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    status = next(filter(None, (getattr(cause, "status", None) for cause in chain)), None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 425, 429)
    if any(isinstance(cause, _NO_CONNECTION) or _NO_ACCESS.search(type(cause).__name__) for cause in chain):
        return place_of(url) not in _reached
    # fsspec also raises FileNotFoundError if an HTTP server does not answer; this case is retried.
    no_answer = any(isinstance(cause, _TIMEOUTS) or type(cause).__module__.startswith("aiohttp") for cause in chain)
    return isinstance(error, FileNotFoundError | PermissionError) and not no_answer


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's path in this file system."""
    import fsspec  # a late import, because it is slow and only needed for remote data

    options: dict[str, Any] = {}
    if url.startswith(("http:", "https:")):
        from aiohttp import ClientTimeout

        # The default limits the full download to 5 minutes, which is too short for a large file.
        # Without trust_env, aiohttp ignores the variable https_proxy.
        timeout = ClientTimeout(sock_connect=_STALL, sock_read=_STALL)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    return fsspec.core.url_to_fs(url, **options)


def in_background(action: Callable[[], T]) -> "Future[T]":
    """Call a function in a daemon thread, which does not delay the exit of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class RemoteFile:
    """A remote file with the size and version that its server reports. Failed reads are retried for ``patience`` seconds.

    Attributes:
        url: A URL that fsspec supports, or ``pipe:COMMAND``.
        size: Size in bytes; None if unknown.
        version: Size with ETag, date or checksum, which changes when the file is replaced. Empty if unknown.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.url = url
        self._seconds = min(_STALL, patience or _STALL)
        self.persist = partial(persist, url, patience, partial(is_final, url))
        self.size, self.version = (None, "") if url.startswith(PIPE) else self.persist(self._describe)

    def open(self, headers_only: bool = False) -> io.BufferedReader:
        """Open the file to read bytes: in blocks if the server supports range requests, otherwise as a stream."""
        block, ahead = (_HEADER_BLOCK, 0) if headers_only else (_BLOCK, _BLOCKS_AHEAD)
        buffer = HEADER_BUFFER if headers_only else BUFFER
        first = None if self.size is None else self.fetch(0, min(block, self.size))
        return io.BufferedReader(_Stream(self) if first is None else _Blocks(self, block, ahead, first), buffer)

    def open_stream(self) -> Any:
        """Open the file as a stream, without retries: its bytes can be read once, from front to back."""
        if self.url.startswith(PIPE):
            return _CommandOutput(self.url[len(PIPE) :])
        return self._system.open(self._path, block_size=0)

    def fetch(self, begin: int, end: int) -> bytes | None:
        """Return the bytes from ``begin`` to ``end``; None if the server ignores ranges and sends the full file."""
        return self.persist(partial(self._fetch, begin, end))

    def _describe(self) -> tuple[int | None, str]:
        self._system, self._path = file_system(self.url)
        info = self._call(self._system.info, self._path)
        _reached.add(place_of(self.url))
        size = info.get("size") if info.get("partial", True) else None
        known = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
        return size, "" if size is None or not known else " ".join([f"size={size}", *known])

    def _call(self, method: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            if self._system.async_impl:
                return method(*args, **options, timeout=self._seconds)
            return in_background(partial(method, *args, **options)).result(self._seconds)
        except _TIMEOUTS as error:
            raise TimeoutError(f"the server sent no complete answer within {self._seconds:g} s") from error

    def _fetch(self, begin: int, end: int) -> bytes | None:
        if self.url.startswith(("http:", "https:")):
            from fsspec.asyn import sync

            data = self._call(partial(sync, self._system.loop, self._get_range), begin, end)
        else:
            data = self._call(self._system.cat_file, self._path, start=begin, end=end)
        if data is None and begin == 0:
            return None
        if data is None or len(data) != end - begin:
            raise OSError(f"expected {end - begin:,} bytes, received {'the full file' if data is None else len(data)}")
        if begin and end == self.size and self._describe() != (self.size, self.version):
            raise ReplacedError("the file was replaced while it was read")
        return data

    async def _get_range(self, begin: int, end: int) -> bytes | None:
        """Return a part of a file on a web server, reading only this part; None if the server sends the full file."""
        options = self._system.kwargs
        wanted = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**options.get("headers", {}), **wanted}
        session = await self._system.set_session()
        async with session.get(self._system.encode_url(self._path), **{**options, "headers": headers}) as response:
            response.raise_for_status()
            if response.status != 206 and (begin, end) != (0, self.size):
                return None
            came = response.headers.get("Content-Range", f"bytes {begin}-")
            if not came.startswith(f"bytes {begin}-"):
                raise OSError(f"received {came}, expected bytes {begin}-{end - 1}")
            return await response.content.readexactly(end - begin)


class _Blocks(io.RawIOBase):
    """A file that is read in blocks. The next blocks are prefetched."""

    def __init__(self, file: RemoteFile, block: int, ahead: int, first: bytes) -> None:
        assert file.size is not None
        self._file = file
        self._size = file.size
        self._block = block
        self._ahead = ahead
        self._position = 0
        self._blocks: dict[int, Future[bytes | None]] = {0: Future()}
        self._blocks[0].set_result(first)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        number = self._position // self._block
        last = min(number + self._ahead, (self._size - 1) // self._block)
        self._blocks = {ahead: self._blocks.get(ahead) or self._fetch(ahead) for ahead in range(number, last + 1)}
        data = self._blocks[number].result()
        assert data is not None  # the first block has shown that the server supports ranges
        part = memoryview(data)[self._position - number * self._block :][: len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _fetch(self, number: int) -> "Future[bytes | None]":
        begin = number * self._block
        return in_background(partial(self._file.fetch, begin, min(begin + self._block, self._size)))


class _Stream(io.RawIOBase):
    """A file that is read as a stream. After a lost connection, it is opened again and read up to the current position."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0  # bytes that the reader has received
        self._stream: Any = None
        self._done = 0  # bytes read from the current stream
        self._waited, self._came = 0.0, 0  # seconds and bytes since the last check of the throughput

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.persist(partial(self._read, len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        try:
            self._stream = self._stream or self._file.open_stream()
            while self._done < self._position and self._read_on(self._position - self._done):
                pass
            data = self._read_on(count)
            if not data and self._done < (self._file.size or 0):
                raise OSError(f"the stream ended after {self._done:,} of {self._file.size:,} bytes")
            _reached.add(place_of(self._file.url))
            return data
        except BaseException:
            self._close_stream()
            raise

    def _read_on(self, count: int) -> bytes:
        start = time.monotonic()
        data = self._stream.read(min(count, BUFFER))
        self._waited += time.monotonic() - start
        self._done += len(data)
        self._came += len(data)
        if data and self._waited > _STALL:
            if self._came < _LEAST:
                raise TimeoutError(f"received only {self._came:,} bytes in {self._waited:.0f} s")
            self._waited, self._came = 0.0, 0
        return data

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._done, self._waited, self._came = 0, 0.0, 0
        if stream is not None:
            stream.close()

    def close(self) -> None:
        self._close_stream()
        super().close()


class _CommandOutput:
    """The output of a shell command. At the end of the output, an exit status other than 0 raises OSError."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, bufsize=0)

    def read(self, count: int) -> bytes:
        """Wait for output; return up to ``count`` bytes, or none at the end of the output."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _STALL)[0]:
            raise TimeoutError(f"the command wrote nothing for {_STALL:g} s: {self._command}")
        data = self._process.stdout.read(count)
        if not data and (status := self._process.wait()):
            raise _CommandFailed(f"the command failed with exit status {status}: {self._command}")
        return data

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()
