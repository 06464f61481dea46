"""Make image-text shards from npm's collection of open icon sets. Some sets are held out for validation and test.

    .venv/bin/python -m scripts.experiments.icons --cache CACHE --output icons-11k --num-train 11000

The script downloads ``@iconify/json`` with npm to ``CACHE`` (once), renders icons with ``resvg_py``, and writes

    train/, val/, test/   WebDataset shards (png, txt, json, cls); an icon set is in only one of the splits
    names.txt             the canonical names, one per line; ``cls`` is the line number, from 0
    sets.json             split, license, author and number of pairs of each set
    recipe.json           the arguments that determine the bytes

Equal arguments and an equal collection give equal bytes. The training set of a smaller ``--num-train`` is the start of the
training set of a larger ``--num-train``. docs/experiments/icons.md describes the data and the licenses.
"""

import io
import json
import multiprocessing
import os
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from openclip_ext.cli import command_line
from openclip_ext.cli.options import cli_field, from_flags
from scripts.experiments.pairs import SPLITS, Pair, complete_folder, png_on_white, program, seeded_order, write_dataset

PACKAGE = "@iconify/json"
EXCLUDED_CATEGORY = "Emoji"
# Minimum and maximum size of a held-out group of sets, as a fraction of all icons: enough for a test, but not so many that
# training lacks icons.
HELD_OUT_SHARE = (0.001, 0.02)
# A held-out split has at least HELD_OUT_GROUPS groups, to contain different styles. Its groups together contain at least
# HELD_OUT_SURPLUS icons per required pair, because not all icons have an eligible name.
HELD_OUT_GROUPS = 8
HELD_OUT_SURPLUS = 4

# Words that describe the style of an icon. They are removed from both ends of its canonical name.
_STYLE_WORDS = """
alt baseline big block bold broken color colored dark duo duotone expressive extra f fill filled flat
icon large light line linear logo loop medium minimalistic mono monotone o outline outlined plain r regular
remix round rounded s semibold sharp simple small solid stroke stroked thin tone two twotone variant wordmark
"""
STYLE_WORDS = frozenset(_STYLE_WORDS.split())
_NUMBER = re.compile(r"\d+(px|x\d+)?")


@dataclass(frozen=True)
class Icon:
    """An icon of a set, with its name in the set and its canonical name (see :func:`canonical_name`).

    ``view_box`` contains left, top, width and height of the drawing.
    """

    prefix: str
    name: str
    canonical: str
    view_box: tuple[float, float, float, float]
    body: str

    @property
    def caption(self) -> str:
        return " ".join(split_words(self.name))

    def svg(self) -> str:
        """Return the drawing as SVG, centered on a square. Parts without a color are black."""
        left, top, width, height = self.view_box
        side = max(width, height)
        box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box}" width="{side:g}" height="{side:g}">{self.body.replace("currentColor", "#000")}</svg>'
        )


@dataclass(frozen=True)
class IconsConfig:
    """Settings that determine the bytes of the shards, for one version of the collection."""

    num_train: int = cli_field(11_000, "number of training pairs (at most 298,000, with --min-authors 1)")
    num_val: int = cli_field(2000, "number of validation pairs, from held-out sets")
    num_test: int = cli_field(2000, "number of test pairs, from held-out sets that validation does not use")
    image_size: int = cli_field(64, "width and height of the images in pixels")
    min_authors: int = cli_field(10, "use only icon names that at least this many training authors have drawn")
    seed: int = cli_field(0, "seed for choosing the held-out sets and the icons")
    val_sets: tuple[str, ...] = cli_field((), "prefixes of the validation sets; by default, the seed chooses them")
    test_sets: tuple[str, ...] = cli_field((), "prefixes of the test sets; by default, the seed chooses them")

    def count(self, split: str) -> int:
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}[split]


def split_words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_\s]+", name.lower()) if word]


def canonical_name(name: str) -> str:
    """Return an icon's name without numbers, and without style words at both ends.

    >>> canonical_name("home-2-outline"), canonical_name("baseline-home"), canonical_name("24px")
    ('home', 'home', '24px')
    """
    every = split_words(name)
    words = [word for word in every if not _NUMBER.fullmatch(word)] or every
    while len(words) > 1 and words[-1] in STYLE_WORDS:
        words.pop()
    while len(words) > 1 and words[0] in STYLE_WORDS:
        words.pop(0)
    return " ".join(words)


def fetch(cache: Path) -> Path:
    """Download and unpack the collection with npm, if not done before; return the package's folder."""
    package = cache / "package"
    if (package / "collections.json").exists():
        return package
    cache.mkdir(parents=True, exist_ok=True)
    packed = subprocess.check_output(["npm", "pack", PACKAGE, "--json"], cwd=cache, text=True)
    archive = cache / json.loads(packed)[0]["filename"].lstrip("@").replace("/", "-")
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")
    return package


def read_collection(package: Path) -> tuple[dict[str, dict[str, Any]], list[Icon]]:
    """Return the icon sets' descriptions by prefix, and all icons except emoji, aliases, hidden and animated icons."""
    sets = {
        prefix: info
        for prefix, info in json.loads((package / "collections.json").read_text()).items()
        if info.get("category") != EXCLUDED_CATEGORY and "emoji" not in prefix  # hidden emoji sets have no category
    }
    icons = [icon for prefix in sorted(sets) for icon in read_set(package / "json" / f"{prefix}.json")]
    return sets, icons


def read_set(path: Path) -> Iterator[Icon]:
    data = json.loads(path.read_text())
    for name, drawing in sorted(data["icons"].items()):
        if drawing.get("hidden") or "<animate" in drawing["body"] or "<set" in drawing["body"]:
            continue
        found = [drawing.get(key, data.get(key, default)) for key, default in _BOX_DEFAULTS.items()]
        yield Icon(path.stem, name, canonical_name(name), tuple(found), drawing["body"])


_BOX_DEFAULTS = {"left": 0, "top": 0, "width": 16, "height": 16}  # defaults of the file format


def group_sets(sets: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the group of each set. Sets with equal authors, or with prefixes that start with the same word, form a group."""
    parent = {prefix: prefix for prefix in sets}

    def root(prefix: str) -> str:
        while parent[prefix] != prefix:
            prefix = parent[prefix]
        return prefix

    first_with: dict[tuple[str, str], str] = {}
    for prefix, info in sorted(sets.items()):
        for trait in (("author", info["author"]["name"]), ("family", re.split(r"[-\d]", prefix)[0])):
            parent[root(prefix)] = root(first_with.setdefault(trait, prefix))
    return {prefix: root(prefix) for prefix in sets}


def assign_splits(sets: dict[str, dict[str, Any]], icons: list[Icon], config: IconsConfig) -> dict[str, str]:
    """Return the split of each set, by prefix."""
    group_of = group_sets(sets)
    splits = dict.fromkeys(sets, "train")
    for split, prefixes in (("val", config.val_sets), ("test", config.test_sets)):
        unknown = sorted(set(prefixes) - set(sets))
        if unknown:
            raise ValueError(f"{split} sets {', '.join(unknown)} not found in the collection (emoji are excluded)")
        splits |= dict.fromkeys(prefixes, split)
    sizes = Counter(group_of[icon.prefix] for icon in icons if splits[icon.prefix] == "train")
    low, high = (share * len(icons) for share in HELD_OUT_SHARE)
    candidates = sorted((group for group, size in sizes.items() if low <= size <= high), key=seeded_order(config.seed))
    for split, chosen in (("test", config.test_sets), ("val", config.val_sets)):
        held_out: list[str] = []
        while not chosen and (
            len(held_out) < HELD_OUT_GROUPS
            or sum(sizes[group] for group in held_out) < HELD_OUT_SURPLUS * config.count(split)
        ):
            if not candidates:
                raise ValueError(f"too few sets to hold out {config.count(split)} {split} pairs: reduce --num-{split}")
            held_out.append(candidates.pop(0))
        splits |= {prefix: split for prefix in sets if group_of[prefix] in held_out}
    return splits


def eligible_names(sets: dict[str, dict[str, Any]], icons: Iterable[Icon], min_authors: int) -> set[str]:
    """Return the canonical names that at least ``min_authors`` authors have drawn."""
    authors = defaultdict(set)
    for icon in icons:
        authors[icon.canonical].add(sets[icon.prefix]["author"]["name"])
    return {name for name, drawn_by in authors.items() if len(drawn_by) >= min_authors}


def choose(icons: list[Icon], sets: dict[str, dict[str, Any]], splits: dict[str, str], config: IconsConfig):
    """Return the candidate icons of each split without duplicate drawings, in an order that the seed determines."""
    names = eligible_names(sets, (icon for icon in icons if splits[icon.prefix] == "train"), config.min_authors)
    pools: dict[str, list[Icon]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    order = seeded_order(config.seed)
    for split in SPLITS:  # training comes first, because held-out splits must not contain training drawings
        mine = [icon for icon in icons if splits[icon.prefix] == split and icon.canonical in names]
        for icon in sorted(mine, key=lambda icon: order(f"{icon.prefix}:{icon.name}")):
            if icon.body not in seen:
                seen.add(icon.body)
                pools[split].append(icon)
    return pools


def render(icon: Icon, size: int) -> bytes | None:
    """Return the icon as a PNG of ``size`` × ``size`` pixels on white; None if it is blank or invalid."""
    import resvg_py

    try:
        drawn = bytes(resvg_py.svg_to_bytes(svg_string=icon.svg(), width=size, height=size, skip_system_fonts=True))
    except ValueError:
        return None
    image = Image.open(io.BytesIO(drawn))
    return png_on_white(image) if image.size == (size, size) else None


def take(pool: list[Icon], number: int, size: int, executor: ProcessPoolExecutor) -> Iterator[tuple[Icon, bytes]]:
    """Yield the first ``number`` valid icons of ``pool`` with their PNGs; raise ValueError if there are too few."""
    taken = 0
    for start in range(0, len(pool), 4000):
        part = pool[start : start + 4000]
        for icon, png in zip(part, executor.map(partial(render, size=size), part, chunksize=250), strict=True):
            if png is not None and taken < number:
                taken += 1
                yield icon, png
        if taken == number:
            return
    raise ValueError(f"expected {number} pairs, found {taken} in the sets: use fewer pairs, or a smaller --min-authors")


def make(package: Path, output: Path, config: IconsConfig, workers: int) -> None:
    sets, icons = read_collection(package)
    splits = assign_splits(sets, icons, config)
    pools = choose(icons, sets, splits, config)
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with (
        complete_folder(output) as folder,
        ProcessPoolExecutor(workers, context, initializer=os.nice, initargs=(19,)) as executor,
    ):

        def pairs_of(split: str) -> Iterator[Pair]:
            number = config.count(split)
            drawn = take(pools[split], number, config.image_size, executor)
            for icon, png in tqdm(drawn, split, number, unit="img"):
                counts[icon.prefix] += 1
                license_ = sets[icon.prefix]["license"]
                described = {"set": icon.prefix, "icon": icon.name, "name": icon.canonical}
                described["license"] = license_.get("spdx", license_["title"])
                yield Pair(png, icon.caption, described)

        version = json.loads((package / "package.json").read_text())["version"]
        names = (icon.canonical for pool in pools.values() for icon in pool)
        recipe = {**asdict(config), "collection": f"{PACKAGE} {version}"}
        write_dataset(folder, {split: pairs_of(split) for split in SPLITS}, names, recipe)
        table = {
            prefix: {
                "title": sets[prefix]["name"],
                "split": split,
                "pairs": counts[prefix],
                "category": sets[prefix].get("category"),
                "author": sets[prefix]["author"],
                "license": sets[prefix]["license"],
            }
            for prefix, split in splits.items()
        }
        (folder / "sets.json").write_text(json.dumps(table, indent=1) + "\n")


def main(argv: list[str]) -> None:
    parser = program(__doc__, IconsConfig)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the collection, outside the repository")
    parser.add_argument("--workers", type=int, default=2, help="number of rendering processes")
    args = parser.parse_args(argv)
    make(fetch(args.cache), args.output, from_flags(IconsConfig, vars(args)), args.workers)


if __name__ == "__main__":
    command_line.run(main)
