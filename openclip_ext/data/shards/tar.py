"""Read the samples in a tar file, grouped as in WebDataset. The package reads all its tars with this module.

A sample is a run of consecutive regular members that share the name up to the first dot of the file name. The rest of the name
is the field ("jpg", "txt", ...), in lower case. Python's ``tarfile`` is not used, because it is ten times slower and does not
detect a truncated file.
"""

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from openclip_ext.data.remote import BUFFER

BLOCK = 512
_ZEROS = bytes(BLOCK)
# In bytes. An archive ends with two blocks of zeros, then zeros up to a full record of 20 blocks. More zeros mean lost data.
_END_OF_ARCHIVE, _RECORD = 2 * BLOCK, 20 * BLOCK
_MAX_PADDING = _RECORD + BLOCK
# Limits in bytes, because a corrupt header may contain any size.
_MAX_EXTENSION = 1 << 20  # a long name or pax records
_MAX_FIELD = 1 << 28  # an image or a caption
_MAX_READ = 1 << 26  # a single read, which allocates this memory
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_METADATA = re.compile(r"__[^/]*__($|/)")
_REGULAR_TYPES = frozenset(b"0\x007")
# Links, devices, directories and pipes have no data, even if their size field is not 0.
_DATALESS_TYPES = frozenset(b"123456")


class TarError(ValueError):
    """A tar file is truncated or corrupt."""


class _CorruptHeaderError(TarError):
    """A header is not readable. The search for the next header starts at byte ``resume``."""

    def __init__(self, message: str, resume: int) -> None:
        super().__init__(message)
        self.resume = resume


class _EndOfFileError(TarError):
    """The file ends at byte ``end``, without the end-of-archive mark."""

    def __init__(self, end: int) -> None:
        super().__init__(f"it ends at byte {end}, without the end-of-archive mark")
        self.end = end


# Errors when reading a broken stream, including the errors of the decompressors.
STREAM_ERRORS = (TarError, OSError, EOFError, lzma.LZMAError, zlib.error)


class Member(NamedTuple):
    """One member of a tar, with offsets in bytes from the start of the file."""

    name: str
    start: int  # first byte of the member's headers, including long names and pax records
    data: int
    size: int
    is_file: bool

    @property
    def end(self) -> int:
        """First byte after the data and its padding."""
        return self.data + _padded(self.size)


class Gap(NamedTuple):
    """Bytes of a tar that belong to no readable member."""

    start: int
    end: int


class TarSample(NamedTuple):
    """One sample of a tar."""

    key: str  # the part of the name that all members of the sample share
    members: list[Member]
    found: list[str]  # the field of each member
    fields: dict[str, bytes]  # the content of each wanted field


# Function that receives an offset and a number of bytes, and returns up to this many bytes. Later calls have larger offsets.
ReadAt = Callable[[int, int], bytes]


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _number(field: bytes) -> int:
    """Return a number from a tar header: octal digits, or base-256 bytes after 0x80 (GNU tar, for sizes from 8 GiB)."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0].strip()
    if text and not text.isdigit():  # int() would also accept signs and underscores
        raise ValueError(f"no octal number: {field!r}")
    return int(text or b"0", 8)


def _text(field: bytes) -> str:
    # Names appear in messages and logs, so control characters are escaped.
    text = field.partition(b"\0")[0].decode("utf-8", "backslashreplace")
    return text if text.isprintable() else _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _has_checksum(header: bytes) -> bool:
    """Return whether a header has the right checksum. It is the sum of all bytes, with eight blanks in the checksum field.

    The blanks add 8 * 32 = 256. The lower half of Adler-32 is the sum plus 1, modulo 65521. Adler-32 is a hundred times
    faster than ``sum(header)``.
    """
    try:
        expected = _number(header[148:156])
    except ValueError:
        return False
    total = (zlib.adler32(header) & 0xFFFF) - 1
    return (total - sum(header[148:156]) + 256 - expected) % 65521 == 0


def _pax_records(data: bytes) -> dict[str, str]:
    """Return the records of an extended pax header, whose format is "LENGTH KEY=VALUE\\n"."""
    records = {}
    while data and data[0]:
        length = int(data.partition(b" ")[0])
        if length <= 0:
            raise ValueError(length)
        key, _, value = data[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        records[key.decode()] = _text(value)
        data = data[length:]
    return records


def _read_member(read_at: ReadAt, start: int, end: int, after_gap: bool) -> Member | None:
    """Return the member whose first header is at ``start``; None for a block of zeros. Raise TarError if it is unreadable.

    After a gap, a name that fills its field is rejected, because the header with the full name may be lost in the gap.
    """
    position, name, size = start, None, None
    while True:
        header = read_at(position, BLOCK)
        data = position + BLOCK
        if len(header) < BLOCK:
            raise _EndOfFileError(position + len(header))
        if position == start and header == _ZEROS:
            return None
        if not _has_checksum(header):
            raise _CorruptHeaderError(f"no tar header at byte {position}", data)
        kind = header[156]
        try:
            length = 0 if kind in _DATALESS_TYPES else _number(header[124:136])
        except ValueError:
            raise _CorruptHeaderError(f"the header at byte {position} has no valid size", data) from None
        is_extension = kind in b"xL"
        if size is not None and kind not in b"xLgK":
            length = size
        if length > (min(end - data, _MAX_EXTENSION) if is_extension else end - data):
            raise _CorruptHeaderError(f"the tar ends inside {_member_name(header)}, at byte {end}", data)
        following = data + _padded(length)
        if is_extension:
            try:
                name, size = _extended(kind, read_at(data, length), name, size)
            except ValueError:
                raise _CorruptHeaderError(f"broken extended header at byte {position}", following) from None
        elif kind not in b"gK":
            if after_gap and name is None and header[99]:
                raise _CorruptHeaderError(f"the full name of the member at byte {position} is lost", following)
            return Member(_member_name(header) if name is None else name, start, data, length, kind in _REGULAR_TYPES)
        position = following


def _extended(kind: int, data: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Return the name and the size of the next member, updated from a GNU long name ("L") or a pax header ("x")."""
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
    if not base or not dot or _METADATA.match(name):
        return None
    return folder + slash + base, field.lower()


class TarArchive:
    """A tar that is read once, from front to back. A compressed tar (gzip, bzip2, xz) is decompressed.

    Args:
        file: A file that is open for reading bytes. Unwanted content is not read if the file can seek.

    Attributes:
        gaps: The corrupt parts found so far, as offsets in the decompressed tar. The list grows during iteration.
        read_at: Function that reads the content of the latest member of :meth:`members`. The content may be truncated.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.gaps: list[Gap] = []
        file = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
        magic = file.peek(8)
        decompress = next((opener for start, opener in COMPRESSED.items() if magic.startswith(start)), None)
        # If the size is unknown, a truncated member is detected only by reading its data or the next header.
        self._end = sys.maxsize
        self.read_at: ReadAt
        if decompress is not None:
            self.read_at = _forward(decompress(file))
        elif file.seekable():
            self._end = file.seek(0, io.SEEK_END)
            self.read_at = partial(_seek_and_read, file)
        else:
            self.read_at = _forward(file)

    def members(self) -> Iterator[Member]:
        """Yield the complete members in order, without reading their data. A gap is recorded before the member after it.

        After a corrupt header, reading continues at the next valid header, as in GNU tar. Joined archives
        (``cat a.tar b.tar``) are read as one archive. If the file is broken or lacks the end-of-archive mark, one of
        :data:`STREAM_ERRORS` is raised, and the last gap extends to the end of the file.
        """
        # good_end: end of the last good member; archive: start of the current archive, if several are joined
        position = good_end = archive = 0
        zeros: int | None = None  # start of the blocks of zeros directly before `position`
        damage: TarError | None = None  # the first error since the last good member
        while True:
            try:
                member = _read_member(self.read_at, position, self._end, after_gap=position > good_end)
            except _CorruptHeaderError as error:
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
            padding = 0 if zeros is None else position - zeros
            is_filled = _END_OF_ARCHIVE < padding <= _MAX_PADDING and (position - archive) % _RECORD == 0
            # With the right number of zeros, a joined archive starts here. Any other number means lost data.
            if zeros == good_end and damage is None and (padding == _END_OF_ARCHIVE or is_filled):
                archive = position
            elif position > good_end:
                self.gaps.append(Gap(good_end, position))
            yield member
            position = good_end = member.end
            zeros = damage = None
        if zeros is None:
            self.gaps.append(Gap(good_end, file_end))
            raise damage
        if zeros > good_end:
            self.gaps.append(Gap(good_end, zeros))
        if file_end - zeros > _MAX_PADDING:
            self.gaps.append(Gap(zeros, file_end))

    def samples(
        self, wanted: frozenset[str] | None, members: Iterable[Member] | None = None, skip: int = 0
    ) -> Iterator[TarSample]:
        """Yield the samples with the content of the wanted fields (None means all). A field above 256 MiB is not read.

        A repeated field starts a new sample, even if the key is equal. ``members`` replaces :meth:`members`, for example to
        handle its errors. The content of the first ``skip`` samples is not read. If the file ends within a field, raise
        TarError.
        """
        sample: TarSample | None = None
        count = 0
        found: set[str] = set()  # the sample's fields; a set, because wrong names can give a sample a million fields
        for member in self.members() if members is None else members:
            parts = split_name(member.name) if member.is_file else None
            if parts is None:
                continue
            key, field = parts
            if sample is None or key != sample.key or field in found:
                if sample is not None:
                    yield sample
                sample, found = TarSample(key, [], [], {}), set()
                count += 1
            sample.members.append(member)
            sample.found.append(field)
            found.add(field)
            if count > skip and (wanted is None or field in wanted):
                if member.size > _MAX_FIELD:
                    sample.found[-1] = f"{field} of {member.size:,} bytes (at most {_MAX_FIELD:,})"
                    continue
                data = sample.fields[field] = self.read_at(member.data, member.size)
                if len(data) < member.size:
                    raise TarError(f"the shard is truncated inside {member.name}")
        if sample is not None:
            yield sample


def _seek_and_read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _forward(stream: BinaryIO) -> ReadAt:
    """Return ``read_at`` for a stream that cannot seek."""
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        data = stream.read(min(count, _MAX_READ))
        position += len(data)
        return data

    def read_at(offset: int, length: int) -> bytes:
        while position < offset:
            if not read(min(offset - position, BUFFER)):
                return b""
        data = read(length)
        while len(data) < length and (more := read(length - len(data))):
            data += more
        return data

    return read_at
