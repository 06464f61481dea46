"""What the makers of image-text shards have in common: a seeded order, whole folders only, and the shards themselves.

A folder of theirs holds what :mod:`openclip_ext.experiments.grid` and ``openclip-ext compare`` read::

    train/, val/, test/   WebDataset shards (png, txt, json, cls)
    names.txt             the canonical names, one a line; ``cls`` is the line number, from 0
    recipe.json           the arguments that the bytes follow from
"""

import argparse
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

RECIPE = "recipe.json"
SPLITS = ("train", "val", "test")
SAMPLES_PER_SHARD = 1000


@dataclass(frozen=True)
class Pair:
    """One sample.

    Attributes:
        png: the image.
        caption: the text.
        described: what else is known; ``name`` is what the image shows, equal for all images of the same thing.
    """

    png: bytes
    caption: str
    described: dict[str, Any]


def program(doc: str, name: str) -> argparse.ArgumentParser:
    """Return the command line of a maker, described by its module's first line."""
    return argparse.ArgumentParser(
        prog=f"python -m scripts.experiments.{name}",
        description=doc.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def seeded_order(seed: int) -> Callable[[str], bytes]:
    """A sorting key that shuffles strings, the same on every machine."""
    return lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest()


def batched(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Tuples of ``size`` items, the last one shorter (Python 3.12 has it in itertools)."""
    iterator = iter(items)
    while part := tuple(islice(iterator, size)):
        yield part


def png_on_white(image: Image.Image) -> bytes | None:
    """The image on white as PNG, without metadata; None if nothing is to be seen."""
    image = image.convert("RGBA")
    flat = Image.new("RGBA", image.size, "white")
    flat.alpha_composite(image)
    flat = flat.convert("RGB")
    if all(low == high for low, high in flat.getextrema()):
        return None
    buffer = io.BytesIO()
    flat.save(buffer, format="PNG")
    return buffer.getvalue()


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``output`` at the end: a killed call leaves none that looks finished.

    Raises:
        ValueError: the folder exists.
    """
    if output.exists():
        raise ValueError(f"{output} exists: choose another folder, or remove it")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(output)


def write_names(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Write ``names.txt``; returns each name's number."""
    ordered = sorted(set(names))
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in ordered))
    return {name: number for number, name in enumerate(ordered)}


def write_shards(folder: Path, pairs: Iterable[Pair], classes: dict[str, int]) -> None:
    """Write a split: equal pairs give equal bytes."""
    folder.mkdir()
    for number, part in enumerate(batched(pairs, SAMPLES_PER_SHARD)):
        with tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for position, pair in enumerate(part):
                members = {
                    "png": pair.png,
                    "txt": pair.caption.encode(),
                    "json": json.dumps(pair.described).encode(),
                    "cls": str(classes[pair.described["name"]]).encode(),
                }
                for extension, content in members.items():
                    member = tarfile.TarInfo(f"{number * SAMPLES_PER_SHARD + position:08d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
