"""Samples in a tar file: WebDataset's grouping, found from the headers alone.

A sample is a run of consecutive regular members that share everything before the first dot of the file name; what
follows the dot is the field ("jpg", "txt", ...), in lower case. The lines here read headers only, many times faster
than Python's ``tarfile``, and notice a file or stream that ends too soon, which ``tarfile`` takes for the end of the
archive.
"""

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
_STREAM_BUFFER = 1 << 20
_COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_METADATA = re.compile(r"__[^/]*__($|/)")
_REGULAR_TYPES = frozenset(b"0\x007")
# Links, devices, directories and pipes have no data, whatever their size field says.
_DATALESS_TYPES = frozenset(b"123456")


class TarError(ValueError):
    """A tar file ends or breaks where a header or data should be."""


# What reading a broken stream raises; the decompressors have errors of their own.
STREAM_ERRORS = (TarError, OSError, EOFError, lzma.LZMAError, zlib.error)


class Member(NamedTuple):
    """One member of a tar; offsets are bytes from the beginning of the file."""

    name: str
    start: int  # first byte of the member's headers, long names and pax records included
    data: int
    size: int
    is_file: bool

    @property
    def end(self) -> int:
        """First byte after the data, padding included."""
        return self.data + _padded(self.size)


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _number(field: bytes) -> int:
    """A number of a tar header: octal text, or base 256 if its first bit is set (GNU, sizes from 8 GiB on)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise TarError(f"no octal number: {field!r}") from None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _check(header: bytes, position: int) -> None:
    """Verify the checksum: the sum of all bytes, with its own field taken as eight blanks (8 * 32 = 256).

    It is compared modulo 255, where a byte string and the sum of its bytes are the same number: that still finds every
    flipped bit, and 30,000 headers of a shard in a fraction of the time.
    """
    try:
        expected = _number(header[148:156])
    except TarError:
        raise TarError(f"no tar header at byte {position}") from None
    others = int.from_bytes(header, "big") - int.from_bytes(header[148:156], "big")
    if (others + 256 - expected) % 255:
        raise TarError(f"no tar header at byte {position}")


def _pax_records(data: bytes) -> dict[str, str]:
    """The records "LENGTH KEY=VALUE\\n" of an extended header."""
    records = {}
    while data and data[0]:
        length = int(data.partition(b" ")[0])
        if length <= 0:
            raise ValueError(length)
        key, _, value = data[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        records[key.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return records


def iter_members(read_at: Callable[[int, int], bytes], end: int) -> Iterator[Member]:
    """Walk over the members of an uncompressed tar without touching their data.

    Args:
        read_at: ``read_at(offset, length)`` returns at most ``length`` bytes.
        end: Size of the file in bytes.

    Yields:
        The complete members, in order.

    Raises:
        TarError: A header is broken, a member is cut off, or the end-of-archive mark is missing.
    """
    position = start = 0
    name, size = None, None
    while True:
        header = read_at(position, BLOCK)
        if len(header) < BLOCK:
            raise TarError(f"it ends at byte {position + len(header)}, without the end-of-archive mark")
        if not header[0] and not any(header):
            return
        _check(header, position)
        kind = header[156]
        length = 0 if kind in _DATALESS_TYPES else _number(header[124:136])
        if kind in b"xL":
            extension = read_at(position + BLOCK, length)
            try:
                name, size = _extended(kind, extension, name, size)
            except (ValueError, UnicodeDecodeError):
                raise TarError(f"broken extended header at byte {position}") from None
        elif kind not in b"gK":
            length = length if size is None else size
            is_file = kind in _REGULAR_TYPES
            member = Member(_member_name(header) if name is None else name, start, position + BLOCK, length, is_file)
            if member.data + length > end:
                raise TarError(f"{member.name} is cut off: it ends at byte {end}")
            yield member
            name, size, start = None, None, member.end
        position += BLOCK + _padded(length)


def _extended(kind: int, data: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Name and size of the next member according to a GNU long name ("L") or a pax header ("x")."""
    if kind == ord("L"):
        return _text(data), size
    records = _pax_records(data)
    return records.get("path", name), int(records["size"]) if "size" in records else size


def _member_name(header: bytes) -> str:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        return _text(header[345:500]) + "/" + name
    return name


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into the key of its sample and the field.

    Returns:
        ``(key, field)``, or None where WebDataset skips the member (no dot, hidden, ``__metadata__``).
    """
    folder, slash, file = name.rpartition("/")
    base, dot, field = file.partition(".")
    if not base or not dot or (name.startswith("__") and _METADATA.match(name)):
        return None
    return folder + slash + base, field.lower()


def fields_in(data: bytes, wanted: frozenset[str]) -> tuple[dict[str, bytes], list[str]]:
    """Read one sample from the bytes between its first header and the next sample's.

    Args:
        data: The sample's part of the tar.
        wanted: Fields to return.

    Returns:
        The wanted fields that are there, and the names of all.

    Raises:
        TarError: The bytes are no such part (the file was changed or cut).
    """
    fields, found = {}, []
    ended = bytes(BLOCK)
    read_at = lambda offset, length: data[offset : offset + length] or ended  # noqa: E731
    for member in iter_members(read_at, len(data)):
        parts = split_name(member.name) if member.is_file else None
        if parts is not None:
            found.append(parts[1])
            if parts[1] in wanted:
                fields[parts[1]] = data[member.data : member.data + member.size]
    return fields, found


class _RawStream(io.RawIOBase):
    """What only has ``read`` (webdataset's pipes) as a raw stream of Python's."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _ForwardReader:
    """``read_at`` for a stream: offsets may only grow."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0

    def __call__(self, offset: int, length: int) -> bytes:
        while self._position < offset:
            skipped = len(self._stream.read(min(offset - self._position, _STREAM_BUFFER)))
            if not skipped:
                return b""
            self._position += skipped
        data = self._stream.read(length)
        self._position += len(data)
        return data


def decompressor(magic: bytes) -> Callable[[BinaryIO], BinaryIO] | None:
    """What decompresses a file that begins with these bytes (``gzip.open``, ...), None if it is not compressed."""
    return next((opener for start, opener in _COMPRESSED.items() if magic.startswith(start)), None)


def stream_members(stream: BinaryIO) -> tuple[Iterator[Member], Callable[[int, int], bytes]]:
    """The members of a tar that is read forward, decompressed if need be.

    Returns:
        The members, and a function that reads the data of the last one (``read_at(member.data, member.size)``).

    Raises:
        STREAM_ERRORS: While iterating, if the stream is broken or ends too soon.
    """
    buffered = io.BufferedReader(_RawStream(stream), _STREAM_BUFFER)
    decompress = decompressor(buffered.peek(8))
    read_at = _ForwardReader(buffered if decompress is None else decompress(buffered))
    # The size of a stream is not known; a member that is cut off shows when its data or the next header are read.
    return iter_members(read_at, sys.maxsize), read_at


def stream_samples(stream: BinaryIO, wanted: frozenset[str]) -> Iterator[tuple[dict[str, bytes], list[str]]]:
    """Group a tar that can only be read forward (remote or compressed) into samples.

    Args:
        stream: The tar file, any compression; anything with ``read``.
        wanted: Fields whose data are kept; the others are passed over.

    Yields:
        The wanted fields and the names of all fields of each sample.

    Raises:
        STREAM_ERRORS: The stream is broken or ends too soon; the sample at the break is not yielded.
    """
    key, fields, found = None, {}, []
    members, read_at = stream_members(stream)
    for member in members:
        parts = split_name(member.name) if member.is_file else None
        if parts is None:
            continue
        if parts[0] != key or parts[1] in found:
            if key is not None:
                yield fields, found
            key, fields, found = parts[0], {}, []
        found.append(parts[1])
        if parts[1] in wanted:
            fields[parts[1]] = read_at(member.data, member.size)
            if len(fields[parts[1]]) < member.size:
                raise TarError(f"the stream ends in {member.name}")
    if key is not None:
        yield fields, found
