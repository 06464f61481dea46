"""The tar reader groups members into samples like webdataset. It detects corrupt bytes and continues after them."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from openclip_ext.data.manifest.scan import scan_shard
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.keys import ANY_FIELD
from tests.data.shards import sample_members, set_field, write_tar

ALL_FIELDS = frozenset({"jpg", "png", "txt", "json", "seg.png", "cls"})
# Long names need extended headers (pax, GNU). Members that webdataset skips must not change how the others are grouped.
ODD_MEMBERS = [
    ("__meta__/info.txt", b"metadata"),
    ("folder.with.dots/000.JPG", b"a" * 600),
    ("folder.with.dots/000.txt", b""),
    ("no_extension", b"skipped"),
    ("x/" + "y" * 120 + "/001.seg.png", b"b" * 512),
    ("x/" + "y" * 120 + "/001.txt", "grüße".encode()),
    ("x/" + "y" * 120 + "/001.jpg", b"c"),
    ("ünïcode-" + "z" * 150 + ".txt", b"d"),
    ("002.cls", b"7"),
    ("./003.cls", b"8"),
]


class Pipe(io.BytesIO):
    """A stream that cannot seek, like a pipe."""

    def seekable(self) -> bool:
        return False


def members_of(path: Path) -> list[tar.Member]:
    with open(path, "rb") as file:
        return list(tar.TarArchive(file).members())


def samples_of(path: Path) -> list[dict[str, bytes]]:
    with open(path, "rb") as file:
        return [sample.fields for sample in tar.TarArchive(file).samples(ALL_FIELDS)]


def streamed(path: Path) -> list[dict[str, bytes]]:
    return [sample.fields for sample in tar.TarArchive(Pipe(path.read_bytes())).samples(ALL_FIELDS)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_grouping_is_webdatasets(tmp_path: Path, tar_format: int):
    members = [*sample_members(0), *ODD_MEMBERS, *sample_members(1, ["txt", "png"])]
    if tar_format == tarfile.USTAR_FORMAT:
        members = [member for member in members if len(member[0].encode()) <= 200 and "z" * 150 not in member[0]]
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w", format=tar_format) as archive:
        folder = tarfile.TarInfo("a_folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("link.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
            archive.addfile(link)
    expected = [
        {field: data for field, data in sample.items() if not field.startswith("__")}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert len(expected) >= 6
    assert samples_of(path) == expected
    assert streamed(path) == expected
    with tarfile.open(path) as archive:
        theirs = [(info.name, info.size) for info in archive if info.isreg()]
    assert [(member.name, member.size) for member in members_of(path) if member.is_file] == theirs


def test_repeated_field_begins_a_new_sample(tmp_path: Path):
    path = write_tar(tmp_path / "0.tar", [("a.txt", b"1"), ("a.jpg", b"2"), ("a.txt", b"3"), ("b.txt", b"4")])
    expected = [{"txt": b"1", "jpg": b"2"}, {"txt": b"3"}, {"txt": b"4"}]
    assert samples_of(path) == streamed(path) == expected
    shard = scan_shard(str(path))
    assert shard.problems["duplicate_keys"] == 1
    # The digest must be the same in every version: otherwise earlier manifests would not match their data.
    assert shard.digest == "801457b41ba517e201f4252425548640"


@pytest.mark.parametrize("join", ["tar", "short end", "gzip", "three"])
def test_joined_archives_are_one(tmp_path: Path, join: str):
    """``cat a.tar b.tar`` gives a file with two end marks. Like webdataset, the reader continues after the first one."""
    mode = "w:gz" if join == "gzip" else "w"
    parts = [write_tar(tmp_path / f"{i}.tar", sample_members(i), mode).read_bytes() for i in range(2)]
    if join == "short end":  # some writers, such as Go's, do not pad the last record
        parts = [part.rstrip(b"\0") for part in parts]
        parts = [part + b"\0" * (-len(part) % tar.BLOCK + 2 * tar.BLOCK) for part in parts]
    elif join == "three":
        parts.append(write_tar(tmp_path / "2.tar", sample_members(2)).read_bytes())
    path = tmp_path / "joined.tar"
    path.write_bytes(b"".join(parts))
    expected = [{name.partition(".")[2]: data for name, data in sample_members(i)} for i in range(len(parts))]
    assert samples_of(path) == streamed(path) == expected
    shard = scan_shard(str(path))
    assert (shard.num_samples, shard.problems) == (len(expected), {})


def test_the_longest_padding_is_no_loss(tmp_path: Path):
    """After 19 of a record's 20 blocks, the end mark needs one more record, which it fills with zeros."""
    path = write_tar(tmp_path / "0.tar", [("a.jpg", bytes(18 * tar.BLOCK))], tar_format=tarfile.USTAR_FORMAT)
    path.write_bytes(path.read_bytes() * 2)
    assert path.stat().st_size == 80 * tar.BLOCK
    shard = scan_shard(str(path), caption_key=ANY_FIELD)
    assert (shard.num_samples, shard.problems) == (2, {"duplicate_keys": 1})


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sizes_beyond_octal_are_read(tmp_path: Path, tar_format: int):
    """For sizes of 8 GiB or more, GNU tar writes the size in base 256. The data are a hole in the file."""
    info = tarfile.TarInfo("big.jpg")
    info.size = 9 * 2**30 + 5
    header = info.tobuf(tar_format)
    (tmp_path / "0.tar").write_bytes(header)
    os.truncate(tmp_path / "0.tar", 10 * 2**30)
    with open(tmp_path / "0.tar", "rb") as file:
        member = next(tar.TarArchive(file).members())
    assert (member.size, member.name, member.data) == (info.size, "big.jpg", len(header))


def test_the_error_of_a_truncated_shard_names_the_file(tmp_path: Path):
    path = write_tar(tmp_path / "0.tar", sample_members(0))
    image = members_of(path)[0]
    os.truncate(path, image.data + image.size // 2)
    with path.open("rb") as file, pytest.raises(tar.TarError, match=f"truncated.*{image.name}"):
        list(tar.TarArchive(file).samples(None, [image]))


def test_a_damaged_header_costs_its_member_alone(tmp_path: Path):
    """If one bit of a header is flipped, only this member is lost; files and streams continue at the next header."""
    path = write_tar(tmp_path / "0.tar", [member for number in range(4) for member in sample_members(number)])
    whole = path.read_bytes()
    members, expected = members_of(path), samples_of(path)
    for number, member in enumerate(members):
        data = bytearray(whole)
        # Bytes 0 to 147 come before the checksum field, in which some flips have no effect.
        data[member.start + 37 * number % 148] ^= 1 << number % 8
        path.write_bytes(data)
        sample, field = number // 3, member.name.rpartition(".")[2]
        left = [{k: v for k, v in fields.items() if (n, k) != (sample, field)} for n, fields in enumerate(expected)]
        assert samples_of(path) == streamed(path) == left
        archive = tar.TarArchive(io.BytesIO(data))
        assert len(list(archive.members())) == 11
        assert archive.gaps == [(member.start, member.end)]
        scan = scan_shard(str(path))
        assert (scan.num_samples, scan.problems["gaps"]) == (4, [[member.start, member.end]])
        assert "error" not in scan.problems
        assert scan.problems.get("bad", 0) + scan.problems.get("lost", 0) >= (field != "json")
    path.write_bytes(b"this is not a tar" * 100)
    assert "no tar header at byte 0" in scan_shard(str(path)).problems["error"]


def test_a_name_that_is_cut_off_is_not_used(tmp_path: Path):
    """If the header with a long name is lost, the next header has only the first 100 bytes of the name."""
    names = ["a.txt", f"{'x' * 120}.txt", "b.txt"]
    path = write_tar(tmp_path / "0.tar", [(name, b"1") for name in names], tar_format=tarfile.GNU_FORMAT)
    whole, starts = path.read_bytes(), [member.start for member in members_of(path)]
    for lost, start in enumerate(starts):
        path.write_bytes(whole[:start] + b"?" + whole[start + 1 :])
        assert [member.name for member in members_of(path)] == names[:lost] + names[lost + 1 :]


HOSTILE_SIZES = [
    b"-0000001000\0",
    b"+0000001000\0",
    b"1_000\0" + bytes(6),
    b"9999999999\0\0",  # 9 is not an octal digit
    b"777777777777",
    b"\x80" + b"\xff" * 11,  # a huge number in base 256
    b"\xff" * 12,  # a negative number in base 256
]


@pytest.mark.parametrize("size", HOSTILE_SIZES)
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"g", b"S"])
def test_sizes_that_cannot_be(tmp_path: Path, size: bytes, kind: bytes):
    """In other readers, negative sizes caused endless loops, and huge sizes caused invalid offsets."""
    path = write_tar(tmp_path / "0.tar", [member for number in range(3) for member in sample_members(number)])
    data = bytearray(path.read_bytes())
    victim = members_of(path)[3].start
    set_field(data, victim, 124, size)
    set_field(data, victim, 156, kind)
    path.write_bytes(data)
    scan = scan_shard(str(path))
    assert (scan.num_samples, scan.problems["bad"]) == (3, 1)
    assert [len(fields) for fields in samples_of(path)] == [3, 2, 3]
    with contextlib.suppress(tar.TarError):  # the length of a pipe is unknown, so a huge size may be an error
        assert len(streamed(path)) == 3


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_tars_are_streams(tmp_path: Path, mode: str):
    members = [*sample_members(0), *sample_members(1)]
    path = write_tar(tmp_path / "0.tar.gz", members, mode)
    scan = scan_shard(str(path))
    assert (scan.num_samples, scan.problems) == (2, {})
    assert streamed(path) == streamed(write_tar(tmp_path / "0.tar", members))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = scan_shard(str(path))
    assert "error" in cut.problems
    # img2dataset's count is the only sign of how many samples are lost.
    (tmp_path / "0_stats.json").write_text(f'{{"successes": {cut.num_samples + 1}}}')
    assert scan_shard(str(path)).problems["lost"] == 1


@pytest.mark.parametrize(
    "records", [b"13 size=-512\n", b"29 size=99999999999999999999\n", b"-5 a=b\n", b"0 a=b\n", b"x"]
)
def test_pax_records_that_cannot_be(tmp_path: Path, records: bytes):
    extension = tarfile.TarInfo("pax")
    extension.type, extension.size = tarfile.XHDTYPE, len(records)
    path = write_tar(tmp_path / "0.tar", [*sample_members(0), *sample_members(1)])
    header = extension.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % tar.BLOCK)
    path.write_bytes(header + path.read_bytes())
    shard = scan_shard(str(path))
    assert (shard.num_samples, shard.problems["gaps"]) == (2, [[0, 1024]])


def test_every_cut_is_noticed(tmp_path: Path):
    """A file or stream that is cut anywhere yields the members before the cut, and then an error.

    If a broken connection looked like the end of the shard, samples would be lost without a report.
    """
    path = write_tar(tmp_path / "0.tar", [*sample_members(0), *sample_members(1), *sample_members(2)])
    whole, expected, members = path.read_bytes(), streamed(path), members_of(path)
    ends = [member.end for member in members[2::3]]
    for cut in range(0, ends[-1] + 1, 256):
        path.write_bytes(whole[:cut])
        shard = scan_shard(str(path))
        complete = int(np.searchsorted(ends, cut, side="right"))
        assert "error" in shard.problems and complete <= shard.num_samples <= complete + 1
        assert shard.num_samples - shard.problems.get("bad", 0) in (complete, shard.num_samples)
        for stream in (io.BytesIO(whole[:cut]), Pipe(whole[:cut])):
            received = []
            with pytest.raises((tar.TarError, EOFError)):
                received.extend(sample.fields for sample in tar.TarArchive(stream).samples(ALL_FIELDS))
            assert received == expected[: len(received)] and len(received) in (complete, complete - 1)


def test_a_member_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A compressed tar file of a megabyte may contain a member of gigabytes, which would fill the memory."""
    monkeypatch.setattr(tar, "_MAX_FIELD", 100)
    path = write_tar(tmp_path / "0.tar.gz", [("a.jpg", b"x" * 101), ("a.txt", b"a"), ("b.jpg", b"y" * 100)], "w:gz")
    with open(path, "rb") as file:
        first, second = tar.TarArchive(file).samples(ALL_FIELDS)
    assert first.fields == {"txt": b"a"} and first.found == ["jpg of 101 bytes (at most 100)", "txt"]
    assert second.fields == {"jpg": b"y" * 100}
