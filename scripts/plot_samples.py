"""Draw the first images of the demo set with their captions: ``python scripts/plot_samples.py --output FILE``."""

import argparse
import io
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import matplotlib.pyplot as plt
from PIL import Image

from openclip_ext.data.shapes import SPLITS, make_sample


def plot(output: Path, split: str, seed: int, rows: int = 3, columns: int = 7) -> None:
    """Write a picture of ``rows`` × ``columns`` samples."""
    figure, grid = plt.subplots(rows, columns, figsize=(1.55 * columns, 2.1 * rows), layout="constrained")
    for index, axes in enumerate(grid.flat):
        sample = make_sample(seed, split, index)
        axes.imshow(Image.open(io.BytesIO(sample.png)), interpolation="nearest")
        axes.set_title(textwrap.fill(sample.txt.decode(), 22), fontsize=8, y=-0.07, va="top")
        axes.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="picture to write; the extension says the format")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    plot(args.output, args.split, args.seed)
    print(args.output)


if __name__ == "__main__":
    main()
