"""Code shared by the programs that make image-text shards: seeded order, complete output folders, and writing shards.

:mod:`scripts.experiments.grid` and ``openclip-ext compare`` read the output folder::

    train/, val/, test/   WebDataset shards (png, txt, json, cls)
    names.txt             the canonical names, one per line; ``cls`` is the line number, from 0
    recipe.json           the arguments that determine the bytes
"""

import argparse
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image

from openclip_ext.cli.options import own_options
from openclip_ext.training.parser import add_flag

SPLITS = ("train", "val", "test")
SAMPLES_PER_SHARD = 1000


@dataclass(frozen=True)
class Pair:
    """An image with its caption.

    Attributes:
        described: Metadata of the image. ``name`` is the canonical name, which is equal for all images of one thing.
    """

    png: bytes
    caption: str
    described: dict[str, Any]


def program(doc: str, config: type) -> argparse.ArgumentParser:
    """Return a parser with the flags of a configuration. The parser's description is the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="new folder, outside the repository")
    for option in own_options([config]):
        add_flag(parser, option, default=option.default)
    return parser


def seeded_order(seed: int) -> Callable[[str], bytes]:
    """Return a sorting key that shuffles strings. ``seed`` determines the order, which is the same on every machine."""
    return lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest()


def png_on_white(image: Image.Image) -> bytes | None:
    """Return the image on a white background, as a PNG without metadata; None if it is blank."""
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
def complete_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``output`` at the end. ``output`` never exists with partial content."""
    if output.exists():
        raise ValueError(f"{output} already exists: remove it, or give another --output")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(output)


def write_dataset(
    folder: Path, splits: Mapping[str, Iterable[Pair]], names: Iterable[str], recipe: Mapping[str, Any]
) -> None:
    """Write the splits, ``names.txt`` and ``recipe.json``. ``names`` must contain the names of all pairs."""
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in classes))
    for split in SPLITS:
        (folder / split).mkdir()
        # With a fixed modification time, equal pairs give equal bytes.
        pattern, options = str(folder / split / "%05d.tar"), {"maxcount": SAMPLES_PER_SHARD, "mtime": 0, "verbose": 0}
        with webdataset.ShardWriter(pattern, **options) as writer:
            for number, pair in enumerate(splits[split]):
                fields = {"png": pair.png, "txt": pair.caption, "json": pair.described}
                writer.write({"__key__": f"{number:08d}", **fields, "cls": classes[pair.described["name"]]})
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
