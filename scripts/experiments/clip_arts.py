"""Make image-text shards from Debian's ``openclipart-png``: about 5,000 clip arts with titles, in the public domain.

    apt install openclipart-png         # or: apt-get download openclipart-png && dpkg-deb -x openclipart-png_*.deb .
    .venv/bin/python -m scripts.experiments.clip_arts --output clip-arts

:mod:`scripts.experiments.pairs` describes the output folder. Validation and test pairs are sampled at random, as in
``openclip-ext compare`` for data without splits, so each split contains hundreds of authors. (Icons are split by icon set.)

A caption consists of the clip art's folders and its title (``animals birds: pollo``). Three kinds of images are excluded:
1,400 computer-generated stars, images that are equal after shrinking, and one image that is too large for Pillow.
"""

import html
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

from openclip_ext.cli import command_line
from openclip_ext.cli.options import cli_field, from_flags
from scripts.experiments.icons import canonical_name, split_words
from scripts.experiments.pairs import Pair, complete_folder, png_on_white, program, seeded_order, write_dataset

SOURCE = Path("/usr/share/openclipart/png")
EXCLUDED_FOLDER = "shapes/stars"
SHARED_TITLE = 4  # if more images share a title, it is a collection's title, and the caption uses the file name instead


@dataclass(frozen=True)
class ClipArtsConfig:
    """Settings that determine the bytes of the shards, for one version of the package.

    Pairs that are not in the validation or test split are for training.
    """

    num_val: int = cli_field(700, "validation pairs")
    num_test: int = cli_field(700, "test pairs")
    image_size: int = cli_field(64, "width and height of the images in pixels")
    seed: int = cli_field(0, "seed of the split and the order")


def read_pairs(source: Path, config: ClipArtsConfig) -> list[Pair]:
    """Return the clip arts without duplicates, in an order that the seed determines."""
    paths = [path for path in sorted(source.rglob("*.png")) if not path.is_symlink()]
    paths = [path for path in paths if not path.relative_to(source).is_relative_to(EXCLUDED_FOLDER)]
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
    """Return the title in an image file (it may be empty); None if the image is too large to open."""
    try:
        with Image.open(path) as image:
            title = html.unescape(str(image.info.get("Title", "")))
    except Image.DecompressionBombError:
        return None
    try:
        # Some files contain UTF-8, although the format requires Latin-1.
        return title.encode("latin-1").decode().strip()
    except UnicodeError:
        return title.strip()


def small_png(path: Path, size: int) -> bytes | None:
    """Return the image as a PNG, centered on a white square; None if it is blank."""
    with Image.open(path) as image:
        return png_on_white(ImageOps.pad(image.convert("RGBA"), (size, size), color=(255, 255, 255, 0)))


def make(source: Path, output: Path, config: ClipArtsConfig) -> None:
    with complete_folder(output) as folder:
        pairs = read_pairs(source, config)
        num_held_out = config.num_val + config.num_test
        if len(pairs) <= num_held_out:
            raise ValueError(
                f"{source}: expected more than {num_held_out} images, found {len(pairs)}. Install openclipart-png"
            )
        held_out = {"val": pairs[: config.num_val], "test": pairs[config.num_val : num_held_out]}
        splits = {"train": pairs[num_held_out:], **held_out}
        recipe = {**asdict(config), "collection": "openclipart-png", "pairs": len(pairs)}
        write_dataset(folder, splits, (pair.described["name"] for pair in pairs), recipe)
    print(", ".join(f"{split}: {len(part):,} pairs" for split, part in splits.items()))


def main(argv: list[str]) -> None:
    parser = program(__doc__, ClipArtsConfig)
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder png of the package")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow warns about large drawings
    make(args.source, args.output, from_flags(ClipArtsConfig, vars(args)))


if __name__ == "__main__":
    command_line.run(main)
