"""Write the demo set as WebDataset shards, in parallel, each shard atomically."""

import io
import json
import multiprocessing
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

from openclip_ext.data.processes import available_cores
from openclip_ext.data.shapes.render import render
from openclip_ext.data.shapes.scene import generator_of, sample_caption, sample_scene
from openclip_ext.files.writing import write_atomically, write_text

# Increase this number when a code change affects the images or captions.
GENERATOR_VERSION = 1
# File with the configuration of the shards, written before the first shard.
RECIPE_FILE = "shapes.json"
# OpenCLIP's file with the sample count of each shard. It is written last, so it marks a complete set.
SIZES_FILE = "sizes.json"


class Sample(NamedTuple):
    """The members of a sample in the tar."""

    png: bytes
    txt: bytes
    json: bytes


@dataclass(frozen=True)
class ShapesConfig:
    """The configuration that determines the bytes of a set of shards."""

    num_samples: int
    seed: int = 0
    split: str = "train"
    samples_per_shard: int = 1000

    def __post_init__(self) -> None:
        if min(self.num_samples, self.samples_per_shard) < 1:
            raise ValueError(f"num_samples and samples_per_shard must be at least 1, got {self}")

    def shards(self) -> dict[str, range]:
        """Return the sample indices of each shard, by shard name."""
        firsts = range(0, self.num_samples, self.samples_per_shard)
        ranges = (range(first, min(first + self.samples_per_shard, self.num_samples)) for first in firsts)
        return {f"{number:05d}.tar": indices for number, indices in enumerate(ranges)}


def make_sample(seed: int, split: str, index: int) -> Sample:
    """Return the encoded members of sample ``index`` of a split. The bytes depend only on the arguments.

    The ``json`` member contains the scene, the caption with all words as ``complete_caption``, and the arguments.
    """
    scene = sample_scene(seed, split, index)
    buffer = io.BytesIO()
    Image.fromarray(render(scene, generator_of("pixels", seed, split, index))).save(buffer, format="PNG")
    attributes = {
        **asdict(scene),
        "complete_caption": sample_caption(scene, generator_of("caption", seed, split, index), complete=True),
        "seed": seed,
        "split": split,
        "index": index,
    }
    caption = sample_caption(scene, generator_of("caption", seed, split, index))
    return Sample(buffer.getvalue(), caption.encode(), json.dumps(attributes).encode())


def write_shards(output: str | Path, config: ShapesConfig, workers: int | None = None) -> bool:
    """Write all shards to a folder, then ``sizes.json``; return False if all these files already exist.

    Only one call at a time may write to a folder. ``workers=None`` (default) means one process per core. Raise ValueError if
    the folder contains shards of another configuration or another program.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, config)
    shards = config.shards()
    if all((folder / name).exists() for name in (SIZES_FILE, *shards)):
        return False
    with tqdm(total=config.num_samples, unit="img", desc=str(folder), disable=None) as bar:
        for count in _write_all([(folder / name, span) for name, span in shards.items()], config, workers):
            bar.update(count)
    _write_json(folder / SIZES_FILE, {name: len(span) for name, span in shards.items()})
    return True


def _claim(folder: Path, config: ShapesConfig) -> None:
    """Write the configuration to the folder, or check that an existing file has the same configuration."""
    wanted = {**asdict(config), "generator_version": GENERATOR_VERSION}
    recipe = folder / RECIPE_FILE
    if recipe.exists():
        found = json.loads(recipe.read_text())
        if found != wanted:
            raise ValueError(f"{folder} contains a set of {found}, expected {wanted}: choose another folder")
    elif any(folder.glob("*.tar")):
        raise ValueError(f"{folder} contains shards that are not a demo set (no {RECIPE_FILE}): choose another folder")
    else:
        _write_json(recipe, wanted)


def _write_all(shards: list[tuple[Path, range]], config: ShapesConfig, workers: int | None) -> Iterator[int]:
    """Write the shards, and yield the number of samples of each finished shard."""
    write = partial(_write_shard, config)
    workers = min(workers or available_cores(), len(shards))
    if workers == 1:
        yield from map(write, shards)
        return
    # "fork" would be unsafe, because the progress bar starts a thread, and the caller may have more threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(write, shards)


def _write_shard(config: ShapesConfig, shard: tuple[Path, range]) -> int:
    path, span = shard
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for index in span:
            for extension, content in make_sample(config.seed, config.split, index)._asdict().items():
                member = tarfile.TarInfo(f"{index:08d}.{extension}")  # owner and time are 0, so the bytes never change
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
    return len(span)


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1))
