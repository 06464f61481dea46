"""Write small WebDataset shards for the tests."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from openclip_ext.data.shards.tar import BLOCK, TarArchive

Members = Sequence[tuple[str, bytes]]


def image_bytes(number: int, size: int = 24, image_format: str = "JPEG") -> bytes:
    """Return an encoded image of random noise; each ``number`` gives a different image."""
    pixels = np.random.default_rng(number).integers(0, 255, (size, size + number % 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format)
    return buffer.getvalue()


def sample_members(number: int, fields: Iterable[str] = ("jpg", "txt", "json")) -> list[tuple[str, bytes]]:
    """Return (name, content) of each tar member of a sample; the caption is ``sample NUMBER``."""
    content = {
        "jpg": lambda: image_bytes(number),
        "png": lambda: image_bytes(number, image_format="PNG"),
        "txt": lambda: f"sample {number}".encode(),
        "json": lambda: f'{{"caption": "json {number}", "number": {number}}}'.encode(),
    }
    return [(f"{number:06d}.{field}", content[field]()) for field in fields]


def undecodable(number: int) -> list[tuple[str, bytes]]:
    """Return the members of a sample whose image is truncated, so that it cannot be decoded."""
    return [(name, data[: len(data) // 2] if name.endswith("jpg") else data) for name, data in sample_members(number)]


def write_tar(path: Path, members: Members, mode: str = "w", tar_format: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file with these members; ``mode`` is the argument of ``tarfile.open``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_shards(folder: Path, counts: Sequence[int], replaced: Mapping[int, Members] | None = None) -> list[str]:
    """Write shards ``00000.tar``, ``00001.tar``, ... with consecutive sample numbers; return the paths.

    Args:
        counts: number of samples in each shard.
        replaced: maps sample numbers to members that replace the usual members.
    """
    paths, number = [], 0
    for shard, count in enumerate(counts):
        members: list[tuple[str, bytes]] = []
        for _ in range(count):
            members += (replaced or {}).get(number, sample_members(number))
            number += 1
        paths.append(str(write_tar(folder / f"{shard:05d}.tar", members)))
    return paths


def write_sizes(folder: Path, counts: Sequence[int]) -> None:
    """Write ``sizes.json``, which lists the number of samples in each shard."""
    (folder / "sizes.json").write_text(json.dumps({f"{shard:05d}.tar": count for shard, count in enumerate(counts)}))


def sample_starts(path: str) -> list[int]:
    """Return the byte offset at which each sample of a shard starts."""
    with open(path, "rb") as file:
        return [sample.members[0].start for sample in TarArchive(file).samples(frozenset())]


def set_field(data: bytearray, at: int, begin: int, content: bytes) -> None:
    """Overwrite a field of the tar header at byte ``at``, and update the header's checksum."""
    header = data[at : at + BLOCK]
    header[begin : begin + len(content)] = content
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + BLOCK] = header


def write_csv(
    folder: Path, rows: int = 30, separator: str = "\t", columns: tuple[str, str] = ("filepath", "title")
) -> Path:
    """Write images, and a CSV file with their paths and the captions ``sample ROW``; return the path of the CSV file."""
    lines = [separator.join(["number", *columns])]
    for row in range(rows):
        (folder / f"{row}.jpg").write_bytes(image_bytes(row))
        lines.append(separator.join([str(row), str(folder / f"{row}.jpg"), f"sample {row}"]))
    path = folder / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
