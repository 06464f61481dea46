"""Corrupt tar files: reading them must not hang or crash, and the scan must report lost samples.

Each case corrupts a small shard: it flips bits of headers, writes invalid header fields, or overwrites, removes or inserts
bytes. The number of samples lost in a corrupt range is estimated from the other samples. In up to 5 % of the cases, the
estimate may be too low.
"""

import contextlib
import json
import random
import signal
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from openclip_ext.data.manifest.scan import scan_shard
from openclip_ext.data.shards import tar
from tests.data.shards import image_bytes, set_field, write_tar
from tests.data.test_tar import HOSTILE_SIZES
from tests.soak import SoakCase

SAMPLES = 8
MUTATIONS_OF_A_CASE = 300
PATIENCE_SECONDS = 300
KEYS = ("png", "txt;json:caption")
SMALLEST_SAMPLE = 10_240


def caption_of(number: int) -> str:
    return f"sample {number} of {SAMPLES}"


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return shards with samples of 10 to 20 kB. Smaller samples could get lost in the zero padding at a tar's end."""
    shards, path = [], tmp_path_factory.mktemp("good") / "0.tar"
    for seed, tar_format in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        members = []
        for number in range(SAMPLES):
            # Every second name is long, because long names need extended headers (USTAR has none).
            is_short = number % 2 or tar_format == tarfile.USTAR_FORMAT
            key = f"{number:04d}" if is_short else f"{'x' * 110}{number:04d}"
            members += [
                (f"{key}.png", image_bytes(number, 58 + (7 * number + seed) % 22, "PNG")),
                (f"{key}.txt", caption_of(number).encode()),
                (f"{key}.json", json.dumps({"caption": caption_of(number), "width": seed}).encode()),
            ]
        shards.append(write_tar(path, members, tar_format=tar_format).read_bytes())
    return shards


def headers_of(data: bytearray) -> list[int]:
    return [at for at in range(0, len(data), tar.BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def flip_header_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 5))):
        data[rng.choice(headers_of(data)) + rng.randrange(tar.BLOCK)] ^= 1 << rng.randrange(8)


def hostile_field(data: bytearray, rng: random.Random) -> None:
    """Write random or invalid content into a header field, and update the checksum."""
    at = rng.choice(headers_of(data))
    begin, end = rng.choice(((124, 136), (124, 136), (156, 157), (0, 100), (257, 265), (345, 500), (100, 124)))
    junk = rng.choice(
        (
            rng.choice(HOSTILE_SIZES),
            b"\x80" + bytes(3) + rng.randbytes(8),
            b"%011o\0" % rng.randrange(1 << 33),
            rng.randbytes(end - begin),
            bytes(end - begin),
            rng.choice(b"0123456789xgLKSVDMN").to_bytes(1, "big") * (end - begin),
        )
    )
    set_field(data, at, begin, junk[: end - begin].ljust(end - begin, b"\0"))


def overwrite(data: bytearray, rng: random.Random) -> None:
    """Overwrite a range with zeros (like pages never written to disk) or random bytes (like pages of another file)."""
    page = rng.choice((1, 512, 4096))
    begin = rng.randrange(len(data)) // page * page
    length = min(rng.choice((16, 512, 4096, 40_000, len(data))), len(data) - begin)
    data[begin : begin + length] = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)


def remove(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    del data[begin : begin + rng.choice((1, 7, 100, 511, 512, 4096, 30_000, len(data)))]


def insert(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    data[begin:begin] = rng.randbytes(rng.choice((1, 7, 100, 511, 512, 4096, 30_000)))


MUTATIONS = 2 * (flip_header_bits, hostile_field) + (overwrite, remove, insert)


def mutate(base: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """Mutate a shard; return it, and whether the mutation removed a sample's size or more."""
    data = bytearray(base)
    rng.choice(MUTATIONS)(data, rng)
    return bytes(data), len(data) <= len(base) - SMALLEST_SAMPLE


def lost_samples(path: Path) -> int:
    """Return the number of lost samples. A sample with a changed image or caption does not count as lost."""
    texts: list[bytes] = []
    with open(path, "rb") as file, contextlib.suppress(*tar.STREAM_ERRORS):
        for sample in tar.TarArchive(file).samples(None):
            if sample.fields.get("png"):
                texts += filter(None, [sample.fields.get("txt") or sample.fields.get("json")])
    intact = {number for number in range(SAMPLES) if any(caption_of(number).encode() in text for text in texts)}
    changed = [text for text in texts if not any(caption_of(number).encode() in text for number in intact)]
    return max(0, SAMPLES - len(intact) - len(changed))


def outcome(path: Path, removed: bool) -> str:
    """Return the outcome: survived, lost, or undercounted (fewer samples reported than lost)."""
    lost, shard = lost_samples(path), scan_shard(str(path), *KEYS)
    problems = shard.problems
    if not shard.num_samples:  # a manifest reports it as empty or corrupt
        return "lost"
    counted = sum(problems.get(name, 0) for name in ("bad", "lost", "duplicate_keys"))
    assert not lost or counted or "error" in problems, f"lost {lost} samples without a report"
    is_estimated = not removed and "error" not in problems
    return "undercounted" if counted < lost and is_estimated else "lost" if lost else "survived"


@pytest.mark.soak(1)
def test_damaged_tars_neither_hang_nor_crash_nor_lose_silently(
    soak_case: SoakCase, good_shards: list[bytes], tmp_path: Path
) -> None:
    rng, found, path = soak_case.random(), Counter[str](), tmp_path / "0.tar"
    signal.alarm(PATIENCE_SECONDS)  # its default action kills a process that hangs
    for _ in range(MUTATIONS_OF_A_CASE):
        data, removed = mutate(rng.choice(good_shards), rng)
        path.write_bytes(data)
        found[outcome(path, removed)] += 1
    signal.alarm(0)
    # Check that the mutations are neither too strong nor too weak: many lose samples, and some lose none.
    assert found["lost"] > MUTATIONS_OF_A_CASE / 3 and found["survived"] > MUTATIONS_OF_A_CASE / 20
    assert found["undercounted"] <= MUTATIONS_OF_A_CASE / 20
