"""Make image-text shards from Debian's ``openclipart-png``: some 5,000 clip arts with titles, in the public domain.

    apt install openclipart-png         # or: apt-get download openclipart-png && dpkg-deb -x openclipart-png_*.deb .
    .venv/bin/python -m scripts.experiments.clip_arts --output clip-arts

Writes a folder as :mod:`scripts.experiments.pairs` describes it. Unlike the icons' held-out sets, validation and test pairs
are drawn at random, as ``openclip-ext compare`` does with data that have no split: hundreds of authors, in all parts.

A caption is the clip art's folders and its title (``animals birds: pollo``). Left out are the 1,400 stars that a program
drew, pictures that are equal when made small, and one that Pillow takes for an attack by its size.
"""

import html
import json
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

from scripts.experiments.icons import canonical_name, split_words
from scripts.experiments.pairs import (
    RECIPE,
    SPLITS,
    Pair,
    png_on_white,
    program,
    seeded_order,
    whole_folder,
    write_names,
    write_shards,
)

SOURCE = Path("/usr/share/openclipart/png")
LEFT_OUT = "shapes/stars"
SHARED_TITLE = 4  # a title of more pictures than this is their collection's: the file's name says more


@dataclass(frozen=True)
class ClipArtsConfig:
    """What determines the bytes, for one version of the package.

    Attributes:
        num_val, num_test: pairs of these splits; all others are for training.
        image_size: width and height of the images in pixels.
        seed: decides which pairs are held out, and their order.
    """

    num_val: int = 700
    num_test: int = 700
    image_size: int = 64
    seed: int = 0


def read_pairs(source: Path, config: ClipArtsConfig) -> list[Pair]:
    """The clip arts, in the seeded order, no picture twice."""
    paths = [path for path in sorted(source.rglob("*.png")) if not path.is_symlink()]
    paths = [path for path in paths if not path.relative_to(source).is_relative_to(LEFT_OUT)]
    titles = {path: title for path in tqdm(paths, "titles", unit="img") if (title := read_title(path)) is not None}
    shared = Counter(titles.values())
    order = seeded_order(config.seed)
    pairs: dict[bytes, Pair] = {}
    for path in tqdm(sorted(titles, key=lambda path: order(str(path.relative_to(source)))), "images", unit="img"):
        title = titles[path] if titles[path] and shared[titles[path]] <= SHARED_TITLE else path.stem
        png = small_png(path, config.image_size)
        if png is not None:
            folders = " ".join(split_words(" ".join(path.relative_to(source).parent.parts)))
            described = {"name": canonical_name(title), "file": str(path.relative_to(source))}
            pairs.setdefault(png, Pair(png, f"{folders}: {' '.join(split_words(title))}", described))
    return list(pairs.values())


def read_title(path: Path) -> str | None:
    """The title that the file says, perhaps empty; None if the picture is too large to open."""
    try:
        with Image.open(path) as image:
            title = html.unescape(str(image.info.get("Title", "")))
    except Image.DecompressionBombError:
        return None
    try:
        return title.encode("latin-1").decode().strip()  # UTF-8, written where the format wants Latin-1
    except UnicodeError:
        return title.strip()


def small_png(path: Path, size: int) -> bytes | None:
    """The picture in the middle of a white square; None if it shows nothing."""
    with Image.open(path) as image:
        return png_on_white(ImageOps.pad(image.convert("RGBA"), (size, size), color=(255, 255, 255, 0)))


def make(source: Path, output: Path, config: ClipArtsConfig) -> None:
    """Write the data set.

    Raises:
        ValueError: the output exists, the source is missing or has too few pictures.
    """
    with whole_folder(output) as folder:
        pairs = read_pairs(source, config)
        num_held_out = config.num_val + config.num_test
        if len(pairs) <= num_held_out:
            raise ValueError(f"{source} has {len(pairs)} pictures, {num_held_out} to hold out: install openclipart-png")
        classes = write_names(folder, (pair.described["name"] for pair in pairs))
        held_out = {"val": pairs[: config.num_val], "test": pairs[config.num_val : num_held_out]}
        parts = {"train": pairs[num_held_out:], **held_out}
        for split in SPLITS:
            write_shards(folder / split, parts[split], classes)
            print(f"{split}: {len(parts[split]):,} pairs")
        recipe = {**asdict(config), "collection": "openclipart-png", "pairs": len(pairs)}
        (folder / RECIPE).write_text(json.dumps(recipe, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    parser = program(__doc__, "clip_arts")
    parser.add_argument("--source", type=Path, default=SOURCE, help="the package's folder png")
    parser.add_argument("--output", type=Path, required=True, help="folder to make, outside of the repository")
    parser.add_argument("--num-val", type=int, default=700, help="pairs to tune on")
    parser.add_argument("--num-test", type=int, default=700, help="pairs to report")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the split and the order")
    args = vars(parser.parse_args(argv))
    source, output = args.pop("source"), args.pop("output")
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # some drawings are large
    try:
        make(source, output, ClipArtsConfig(**args))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
