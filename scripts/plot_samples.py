"""Draw the first images of the demo set with their captions: ``python scripts/plot_samples.py --output FILE``."""

import argparse
import io
import textwrap
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from openclip_ext.data.shapes.write import make_sample


def plot(output: Path) -> None:
    """Write a picture of 21 training samples."""
    figure = Figure(figsize=(10.85, 6.3), layout="constrained")
    for index, axes in enumerate(figure.subplots(3, 7).flat):
        sample = make_sample(0, "train", index)
        axes.imshow(Image.open(io.BytesIO(sample.png)), interpolation="nearest")
        axes.set_title(textwrap.fill(sample.txt.decode(), 22), fontsize=8, y=-0.07, va="top")
        axes.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="picture to write; the extension says the format")
    args = parser.parse_args(argv)
    plot(args.output)
    print(args.output)


if __name__ == "__main__":
    main()
