"""Tars that are damaged in many ways: nothing may hang, crash, or be lost without a word.

Each mutation damages a small shard (flipped bits, hostile header fields, overwritten, cut, removed or inserted bytes, hostile
captions), then counts it (manifest), trains an epoch on it and evaluates on it. Every sample must come, or the manifest or
the loaders say that some did not, or the data are refused as a whole, with a message.

How many samples a damaged stretch held is estimated from the others, and rarely too low.
"""

import io
import json
import logging
import random
import re
import signal
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from openclip_ext.data import tar
from openclip_ext.data.build import build_eval_loader, build_train_loader
from openclip_ext.data.manifest import Manifest, ManifestError
from openclip_ext.data.source import BadDataError
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig
from tests.soak import SoakCase

SAMPLES = 8
MUTATIONS_OF_A_CASE = 100
PATIENCE_SECONDS = 60
CAPTION_KEY = "txt;json:caption"
SMALLEST_SAMPLE = 10_240


def caption_of(number: int) -> str:
    return f"sample {number} of {SAMPLES}"


def make_shard(seed: int, tar_format: int, fields: tuple[str, ...]) -> bytes:
    """A good shard. Samples have 10 to 20 kB: a smaller one could hide in the zeros that fill up a tar's last record."""
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for number in range(SAMPLES):
            picture = io.BytesIO()
            side = int(rng.integers(58, 80))
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(picture, "PNG")
            content = {
                "png": picture.getvalue(),
                "txt": caption_of(number).encode(),
                "json": json.dumps({"caption": caption_of(number), "width": side}).encode(),
            }
            # Long names need extended headers, every second one for the mixture.
            key = f"{number:04d}" if number % 2 or tar_format == tarfile.USTAR_FORMAT else f"{'x' * 110}{number:04d}"
            for name in fields:
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(content[name])
                archive.addfile(info, io.BytesIO(content[name]))
    return buffer.getvalue()


@cache
def good_shards() -> list[bytes]:
    return [
        make_shard(seed, tar_format, fields)
        for seed, tar_format in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        for fields in (("png", "txt", "json"), ("txt", "png"), ("json", "png"))
    ]


# --- mutations -------------------------------------------------------------------------------------------------------


def headers_of(data: bytearray) -> list[int]:
    return [at for at in range(0, len(data), tar.BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def set_field(data: bytearray, at: int, begin: int, content: bytes) -> None:
    """Write a field of the header at ``at``, and the checksum that fits."""
    header = data[at : at + tar.BLOCK]
    header[begin : begin + len(content)] = content
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + tar.BLOCK] = header


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_header_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 5))):
        data[rng.choice(headers_of(data)) + rng.randrange(tar.BLOCK)] ^= 1 << rng.randrange(8)


def hostile_field(data: bytearray, rng: random.Random) -> None:
    """A header that says nonsense under a right checksum."""
    at = rng.choice(headers_of(data))
    begin, end = rng.choice(((124, 136), (124, 136), (156, 157), (0, 100), (257, 265), (345, 500), (100, 124)))
    junk = rng.choice(
        (
            b"-0000001000\0",
            b"-1\0",
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"\x80" + bytes(3) + rng.randbytes(8),
            b"%011o\0" % rng.randrange(1 << 33),
            b"777777777777",
            rng.randbytes(end - begin),
            bytes(end - begin),
            rng.choice(b"0123456789xgLKSVDMN").to_bytes(1, "big") * (end - begin),
        )
    )
    set_field(data, at, begin, junk[: end - begin].ljust(end - begin, b"\0"))


def overwrite(data: bytearray, rng: random.Random) -> None:
    """Pages that were never written, or written by somebody else."""
    page = rng.choice((1, 512, 4096))
    begin = rng.randrange(len(data)) // page * page
    length = min(rng.choice((16, 512, 4096, 40_000, len(data))), len(data) - begin)
    data[begin : begin + length] = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def remove(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    del data[begin : begin + rng.choice((1, 7, 100, 511, 512, 4096, 30_000))]


def insert(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    data[begin:begin] = rng.randbytes(rng.choice((1, 7, 100, 511, 512, 4096, 30_000)))


def repeat(data: bytearray, rng: random.Random) -> None:
    """A stretch that was written twice."""
    begin = rng.randrange(len(data)) // tar.BLOCK * tar.BLOCK
    data[begin:begin] = data[begin : begin + tar.BLOCK * rng.choice((1, 2, 8, 40))]


def hostile_caption(data: bytearray, rng: random.Random) -> None:
    """A member with other content, whose header is right."""
    content = rng.choice(
        (b"[" * 2000, b"[" * 60_000, b'{"caption": ' * 3000, b'{"caption": "\\ud800"}', b"9" * 5000, b"\xff\xfe", b"")
    )
    name = b"0003." + rng.choice((b"json", b"txt", b"png")) + b"\0"
    found = [at for at in headers_of(data) if data[at : at + 100].startswith(name)]
    if not found or not re.fullmatch(rb"[0-7]{11}", data[found[0] + 124 : found[0] + 135]):
        return
    at = found[0]
    size = int(data[at + 124 : at + 135], 8)
    set_field(data, at, 124, b"%011o\0" % len(content))
    data[at + tar.BLOCK : at + tar.BLOCK + size + -size % tar.BLOCK] = content + bytes(-len(content) % tar.BLOCK)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits,
    flip_header_bits,
    flip_header_bits,
    hostile_field,
    hostile_field,
    overwrite,
    truncate,
    remove,
    insert,
    repeat,
    hostile_caption,
)


def mutate(base: bytes, rng: random.Random) -> tuple[bytes, str, bool]:
    """Return a shard after one or two mutations, their names, and whether they removed as many bytes as a sample has."""
    data, names, removed = bytearray(base), [], False
    for _ in range(rng.choice((1, 1, 1, 2))):
        if headers_of(data):
            mutation, before = rng.choice(MUTATIONS), len(data)
            mutation(data, rng)
            names.append(mutation.__name__)
            removed |= len(data) <= before - SMALLEST_SAMPLE
    return bytes(data), "+".join(names), removed


# --- what is left ----------------------------------------------------------------------------------------------------


def tokenize(text: str) -> torch.Tensor:
    """The sample's number; -1 for a caption that is no longer as it was."""
    words = text.split()
    intact = len(words) == 4 and words[1].isascii() and words[1].isdigit() and text == caption_of(int(words[1]))
    return torch.tensor([[int(words[1]) if intact else -1]])


def preprocess(image: Image.Image) -> torch.Tensor:
    return torch.tensor(image.resize((1, 1)).getpixel((0, 0)))


def missing(numbers: list[int]) -> int:
    """How many samples did not come. One whose caption was changed came, too: nothing tells which one it was."""
    return max(0, SAMPLES - len(set(numbers) - {-1}) - numbers.count(-1))


@contextmanager
def patience() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise AssertionError(f"longer than {PATIENCE_SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def train(folder: Path) -> tuple[int, int, bool]:
    """Samples that did not come in an epoch, how many were counted, and whether the manifest says that it was cut off."""
    spec = DataSpec(str(folder / "0.tar"), "webdataset", caption_key=CAPTION_KEY, max_bad_fraction=1e9)
    for _ in range(2):  # the second start reads the manifest
        loader = build_train_loader(spec, TrainLoaderConfig(1), preprocess=preprocess, tokenizer=tokenize)
    batches = list(loader.iterate(0))
    # A sample that stands in for a bad one carries its own index.
    came = {int(batch["index"]): int(batch["text"]) for batch in batches}
    manifest = Manifest.load(folder / "manifest.json")
    problems = manifest.shards[0].problems
    counted = manifest.num_lost + sum(loader.bad.counts()) + problems.get("duplicate_keys", 0)
    return missing(list(came.values())), counted, "error" in problems


def evaluate(folder: Path) -> int:
    """Samples that did not come."""
    spec = DataSpec(str(folder / "0.tar"), "webdataset", caption_key=CAPTION_KEY)
    loader = build_eval_loader(spec, preprocess=preprocess, tokenizer=tokenize, batch_size=1)
    return missing([int(batch["text"]) for batch in loader])


def outcome(data: bytes, removed: bool, folder: Path, log: pytest.LogCaptureFixture) -> str:
    """What became of a shard: survived, lost, refused, or undercounted, where samples were lost and more than counted."""
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
        assert log.records or not lost_in_evaluation, f"evaluation: {lost_in_evaluation} are missing without a word"
    except BadDataError:
        refused = True
    if refused:
        return "refused"
    assert not lost or counted or cut_off, f"training: {lost} are missing without a word"
    return "undercounted" if counted < lost and not (removed or cut_off) else "lost" if lost else "survived"


def outcomes(case: SoakCase, count: int, folder: Path, log: pytest.LogCaptureFixture) -> Counter[str]:
    """How often what became of the case's mutations; a silent one is named with its reason."""
    log.set_level(logging.WARNING)
    rng, found = case.random(), Counter[str]()
    for number in range(count):
        data, name, removed = mutate(rng.choice(good_shards()), rng)
        try:
            with patience():
                found[outcome(data, removed, folder / str(number), log)] += 1
        except Exception as error:
            found[f"silent: mutation {number} ({name}): {type(error).__name__}: {error}"] += 1
    return found


@pytest.mark.soak(1)
def test_damaged_tars_neither_hang_nor_crash_nor_lose_silently(
    soak_case: SoakCase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = outcomes(soak_case, MUTATIONS_OF_A_CASE, tmp_path, caplog)
    assert found.keys() <= {"survived", "lost", "refused", "undercounted"}
    # The mutations are no mere noise: most lose something, some nothing.
    assert found["lost"] > MUTATIONS_OF_A_CASE / 3 and found["survived"] > MUTATIONS_OF_A_CASE / 20
    assert found["undercounted"] <= MUTATIONS_OF_A_CASE / 20


def test_a_scan_that_forgot_what_it_has_lost_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Manifest, "num_lost", 0)
    found = outcomes(SoakCase(1, 0), 40, tmp_path, caplog)
    assert any("missing without a word" in what for what in found)
