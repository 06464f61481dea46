"""Damage tars in many ways and look at what is left: nothing may hang, crash, or be lost without a word.

    python scripts/fuzz_tars.py --mutations 10000 --seed 0

Each mutation damages a small shard (flipped bits, hostile header fields, overwritten, cut, removed or inserted bytes,
hostile captions), then counts it (manifest), trains an epoch on it and evaluates on it. A mutation is

- *survived* if every sample came,
- *lost* if some did not, and the manifest or the loaders said so,
- *refused* if the data were refused as a whole, with a message,
- *silent* if it hung, raised anything else, or samples were missing without a word.

How many samples a damaged stretch held is estimated from the others. The last line says how often that was too low.
"""

import argparse
import io
import json
import logging
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from openclip_ext.data import shards, tar
from openclip_ext.data.build import build_eval_loader, build_train_loader
from openclip_ext.data.manifest import Manifest, ManifestError
from openclip_ext.data.source import BadDataError
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig

SAMPLES = 8
PATIENCE_SECONDS = 60
CAPTION_KEY = "txt;json:caption"
SMALLEST_SAMPLE = 10_240


class HangError(Exception):
    """A mutation took longer than its patience."""


# --- shards ----------------------------------------------------------------------------------------------------------


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


def base_shards() -> list[bytes]:
    return [
        make_shard(seed, tar_format, fields)
        for seed, tar_format in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        for fields in (("png", "txt", "json"), ("txt", "png"), ("json", "png"))
    ]


# --- mutations -------------------------------------------------------------------------------------------------------

Mutation = Callable[[bytearray, random.Random], None]


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
    stretch = data[begin : begin + tar.BLOCK * rng.choice((1, 2, 8, 40))]
    data[begin:begin] = stretch


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


MUTATIONS: tuple[Mutation, ...] = (
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
    """One or two mutations of a shard, their names, and whether they removed as many bytes as a sample has."""
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


class CountingHandler(logging.Handler):
    """Keeps what the loaders log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def patience(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise HangError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, root = CountingHandler(), logging.getLogger()
    handlers, root.handlers = root.handlers, [handler]
    try:
        yield handler.lines
    finally:
        root.handlers = handlers


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
    counted = manifest.num_lost + sum(loader.bad_samples().values()) + problems.get("duplicate_keys", 0)
    return missing(list(came.values())), counted, "error" in problems


def evaluate(folder: Path) -> tuple[int, bool]:
    """Samples that did not come, and whether the loader said that something is wrong."""
    spec = DataSpec(str(folder / "0.tar"), "webdataset", caption_key=CAPTION_KEY)
    loader = build_eval_loader(spec, preprocess=preprocess, tokenizer=tokenize, batch_size=1)
    with logged() as lines:
        numbers = [int(batch["text"]) for batch in loader]
    return missing(numbers), bool(lines)


def outcome(data: bytes, folder: Path) -> tuple[str, int, int, bool]:
    """What became of a shard (survived, lost, refused), samples lost in training, those counted, and if it was cut."""
    (folder / "0.tar").write_bytes(data)
    refused = lost = counted = 0
    cut_off = False
    try:
        with logged():
            lost, counted, cut_off = train(folder)
    except (ManifestError, BadDataError):
        refused += 1
    try:
        lost_in_evaluation, was_said = evaluate(folder)
    except BadDataError:
        refused += 1
    else:
        if lost_in_evaluation and not was_said:
            raise AssertionError(f"evaluation: {lost_in_evaluation} samples are missing without a word")
    if refused:
        return "refused", SAMPLES, SAMPLES, cut_off
    if lost and not (counted or cut_off):
        raise AssertionError(f"training: {lost} samples are missing without a word")
    return "lost" if lost else "survived", lost, counted, cut_off


@dataclass
class Result:
    """Of a whole fuzz.

    Attributes:
        outcomes: Mutations by what became of them: survived, lost, refused, silent.
        by_mutation: The same for each kind of mutation.
        lost, counted: Samples, where not all were refused.
        undercounted: Mutations whose estimate of lost samples was too low, although no bytes of a sample or more were
            removed from the file.
        failures: What was silent: number, mutation, reason.
        slowest: Seconds of the slowest mutation.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    by_mutation: dict[str, Counter[str]] = field(default_factory=dict)
    lost: int = 0
    counted: int = 0
    undercounted: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: float = 0.0


def fuzz(numbers: range, seed: int, keep: Path | None = None) -> Result:
    """Mutations ``numbers`` of a seed; each depends on the seed and its number alone.

    Args:
        numbers: Which.
        seed: What they depend on.
        keep: Where to leave the shards that failed.
    """
    bases, result = base_shards(), Result()
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        data, name, removed = mutate(rng.choice(bases), rng)
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                with patience(PATIENCE_SECONDS):
                    what, lost, counted, cut_off = outcome(data, Path(folder))
                if what == "lost":
                    result.lost += lost
                    result.counted += counted
                    result.undercounted += counted < lost and not removed and not cut_off
            except Exception as error:
                what = "silent"
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                result.failures.append((number, name, f"{type(error).__name__}: {error} ({where})"))
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path(folder) / "0.tar", keep / f"{seed}-{number}.tar")
        result.slowest = max(result.slowest, time.perf_counter() - begin)
        result.outcomes[what] += 1
        result.by_mutation.setdefault(name, Counter())[what] += 1
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first, to repeat one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the shards that failed")
    args = parser.parse_args(argv)
    shards._STREAM_ATTEMPTS = 1  # a local file does not get better
    begin = time.perf_counter()
    result = fuzz(range(args.first, args.first + args.mutations), args.seed, args.keep)
    for name, outcomes in sorted(result.by_mutation.items()):
        if "+" not in name:
            print(f"{name:<20}{dict(outcomes)}")
    for number, name, reason in result.failures[:50]:
        print(f"SILENT {number} ({name}): {reason}")
    print(
        f"{args.mutations} mutations, seed {args.seed}: {dict(result.outcomes)}; "
        f"{result.lost} samples lost and {result.counted} counted in the {result.outcomes['lost']} that lost some, "
        f"too few in {result.undercounted}; "
        f"slowest {result.slowest:.2f} s, {time.perf_counter() - begin:.0f} s in all"
    )
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
