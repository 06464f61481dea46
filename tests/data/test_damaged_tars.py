"""Corrupt tar files: the loaders must not hang or crash, and must report lost samples.

Each case corrupts a small shard: it flips bits of headers, writes invalid header fields, or overwrites, removes or inserts
bytes. Then it scans the shard, reads an epoch for training, and reads it for evaluation. One of three results is correct: all
samples are read, the manifest or the loaders report lost samples, or the data are rejected with a message.

The number of samples lost in a corrupt range is estimated from the other samples. In up to 5 % of the cases, the estimate may
be too low.
"""

import json
import logging
import random
import signal
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.manifest.manifest import Manifest, ManifestError
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import build
from tests.data.shards import image_bytes, write_tar
from tests.data.test_tar import HOSTILE_SIZES
from tests.soak import SoakCase

SAMPLES = 8
MUTATIONS_OF_A_CASE = 100
PATIENCE_SECONDS = 60
CAPTION_KEY = "txt;json:caption"
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


# --- mutations --------------------------------------------------------------------------------------------------------


def headers_of(data: bytearray) -> list[int]:
    return [at for at in range(0, len(data), tar.BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def set_field(data: bytearray, at: int, begin: int, content: bytes) -> None:
    """Overwrite a field of the tar header at byte ``at``, and update the header's checksum."""
    header = data[at : at + tar.BLOCK]
    header[begin : begin + len(content)] = content
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + tar.BLOCK] = header


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


# --- results ----------------------------------------------------------------------------------------------------------


def tokenize(texts: list[str]) -> torch.Tensor:
    """Return the number of each sample, or -1 if its caption has changed."""
    numbers = []
    for text in texts:
        words = text.split()
        intact = len(words) == 4 and words[1].isascii() and words[1].isdigit() and text == caption_of(int(words[1]))
        numbers.append([int(words[1]) if intact else -1])
    return torch.tensor(numbers)


def preprocess(image: Image.Image) -> torch.Tensor:
    return torch.tensor(image.resize((1, 1)).getpixel((0, 0)))


def missing(numbers: list[int]) -> int:
    """Return the number of lost samples. A sample with a changed caption (number -1) does not count as lost."""
    return max(0, SAMPLES - len(set(numbers) - {-1}) - numbers.count(-1))


def stop(*_: Any) -> None:
    raise AssertionError(f"no result after {PATIENCE_SECONDS} s")


def train(folder: Path) -> tuple[int, int, bool]:
    """Return how many samples an epoch lost, how many the loader reports, and whether the manifest reports an error."""
    options = {"caption_key": CAPTION_KEY, "max_bad_fraction": 1e9, "batch_size": 1}
    loader = build(str(folder / "0.tar"), preprocess, tokenize, **options)
    # A sample that takes the place of a bad sample in a batch keeps its own index.
    came = {int(batch["index"]): int(batch["text"]) for batch in loader.iterate(0)}
    manifest = Manifest.load(folder / "manifest.json")
    problems = manifest.shards[0].problems
    counted = manifest.num_lost + sum(loader.bad.counts()) + problems.get("duplicate_keys", 0)
    return missing(list(came.values())), counted, "error" in problems


def evaluate(folder: Path) -> int:
    """Return the number of samples that the evaluation loader lost."""
    spec = DataSpec(str(folder / "0.tar"), "webdataset", caption_key=CAPTION_KEY)
    loader = build_eval_loader(spec, preprocess=preprocess, tokenizer=tokenize, batch_size=1)
    return missing([int(batch["text"]) for batch in loader])


def outcome(data: bytes, removed: bool, folder: Path, log: pytest.LogCaptureFixture) -> str:
    """Return the outcome: survived, lost, refused, or undercounted (fewer samples reported than lost)."""
    folder.mkdir()
    (folder / "0.tar").write_bytes(data)
    refused, lost, counted, cut_off = False, 0, 0, False
    try:
        lost, counted, cut_off = train(folder)
    except (ManifestError, BadDataError):
        refused = True
    log.clear()
    try:
        lost_in_evaluation = evaluate(folder)
        assert log.records or not lost_in_evaluation, f"evaluation lost {lost_in_evaluation} samples without a warning"
    except BadDataError:
        refused = True
    if refused:
        return "refused"
    assert not lost or counted or cut_off, f"training lost {lost} samples without a report"
    return "undercounted" if counted < lost and not (removed or cut_off) else "lost" if lost else "survived"


@pytest.mark.soak(1)
def test_damaged_tars_neither_hang_nor_crash_nor_lose_silently(
    soak_case: SoakCase, good_shards: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rng, found = soak_case.random(), Counter[str]()
    signal.signal(signal.SIGALRM, stop)
    for number in range(MUTATIONS_OF_A_CASE):
        data, removed = mutate(rng.choice(good_shards), rng)
        signal.alarm(PATIENCE_SECONDS)
        found[outcome(data, removed, tmp_path / str(number), caplog)] += 1
        signal.alarm(0)
    # Check that the mutations are neither too strong nor too weak: many lose samples, and some lose none.
    assert found["lost"] > MUTATIONS_OF_A_CASE / 3 and found["survived"] > MUTATIONS_OF_A_CASE / 20
    assert found["undercounted"] <= MUTATIONS_OF_A_CASE / 20
