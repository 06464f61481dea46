"""Samples in a tar file, grouped as WebDataset does. All tars of the package are read here.

A sample is a run of consecutive regular members that share everything before the first dot of the file name. The rest is
the field ("jpg", "txt", ...), in lower case. Python's ``tarfile`` takes ten times as long to parse a header, and takes a
file that ends too soon for a complete archive.
"""

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

BLOCK = 512
# Two blocks of zeros end an archive, and tar fills up its last record of 20 blocks. More zeros are lost data.
_END_OF_ARCHIVE, _RECORD = 2 * BLOCK, 20 * BLOCK
_MAX_PADDING = _RECORD + BLOCK
# Names and pax records are short; a damaged header may announce gigabytes.
_MAX_EXTENSION = 1 << 20
_STREAM_BUFFER = 1 << 20
# Bytes that are searched for the next header of a file that may have no end.
_MAX_SEARCH = 1 << 28
# A read allocates what it asks for, and a damaged header may ask for anything.
_MAX_READ = 1 << 26
# A larger image or caption is damaged, or meant to fill the memory.
_MAX_FIELD = 1 << 28
_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_METADATA = re.compile(r"__[^/]*__($|/)")
_REGULAR_TYPES = frozenset(b"0\x007")
# Links, devices, directories and pipes have no data, even if their size field is not 0.
_DATALESS_TYPES = frozenset(b"123456")


class TarError(ValueError):
    """A tar file ends or breaks where a header or data should be."""


class _DamageError(TarError):
    """A header is not readable; the search for the next one begins at the byte ``resume``."""

    def __init__(self, message: str, resume: int) -> None:
        super().__init__(message)
        self.resume = resume


class _EndOfFileError(TarError):
    """The file ends at the byte ``end``."""

    def __init__(self, end: int) -> None:
        super().__init__(f"it ends at byte {end}, without the end-of-archive mark")
        self.end = end


# Errors of reading a broken stream, those of the decompressors included.
STREAM_ERRORS = (TarError, OSError, EOFError, lzma.LZMAError, zlib.error)


class Member(NamedTuple):
    """One member of a tar, with offsets in bytes from the beginning of the file."""

    name: str
    start: int  # first byte of the member's headers, long names and pax records included
    data: int
    size: int
    is_file: bool

    @property
    def end(self) -> int:
        """First byte after the data, padding included."""
        return self.data + _padded(self.size)


class Gap(NamedTuple):
    """Bytes of a tar that belong to no readable member."""

    start: int
    end: int


class TarSample(NamedTuple):
    """One sample of a tar."""

    key: str  # the part of the name that its members share
    members: list[Member]
    found: list[str]  # the field of each member
    fields: dict[str, bytes]  # the content of the wanted fields


# Takes an offset and a length, and returns at most so many bytes. Offsets ascend.
ReadAt = Callable[[int, int], bytes]


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _number(field: bytes) -> int:
    """Return a number of a tar header: octal text, or base 256 behind 0x80 (GNU, from 8 GiB on)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0].strip()
    if not text:
        return 0
    if not text.isdigit():  # int() would take signs and underscores
        raise ValueError(f"no octal number: {field!r}")
    return int(text, 8)


def _text(field: bytes) -> str:
    # Names appear in messages and logs: what a terminal obeys is written as Python writes it.
    text = field.partition(b"\0")[0].decode("utf-8", "backslashreplace")
    return text if text.isprintable() else _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _has_checksum(header: bytes) -> bool:
    """Return whether the checksum is right: the sum of all bytes, with its own field taken as eight blanks (8 * 32 = 256).

    The lower half of Adler-32 is the sum plus 1, modulo 65521: a hundred times faster than ``sum(header)``.
    """
    try:
        expected = _number(header[148:156])
    except ValueError:
        return False
    total = (zlib.adler32(header) & 0xFFFF) - 1
    return (total - sum(header[148:156]) + 256 - expected) % 65521 == 0


def _pax_records(data: bytes) -> dict[str, str]:
    """Return the records "LENGTH KEY=VALUE\\n" of an extended header."""
    records = {}
    while data and data[0]:
        length = int(data.partition(b" ")[0])
        if length <= 0:
            raise ValueError(length)
        key, _, value = data[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        records[key.decode()] = _text(value)
        data = data[length:]
    return records


def iter_members(read_at: ReadAt, end: int, gaps: list[Gap]) -> Iterator[Member]:
    """Yield the complete members of an uncompressed tar, in order, without touching their data.

    After a damaged header go on at the next valid one, as GNU tar does. Archives that were joined (``cat a.tar b.tar``) are
    read as one.

    Args:
        read_at: Reads the file.
        end: Size of the file in bytes; ``sys.maxsize`` if unknown.
        gaps: Receives each gap before the member that follows it is yielded.

    Raises:
        TarError: The file ends without the end-of-archive mark; the last gap then reaches to its end.
    """
    position = good_end = archive = 0  # archive: where the current one of joined archives begins
    zeros: int | None = None  # where the blocks of zeros before `position` begin
    damage: TarError | None = None  # the first since the last good member
    while True:
        if end == sys.maxsize and position - good_end > _MAX_SEARCH:
            gaps.append(Gap(good_end, position))
            raise damage or TarError(f"no tar header in the {_MAX_SEARCH:,} bytes after byte {good_end:,}")
        try:
            member = _read_member(read_at, position, end, after_gap=position > good_end)
        except _DamageError as error:
            damage = damage or error
            position, zeros = error.resume, None
            continue
        except _EndOfFileError as error:
            damage, file_end = damage or error, error.end
            break
        if member is None:
            zeros = position if zeros is None else zeros
            position += BLOCK
            continue
        if zeros == good_end and damage is None and _ends_archive(position - zeros, position - archive):
            archive = position
        elif position > good_end:
            gaps.append(Gap(good_end, position))
        yield member
        position = good_end = member.end
        zeros = damage = None
    if zeros is None:
        gaps.append(Gap(good_end, file_end))
        raise damage
    if zeros > good_end:
        gaps.append(Gap(good_end, zeros))
    if file_end - zeros > _MAX_PADDING:
        gaps.append(Gap(zeros, file_end))


def _ends_archive(padding: int, length: int) -> bool:
    """Return whether so many zeros end an archive, which is ``length`` bytes long with them, rather than replace lost data."""
    return padding == _END_OF_ARCHIVE or (_END_OF_ARCHIVE < padding <= _MAX_PADDING and length % _RECORD == 0)


def _read_member(read_at: ReadAt, start: int, end: int, after_gap: bool) -> Member | None:
    """Return the member whose first header is at ``start``, or None at a block of zeros.

    After a gap, a name that fills its field counts as damage: the header with its rest may be in the gap.

    Raises:
        TarError: The header is damaged, the member is cut off, or the file ends.
    """
    position, name, size = start, None, None
    while True:
        header = read_at(position, BLOCK)
        data = position + BLOCK
        if len(header) < BLOCK:
            raise _EndOfFileError(position + len(header))
        if position == start and not header[0] and not any(header):
            return None
        if not _has_checksum(header):
            raise _DamageError(f"no tar header at byte {position}", data)
        kind = header[156]
        try:
            length = 0 if kind in _DATALESS_TYPES else _number(header[124:136])
        except ValueError:
            raise _DamageError(f"the header at byte {position} has no valid size", data) from None
        is_extension = kind in b"xL"
        if size is not None and kind not in b"xLgK":
            length = size
        if length > (min(end - data, _MAX_EXTENSION) if is_extension else end - data):
            raise _DamageError(f"{_member_name(header)} is cut off: it ends at byte {end}", data)
        if is_extension:
            try:
                name, size = _extended(kind, read_at(data, length), name, size)
            except ValueError:
                raise _DamageError(f"broken extended header at byte {position}", data + _padded(length)) from None
        elif kind not in b"gK":
            if after_gap and name is None and header[99]:
                raise _DamageError(f"the name of the member at byte {position} is lost", data + _padded(length))
            return Member(_member_name(header) if name is None else name, start, data, length, kind in _REGULAR_TYPES)
        position = data + _padded(length)


def _extended(kind: int, data: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Return name and size of the next member according to a GNU long name ("L") or a pax header ("x")."""
    if kind == ord("L"):
        return _text(data), size
    records = _pax_records(data)
    if "size" in records and not re.fullmatch("[0-9]{1,18}", records["size"]):
        raise ValueError(f"no size: {records['size']!r}")
    return records.get("path", name), int(records["size"]) if "size" in records else size


def _member_name(header: bytes) -> str:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        return _text(header[345:500]) + "/" + name
    return name


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into the key of its sample and the field; None if WebDataset skips the member."""
    folder, slash, file = name.rpartition("/")
    base, dot, field = file.partition(".")
    if not base or not dot or (name.startswith("__") and _METADATA.match(name)):
        return None
    return folder + slash + base, field.lower()


def group_samples(
    members: Iterable[Member], wanted: frozenset[str] | None = frozenset(), read_at: ReadAt | None = None
) -> Iterator[TarSample]:
    """Group members into samples. A field that occurs again begins a new sample, also under the same key.

    Read the content of the wanted fields (None: of all) with ``read_at``, but of none that is too large. Raise TarError if
    the file ends in one.
    """
    sample: TarSample | None = None
    found: set[str] = set()  # its fields, of which a wrongly named shard may have a million
    for member in members:
        parts = split_name(member.name) if member.is_file else None
        if parts is None:
            continue
        key, field = parts
        if sample is None or key != sample.key or field in found:
            if sample is not None:
                yield sample
            sample, found = TarSample(key, [], [], {}), set()
        sample.members.append(member)
        sample.found.append(field)
        found.add(field)
        if wanted is None or field in wanted:
            assert read_at is not None
            if member.size > _MAX_FIELD:
                sample.found[-1] = f"{field} of {member.size:,} bytes (at most {_MAX_FIELD:,})"
                continue
            data = sample.fields[field] = read_at(member.data, member.size)
            if len(data) < member.size:
                raise TarError(f"the file ends in {member.name}")
    if sample is not None:
        yield sample


class TarArchive:
    """A tar that is read once, from front to back, and decompressed if need be (gzip, bzip2, xz).

    Args:
        file: Open for reading bytes. If it can seek, unwanted content is not read.

    Attributes:
        gaps: What had to be skipped so far, with offsets in the decompressed tar; grows while iterating.
        read_at: Reads the content of the member that :meth:`members` has yielded last; it may be cut off.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.gaps: list[Gap] = []
        file = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
        magic = file.peek(8)
        decompress = next((opener for start, opener in _COMPRESSED.items() if magic.startswith(start)), None)
        # If the size is unknown, reading its data or the next header shows that a member is cut off.
        self._end = sys.maxsize
        self.read_at: ReadAt
        if decompress is not None:
            self.read_at = _forward(decompress(file))
        elif file.seekable():
            self._end = file.seek(0, io.SEEK_END)
            self.read_at = _seeking(file)
        else:
            self.read_at = _forward(file)

    def members(self) -> Iterator[Member]:
        """Yield the complete members; raise one of :data:`STREAM_ERRORS` if the file is broken or ends too soon."""
        return iter_members(self.read_at, self._end, self.gaps)

    def samples(self, wanted: frozenset[str] | None) -> Iterator[TarSample]:
        """Yield the samples with the content of the wanted fields (None: of all), and raise as :meth:`members`."""
        return group_samples(self.members(), wanted, self.read_at)


def _seeking(file: BinaryIO) -> ReadAt:
    def read_at(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    return read_at


def _forward(stream: BinaryIO) -> ReadAt:
    """Return ``read_at`` for a stream that cannot seek."""
    position = 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal position
        while position < offset:
            skipped = len(stream.read(min(offset - position, _STREAM_BUFFER)))
            if not skipped:
                return b""
            position += skipped
        data = stream.read(min(length, _MAX_READ))
        while len(data) < length and (more := stream.read(min(length - len(data), _MAX_READ))):
            data += more
        position += len(data)
        return data

    return read_at
