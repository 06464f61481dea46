"""``python -m openclip_ext.data.shapes``: write the demo set as WebDataset shards."""

import argparse
import sys

from openclip_ext.cli import command_line
from openclip_ext.data.shapes.scene import SPLITS
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.files.writing import output_path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m openclip_ext.data.shapes",
        description="Draw images of colored shapes with captions and write them as WebDataset shards. "
        "Does not change a complete set.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=output_path, required=True, help="folder for the shards")
    parser.add_argument("--num-samples", type=int, required=True, help="number of image-caption pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of all samples")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="train",
        help="only 'test' contains all 80 shape-color pairs; 'train' lacks 16",
    )
    parser.add_argument(
        "--samples-per-shard", type=int, default=1000, help="samples per shard; the last shard may have fewer"
    )
    parser.add_argument("--workers", type=int, default=None, help="number of processes; None means one per core")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        config = ShapesConfig(args.num_samples, args.seed, args.split, args.samples_per_shard)
        wrote = write_shards(args.output, config, args.workers)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    shards = len(config.shards())
    print(f"{args.output}: {config.num_samples} samples in {shards} shards, {'written' if wrote else 'already there'}")


if __name__ == "__main__":
    command_line.run(main)
