"""Open shards and the files beside them: local files, the output of commands, and whatever fsspec reads.

All errors of reading are OSErrors.
"""

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import re
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from openclip_ext.cli.messages import for_people, without_secrets
from openclip_ext.files.writing import write_atomically

T = TypeVar("T")

_PIPE = "pipe:"
# A remote file is fetched in blocks, some of them ahead of the reader and at the same time.
_BLOCK = 1 << 22
_BLOCKS_AHEAD = 6
# A smaller block for reading the headers of a tar without the images between them.
_HEADER_BLOCK = 1 << 18
_BUFFER = 1 << 20
_HEADER_BUFFER = 1 << 13
# Seconds after which a request without an answer counts as failed, and bytes that a stream has to bring in that time.
_STALL, _LEAST = 60.0, 1 << 20
# Bytes of a stream whose length is unknown, and of a file of counts, which may never end.
_MAX_STREAM, _MAX_FILE = 1 << 40, 1 << 26
# A stream that breaks off is read again from its beginning, this often.
_MAX_BREAKS = 10
# What tells a file from another one of the same name, by file system.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "generation", "blob_id", "last_commit"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime"),
)
# Where a process has read something: what fails afterwards may work again.
_reached: set[str] = set()
_NO_ACCESS = re.compile("Credential|TokenRetrieval|ProfileNotFound|ClientConnector|EndpointConnection")
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
        raise ValueError(for_people(f"cannot read {url}: {error}")) from error


def list_remote(pattern: str) -> list[str]:
    """Return the URLs of the files that a pattern with ``*``, ``?`` or ``[...]`` names, in order.

    Raises:
        ValueError: No file matches, or the place cannot be reached or has no list of its files.
    """

    def find() -> list[str]:
        system, path = _file_system(pattern)
        return sorted(map(system.unstrip_protocol, system.glob(path)))

    try:
        if pattern.startswith(("http:", "https:")):
            raise OSError(
                f"{pattern}: a web server does not list its files: name them with braces, {{00000..00099}}.tar"
            )
        urls = persist(pattern, DEFAULT_STORAGE.patience, partial(_is_final, _place(pattern)), find)
        if not urls:
            raise OSError(f"no file matches {pattern!r}")
    except OSError as error:
        raise ValueError(for_people(str(error))) from error
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
        buffer = _HEADER_BUFFER if headers_only else _BUFFER
        if is_local(url):
            return open_local(local_path(url), buffer)
        file = _RemoteFile(url, self.patience, _HEADER_BLOCK if headers_only else _BLOCK)
        if self.cache_dir is not None and not headers_only and file.can_be_kept:
            return self._open_cached(Path(self.cache_dir), file)
        return io.BufferedReader(file, buffer)

    def read(self, url: str) -> bytes:
        """Return the whole content of a small file, see :meth:`open`."""
        with Storage(self.patience).open(url) as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise OSError(for_people(f"{url}: expected at most {_MAX_FILE:,} bytes, found more"))
        return content

    def version(self, url: str) -> str:
        """Return what tells a remote file from another one of that name; empty if nothing does. Raise OSError."""
        with _RemoteFile(url, self.patience, _HEADER_BLOCK) as file:
            return file.version

    def reach(self, urls: Iterable[str]) -> None:
        """Read from each place of remote files once; raise OSError if it cannot be reached, or the file not be read."""
        for url in {_place(url): url for url in urls if not is_local(url)}.values():
            with self.open(url, headers_only=True) as file:
                if url.startswith(_PIPE):
                    file.peek(1)

    def check_cache(self, url: str, share: float, in_flight: str) -> None:
        """Check that the cache keeps copies, and has room for those in use.

        Args:
            url: A remote shard.
            share: The size of all shards that the node reads at the same time, as a multiple of this one's.
            in_flight: These shards, for the message.

        Raises:
            ValueError: It has no room for them.
            OSError: The shard cannot be read.
        """
        with _RemoteFile(url, self.patience, _HEADER_BLOCK) as file:
            if not file.can_be_kept:
                logging.warning(
                    f"--cache-dir keeps no copy of {url}: nothing (length, ETag, date) tells when it is replaced."
                )
            need = share * (file.size or 0) / 2**30
        if need > self.cache_size:
            raise ValueError(
                f"--cache-size {self.cache_size:g} GiB is too small for the {need:.2g} GiB of {in_flight}: raise it, lower "
                "--workers, or leave out --cache-dir"
            )

    def _open_cached(self, folder: Path, file: "_RemoteFile") -> io.BufferedReader:
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
                    write_atomically(path, lambda copy: shutil.copyfileobj(file, copy, _BLOCK))
                now = time.time_ns()  # The kernel's own time of a file is too coarse to tell the order of two uses.
                os.utime(path, ns=(now, now))
                copy = open_local(path, _BUFFER)
            if is_new:
                with FileLock(folder / ".lock"):
                    self._remove_oldest(folder)
        except OSError as error:
            if error.errno is None:  # of the remote file
                raise
            logging.warning(f"--cache-dir {folder} fails ({error}): {file.url} is read without a copy.")
            file.seek(0)
            return io.BufferedReader(file, _BUFFER)
        file.close()
        return copy

    def _remove_oldest(self, folder: Path) -> None:
        """Remove copies, also unfinished ones of killed runs, until the others fit.

        Those being written or opened, whose lock is held, stay; open ones can still be read.
        """
        from filelock import FileLock, Timeout

        found = []
        for path in folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed meanwhile
                continue
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
        version: Size with ETag, date or checksum, which change when another file gets the same name; empty if there is none.
    """

    def __init__(self, url: str, patience: float, block: int) -> None:
        self.url = url
        self._block = block
        self._system: Any = None
        self._position = 0
        self._stream: Any = None
        self._stream_position = 0
        self._blocks: dict[int, Future[bytes | None]] = {}
        self._blocks_ahead = 0  # none until the server has answered a request for a range with that range
        self._has_ranges = True
        self._breaks = 0
        self._seconds = min(_STALL, patience or _STALL)  # for a request
        self._waited, self._counted_from = 0.0, 0  # seconds and position of the stream since its pace was looked at
        self._persist = partial(persist, url, patience, partial(_is_final, _place(url)))
        self.size, self.version = self._persist(self._describe)

    @property
    def can_be_kept(self) -> bool:
        """Whether a copy of the file can be known to be whole, and still the file."""
        return self.size is not None and bool(self.version)

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
        data = self._from_block() if in_blocks else None
        if data is None:
            data = memoryview(self._persist(partial(self._from_stream, len(buffer))))
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
            self._system, self._path = _file_system(self.url)
        info = self._call("info", self._path)
        _reached.add(_place(self.url))
        known = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
        version = " ".join([f"size={info.get('size')}", *known]) if known else ""
        return info.get("size") if info.get("partial", True) else None, version

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system; raise TimeoutError if there is no answer."""
        if self._system.async_impl:
            return self._wait_for(getattr(self._system, f"_{method}")(*args, **options))
        return in_background(partial(getattr(self._system, method), *args, **options)).result(self._seconds)

    def _wait_for(self, answer: Coroutine[Any, Any, T]) -> T:
        limited = asyncio.wait_for(answer, self._seconds)
        try:
            return asyncio.run_coroutine_threadsafe(limited, self._system.loop).result()
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no whole answer within {self._seconds:g} s") from error

    def _from_block(self) -> memoryview | None:
        """Return the bytes from the position to the end of its block; None if the server has no ranges."""
        assert self.size is not None
        first = self._position // self._block
        last = min(first + self._blocks_ahead, (self.size - 1) // self._block)
        self._blocks = {
            number: self._blocks.get(number) or in_background(partial(self._persist, partial(self._fetch, number)))
            for number in range(first, last + 1)
        }
        data = self._blocks[first].result()
        return None if data is None else memoryview(data)[self._position - first * self._block :]

    def _fetch(self, number: int) -> bytes | None:
        assert self.size is not None
        begin, end = number * self._block, min((number + 1) * self._block, self.size)
        if self.url.startswith(("http:", "https:")):
            data = self._wait_for(self._get_range(begin, end))
        else:
            data = self._call("cat_file", self._path, start=begin, end=end)
        if data is None:
            self._has_ranges = False
            return None
        if len(data) != end - begin:
            raise OSError(f"{len(data):,} bytes came instead of {end - begin:,}")
        if end == self.size and number and self._describe() != (self.size, self.version):
            raise ReplacedError("it was replaced by another file while it was read")
        self._blocks_ahead = _BLOCKS_AHEAD if self._block == _BLOCK else 0
        return data

    async def _get_range(self, begin: int, end: int) -> bytes | None:
        """Return a part of a file of a web server, and read no more than that; None if the server sends the whole file."""
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
                raise OSError(f"{came} came instead of bytes {begin}-{end - 1}")
            return await response.content.readexactly(end - begin)

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
            _reached.add(_place(self.url))
            return data
        except BaseException as error:
            self._breaks += self._stream_position > 0
            self._close_stream()
            if self._breaks > _MAX_BREAKS and isinstance(error, Exception):
                raise _FinalError(f"it broke off {self._breaks} times; the last: {error}") from error
            raise

    def _read_on(self, count: int) -> bytes:
        start = time.monotonic()
        data = self._stream.read(min(count, _BUFFER))
        self._waited += time.monotonic() - start
        self._stream_position += len(data)
        if self._stream_position > _MAX_STREAM:
            raise _FinalError(f"it does not end: more than {_MAX_STREAM:,} bytes")
        if data and self._waited > _STALL:
            came = self._stream_position - self._counted_from
            if came < _LEAST:
                raise TimeoutError(f"only {came:,} bytes came in {self._waited:.0f} s")
            self._waited, self._counted_from = 0.0, self._stream_position
        return data

    def _close_stream(self) -> None:
        stream, self._stream, self._stream_position = self._stream, None, 0
        self._waited, self._counted_from = 0.0, 0
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
                raise OSError(for_people(f"{url}: {type(error).__name__}: {error}{tried}")) from error
            logging.warning(f"Reading {url} failed ({type(error).__name__}: {error}): again in {wait:g} s.")
            time.sleep(wait)
        else:
            if failures:
                seconds = time.monotonic() - start
                logging.warning(f"Reading {url} goes on after {failures} failures in {seconds:.0f} s.")
            return result


class ReplacedError(OSError):
    """A file is no longer the one that was opened or scanned."""


class _FinalError(OSError):
    """Reading again would be useless."""


class _CommandFailed(OSError):
    """A command ended with another status than 0."""


_NO_CONNECTION = (ConnectionRefusedError, socket.gaierror, _CommandFailed)
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # two types before Python 3.11


def _place(url: str) -> str:
    """Return the server or bucket of a URL, or the program of a command."""
    return url.split()[0] if url.startswith(_PIPE) else "{0.scheme}://{0.netloc}".format(urlparse(url))


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    import fsspec

    options: dict[str, Any] = {}
    if url.startswith(("http:", "https:")):
        from aiohttp import ClientTimeout

        # By default 5 minutes for a whole answer: too few for a large one.
        options = {"client_kwargs": {"timeout": ClientTimeout(sock_connect=_STALL, sock_read=_STALL)}}
    return fsspec.core.url_to_fs(url, **options)


def _is_final(place: str, error: Exception) -> bool:
    """Return whether trying again is useless: the file is not there, may not be read, or is another one.

    So it is if there is no connection, or are no credentials, at a place that was never reached.
    """
    if isinstance(error, ReplacedError | _FinalError):
        return True
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)  # type: ignore[arg-type]
    status = next(filter(None, (getattr(cause, "status", None) for cause in chain)), None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 425, 429)
    if any(isinstance(cause, _NO_CONNECTION) or _NO_ACCESS.search(type(cause).__name__) for cause in chain):
        return place not in _reached
    # fsspec says "not found", too, if an HTTP server does not answer.
    no_answer = any(isinstance(cause, _TIMEOUTS) or type(cause).__module__.startswith("aiohttp") for cause in chain)
    return isinstance(error, FileNotFoundError | PermissionError) and not no_answer


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
            raise _CommandFailed(f"the command failed with exit status {status}: {self._command}")
        return count

    def close(self) -> None:
        if not self.closed and self._process.stdout is not None:
            self._process.stdout.close()
            self._process.terminate()
            self._process.wait()
        super().close()
