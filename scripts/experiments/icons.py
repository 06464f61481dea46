"""Make image-text shards from npm's collection of open icon sets, with whole sets held out as styles never seen.

    .venv/bin/python -m scripts.experiments.icons --cache CACHE --output icons-11k --num-train 11000

Downloads ``@iconify/json`` with npm into ``CACHE`` (once), renders icons with ``resvg_py`` and writes

    train/, val/, test/   WebDataset shards (png, txt, json, cls); no set is in two of them
    names.txt             the canonical names, one a line; ``cls`` is the line number
    sets.json             each set's split, license, author and number of pairs
    recipe.json           the arguments that the bytes follow from

Equal arguments and an equal collection give equal bytes; a smaller ``--num-train`` gives a prefix of a larger one.
What is in the data, and the licenses: docs/experiments/icons.md.
"""

import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
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

from scripts.experiments.pairs import (
    SPLITS,
    Pair,
    flag,
    png_on_white,
    program,
    seeded_order,
    whole_folder,
    write_dataset,
)

PACKAGE = "@iconify/json"
LEFT_OUT_CATEGORY = "Emoji"
# A held-out group of sets has at least and at most this share of the eligible icons: large enough to be worth testing on,
# small enough not to starve training.
HELD_OUT_SHARE = (0.001, 0.02)
# A split takes at least this many groups, so that it mixes styles, and as many as have this many times the icons it needs
# (not all icons have an eligible name).
HELD_OUT_GROUPS = 8
HELD_OUT_SURPLUS = 4

# Words that say how an icon is drawn, not what it shows; the canonical name has none of them at its ends.
_STYLE_WORDS = """
alt baseline big block bold broken color colored dark duo duotone expressive extra f fill filled flat
icon large light line linear logo loop medium minimalistic mono monotone o outline outlined plain r regular
remix round rounded s semibold sharp simple small solid stroke stroked thin tone two twotone variant wordmark
"""
STYLE_WORDS = frozenset(_STYLE_WORDS.split())
_NUMBER = re.compile(r"\d+(px|x\d+)?")


@dataclass(frozen=True)
class Icon:
    """One icon of one set, by its name in the set and as :func:`canonical_name` gives it.

    ``view_box`` has left, top, width and height of the drawing.
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
        """Return a black (where it has no colors of its own) drawing in the middle of a square."""
        left, top, width, height = self.view_box
        side = max(width, height)
        box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box}" width="{side:g}" height="{side:g}">{self.body.replace("currentColor", "#000")}</svg>'
        )


@dataclass(frozen=True)
class IconsConfig:
    """What determines the bytes, for one version of the collection."""

    num_train: int = flag("training pairs (at most 298,000, with --min-authors 1)")
    num_val: int = flag("pairs of held-out styles to tune on", 2000)
    num_test: int = flag("pairs of other held-out styles to report", 2000)
    image_size: int = flag("width and height of the images in pixels", 64)
    min_authors: int = flag("keep names that so many authors of training sets have drawn", 10)
    seed: int = flag("of the choice of held-out sets and icons", 0)
    val_sets: tuple[str, ...] = flag("prefixes of the sets to hold out; none: a seeded choice", ())
    test_sets: tuple[str, ...] = flag("likewise", ())

    def count(self, split: str) -> int:
        return {"train": self.num_train, "val": self.num_val, "test": self.num_test}[split]


def split_words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_\s]+", name.lower()) if word]


def canonical_name(name: str) -> str:
    """Return an icon's name without numbers (sizes, variants) and without style words at its ends.

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
    """Download and unpack the collection with npm, once; return the package's folder."""
    package = cache / "package"
    if (package / "collections.json").exists():
        return package
    if shutil.which("npm") is None:
        sys.exit(
            f"npm is missing (Debian: apt install npm): it downloads {PACKAGE}; or unpack it as {package} yourself"
        )
    cache.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(["npm", "pack", PACKAGE, "--json"], cwd=cache, stdout=subprocess.PIPE, text=True)
    if packed.returncode:
        sys.exit(f"npm pack {PACKAGE} failed with exit code {packed.returncode}; its message is above")
    archive = cache / json.loads(packed.stdout)[0]["filename"].lstrip("@").replace("/", "-")
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")
    return package


def read_collection(package: Path) -> tuple[dict[str, dict[str, Any]], list[Icon]]:
    """Return the sets' descriptions by prefix, and their icons: no emoji, no hidden or animated icons, no aliases."""
    sets = {
        prefix: info
        for prefix, info in json.loads((package / "collections.json").read_text()).items()
        if info.get("category") != LEFT_OUT_CATEGORY and "emoji" not in prefix  # hidden emoji sets have no category
    }
    icons = [icon for prefix in sorted(sets) for icon in _read_set(package / "json" / f"{prefix}.json")]
    return sets, icons


def _read_set(path: Path) -> Iterator[Icon]:
    data = json.loads(path.read_text())
    for name, drawing in sorted(data["icons"].items()):
        if drawing.get("hidden") or "<animate" in drawing["body"] or "<set" in drawing["body"]:
            continue
        found = [drawing.get(key, data.get(key, default)) for key, default in _BOX_DEFAULTS.items()]
        yield Icon(path.stem, name, canonical_name(name), tuple(found), drawing["body"])


_BOX_DEFAULTS = {"left": 0, "top": 0, "width": 16, "height": 16}  # the format's own


def group_sets(sets: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return a group for each set: sets of one author, or of prefixes that begin alike, look alike and stay together."""
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
            raise ValueError(f"{split} sets {', '.join(unknown)}: no such set in the collection (or one of emoji)")
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
                raise ValueError(f"not enough sets to hold out {config.count(split)} {split} pairs: ask for fewer")
            held_out.append(candidates.pop(0))
        splits |= {prefix: split for prefix in sets if group_of[prefix] in held_out}
    return splits


def eligible_names(sets: dict[str, dict[str, Any]], icons: Iterable[Icon], min_authors: int) -> set[str]:
    """Return canonical names that at least ``min_authors`` authors have drawn."""
    authors = defaultdict(set)
    for icon in icons:
        authors[icon.canonical].add(sets[icon.prefix]["author"]["name"])
    return {name for name, drawn_by in authors.items() if len(drawn_by) >= min_authors}


def choose(icons: list[Icon], sets: dict[str, dict[str, Any]], splits: dict[str, str], config: IconsConfig):
    """Return candidates of each split, in the order in which they are taken, with no drawing twice."""
    names = eligible_names(sets, (icon for icon in icons if splits[icon.prefix] == "train"), config.min_authors)
    pools: dict[str, list[Icon]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    order = seeded_order(config.seed)
    for split in SPLITS:  # the training sets first: what they have is no unseen drawing any more
        mine = [icon for icon in icons if splits[icon.prefix] == split and icon.canonical in names]
        for icon in sorted(mine, key=lambda icon: order(f"{icon.prefix}:{icon.name}")):
            if icon.body not in seen:
                seen.add(icon.body)
                pools[split].append(icon)
    return pools


def render(icon: Icon, size: int) -> bytes | None:
    """Return the icon as PNG, ``size`` pixels square on white; None if nothing is to be seen, or it cannot be drawn."""
    import resvg_py

    try:
        drawn = bytes(resvg_py.svg_to_bytes(svg_string=icon.svg(), width=size, height=size, skip_system_fonts=True))
    except ValueError:
        return None
    image = Image.open(io.BytesIO(drawn))
    return png_on_white(image) if image.size == (size, size) else None


def take(pool: list[Icon], number: int, size: int, executor: ProcessPoolExecutor) -> Iterator[tuple[Icon, bytes]]:
    """Yield the first ``number`` icons that can be drawn, with their PNGs."""
    taken = 0
    for start in range(0, len(pool), 4000):
        part = pool[start : start + 4000]
        for icon, png in zip(part, executor.map(partial(render, size=size), part, chunksize=250), strict=True):
            if png is not None and taken < number:
                taken += 1
                yield icon, png
        if taken == number:
            return
    raise ValueError(f"asked for {number} pairs, the sets have {taken}: ask for fewer, or for a smaller --min-authors")


def make(package: Path, output: Path, config: IconsConfig, workers: int) -> None:
    """Write the data set."""
    sets, icons = read_collection(package)
    splits = assign_splits(sets, icons, config)
    pools = choose(icons, sets, splits, config)
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with (
        whole_folder(output) as folder,
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


def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    parser = program(__doc__, "icons", IconsConfig)
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder for the collection, outside of the repository"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that render")
    args = vars(parser.parse_args(argv))
    cache, output, workers = args.pop("cache"), args.pop("output"), args.pop("workers")
    config = IconsConfig(**args | {key: tuple(args[key]) for key in ("val_sets", "test_sets")})
    try:
        make(fetch(cache), output, config, workers)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
