"""The command line ``openclip-ext manifest``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openclip_ext.data.manifest.manifest import FORMAT, Manifest
from openclip_ext.data.manifest.search import place_beside
from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.spec import DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="openclip-ext manifest", description="Count the samples of shards, and so fix the index of every sample."
    )
    parser.add_argument(
        "shards", nargs="+", help="paths, globs, brace notation, pipe: commands or URLs; also joined by ::"
    )
    parser.add_argument(
        "--output",
        help="where to write (default: manifest.json in the shards' common folder, manifest-HASH.json if that name is "
        "taken by one of other shards)",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument(
        "--image-key", default=DEFAULT_IMAGE_KEY, help="fields that hold the image (default: %(default)s)"
    )
    parser.add_argument(
        "--caption-key",
        default=DEFAULT_CAPTION_KEY,
        help="fields that hold the caption, or json:ENTRY (default: %(default)s)",
    )
    parser.add_argument("--sizes", help='JSON file {"00000.tar": count, ...} for remote shards')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parse_arguments(argv)
    try:
        sizes = json.loads(Path(args.sizes).read_bytes()) if args.sizes else None
        urls = expand_shards(args.shards)
        output = Path(args.output) if args.output else place_beside(urls, args.image_key, args.caption_key)
        _refuse_other_file(output)
        manifest = Manifest.scan(urls, args.image_key, args.caption_key, sizes, args.workers)
        manifest.save(output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in manifest.report():
        print(line)
    n, bad, lost = manifest.num_samples, manifest.num_bad, manifest.num_lost
    print(
        f"{n:,} samples in {len(urls):,} shards, {bad:,} ({bad / n:.2%}) without image or caption"
        + (
            f", {'at least' if manifest.ends_too_soon else 'about'} {lost:,} more lost in damaged shards"
            if lost
            else ""
        )
        + f": {output}"
    )
    return 0


def _refuse_other_file(path: Path) -> None:
    """Raise ValueError rather than overwrite a file that is no manifest, such as a shard."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if FORMAT.encode() in file.read(4096):  # a damaged one may be replaced
                return
    raise ValueError(f"{path} is there and no manifest: give another --output")
