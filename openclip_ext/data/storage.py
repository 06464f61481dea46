"""Where the bytes of a data set come from: local files, the output of commands, and whatever fsspec reads.

Only here is a shard, or a file beside one, opened. All errors of reading are OSErrors.
"""

import io
import os
import re
import subprocess
from typing import Any, BinaryIO
from urllib.parse import urlparse

_PIPE = "pipe:"
# One request of a remote file; also what is read ahead.
_REMOTE_BLOCK = 1 << 23
_BUFFER = 1 << 20


def is_local(url: str) -> bool:
    """Return whether a shard is a file of this machine rather than a ``pipe:`` command or a URL."""
    return len(urlparse(url).scheme) <= 1 or url.startswith("file:")


def local_path(url: str) -> str:
    """Return the absolute path of a local shard."""
    path = re.sub(r"^file:(//)?", "", url)
    return os.path.abspath(os.path.expanduser(path))


def open_local(path: str, buffering: int = -1) -> BinaryIO:
    """Open a file to read bytes.

    Raises:
        OSError: It cannot be read, or is no regular file: opening a named pipe would wait for ever.
    """
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(f"{path} is no regular file (a folder, named pipe or device)")
    return open(path, "rb", buffering=buffering)


def open_url(url: str) -> BinaryIO:
    """Open a shard or another file to read bytes from its beginning.

    Args:
        url: A path, ``pipe:COMMAND`` (run by the shell, as OpenCLIP does), or a URL that fsspec knows (``https://``,
            ``s3://``, ``gs://``, ``hf://``, ...). The result can seek where the storage can.

    Raises:
        OSError: It cannot be opened; while reading: the connection or the command failed.
    """
    if is_local(url):
        return open_local(local_path(url), _BUFFER)
    raw = _CommandOutput(url[len(_PIPE) :]) if url.startswith(_PIPE) else _RemoteFile(url)
    return io.BufferedReader(raw, _BUFFER)


def check_protocol(url: str) -> None:
    """Raise ValueError where nothing can open this kind of URL; the message names the package that is missing."""
    if is_local(url) or url.startswith(_PIPE):
        return
    import fsspec  # takes a tenth of a second, and only remote data need it

    try:
        fsspec.get_filesystem_class(urlparse(url).scheme)
    except (ImportError, ValueError) as error:
        raise ValueError(f"cannot read {url}: {error}") from error


def read_url(url: str) -> bytes:
    """Return the whole content of a file, see :func:`open_url`."""
    with open_url(url) as file:
        return file.read()


class _CommandOutput(io.RawIOBase):
    """What a shell command writes. Where its output ends, a status other than 0 is an OSError."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, bufsize=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
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


class _RemoteFile(io.RawIOBase):
    """A file that fsspec opened, with OSErrors for the errors of its many libraries."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url
        try:
            system, path = fsspec.core.url_to_fs(url)
            self._file = system.open(path, "rb", block_size=_REMOTE_BLOCK)
        except Exception as error:
            raise self._as_os_error(error) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return getattr(self._file, "size", None) is not None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:
            raise self._as_os_error(error) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _as_os_error(self, error: Exception) -> OSError:
        return error if isinstance(error, OSError) else OSError(f"{self._url}: {type(error).__name__}: {error}")
