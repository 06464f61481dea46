"""Draw the first images of the demo set with their captions: ``python scripts/plot_samples.py --output FILE``."""

import argparse
import io
import textwrap
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from openclip_ext.data.shapes.scene import SPLITS
from openclip_ext.data.shapes.write import make_sample


def plot(output: Path, split: str, seed: int, rows: int = 3, columns: int = 7) -> None:
    """Write a picture of ``rows`` × ``columns`` samples."""
    figure = Figure(figsize=(1.55 * columns, 2.1 * rows), layout="constrained")
    for index, axes in enumerate(figure.subplots(rows, columns).flat):
        sample = make_sample(seed, split, index)
        axes.imshow(Image.open(io.BytesIO(sample.png)), interpolation="nearest")
        axes.set_title(textwrap.fill(sample.txt.decode(), 22), fontsize=8, y=-0.07, va="top")
        axes.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="picture to write; the extension says the format")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    plot(args.output, args.split, args.seed)
    print(args.output)


if __name__ == "__main__":
    main()
