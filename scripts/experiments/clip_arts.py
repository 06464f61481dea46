"""Make image-text shards from Debian's ``openclipart-png``: some 5,000 clip arts with titles, in the public domain.

    apt install openclipart-png         # or: apt-get download openclipart-png && dpkg-deb -x openclipart-png_*.deb .
    .venv/bin/python -m scripts.experiments.clip_arts --output clip-arts

Writes a folder as :mod:`scripts.experiments.pairs` describes it. Unlike the icons' held-out sets, validation and test pairs
are drawn at random, as ``openclip-ext compare`` does with data that have no split: hundreds of authors, in all parts.

A caption is the clip art's folders and its title (``animals birds: pollo``). Left out are the 1,400 stars that a program
drew, pictures that are equal when made small, and one that Pillow takes for an attack by its size.
"""

import html
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

from scripts.experiments.icons import canonical_name, split_words
from scripts.experiments.pairs import Pair, flag, png_on_white, program, seeded_order, whole_folder, write_dataset

SOURCE = Path("/usr/share/openclipart/png")
LEFT_OUT = "shapes/stars"
SHARED_TITLE = 4  # a title of more pictures than this is their collection's: the file's name says more


@dataclass(frozen=True)
class ClipArtsConfig:
    """What determines the bytes, for one version of the package. Pairs that are not held out are for training."""

    num_val: int = flag("pairs to tune on", 700)
    num_test: int = flag("pairs to report", 700)
    image_size: int = flag("width and height of the images in pixels", 64)
    seed: int = flag("of the split and the order", 0)


def read_pairs(source: Path, config: ClipArtsConfig) -> list[Pair]:
    """Return the clip arts, in the seeded order, no picture twice."""
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
    """Return the title that the file says, perhaps empty; None if the picture is too large to open."""
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
    """Return the picture in the middle of a white square; None if it shows nothing."""
    with Image.open(path) as image:
        return png_on_white(ImageOps.pad(image.convert("RGBA"), (size, size), color=(255, 255, 255, 0)))


def make(source: Path, output: Path, config: ClipArtsConfig) -> None:
    """Write the data set."""
    with whole_folder(output) as folder:
        pairs = read_pairs(source, config)
        num_held_out = config.num_val + config.num_test
        if len(pairs) <= num_held_out:
            raise ValueError(f"{source} has {len(pairs)} pictures, {num_held_out} to hold out: install openclipart-png")
        held_out = {"val": pairs[: config.num_val], "test": pairs[config.num_val : num_held_out]}
        splits = {"train": pairs[num_held_out:], **held_out}
        recipe = {**asdict(config), "collection": "openclipart-png", "pairs": len(pairs)}
        write_dataset(folder, splits, (pair.described["name"] for pair in pairs), recipe)
    print(", ".join(f"{split}: {len(part):,} pairs" for split, part in splits.items()))


def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    parser = program(__doc__, "clip_arts", ClipArtsConfig)
    parser.add_argument("--source", type=Path, default=SOURCE, help="the package's folder png")
    args = vars(parser.parse_args(argv))
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # some drawings are large
    try:
        make(args.pop("source"), args.pop("output"), ClipArtsConfig(**args))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
