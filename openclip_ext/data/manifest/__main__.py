"""``openclip-ext manifest``: count the samples of shards, to define the index of every sample. Needs no torch."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import check_words
from openclip_ext.cli.messages import echo
from openclip_ext.data.manifest.find import cache_folder, candidates
from openclip_ext.data.manifest.manifest import FORMAT, Manifest
from openclip_ext.data.manifest.uids import keep_listed, read_uids
from openclip_ext.data.shards.shardlist import expand_shards
from openclip_ext.data.sources.keys import DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import Storage
from openclip_ext.files.schema import checked_dict
from openclip_ext.files.writing import output_path


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="openclip-ext manifest",
        description="Count the samples of shards, to define the index of every sample.",
    )
    add = parser.add_argument
    add("shards", nargs="+", help="paths, globs, brace notation, pipe: commands or URLs; several may be joined by ::")
    add(
        "--output",
        type=output_path,
        help="path of the manifest (default: manifest.json in the shards' common folder, or manifest-HASH.json if "
        "manifest.json belongs to different shards)",
    )
    add("--workers", type=int, help="number of worker processes (default: one per core)")
    add("--image-key", default=DEFAULT_IMAGE_KEY, help="possible fields of the image (default: %(default)s)")
    add(
        "--caption-key",
        default=DEFAULT_CAPTION_KEY,
        help="possible fields of the caption, such as txt;json:ENTRY (default: %(default)s)",
    )
    add("--sizes", help='JSON file with the sample counts of remote shards: {"00000.tar": count, ...}')
    add(
        "--remote-patience",
        type=float,
        default=Storage.patience,
        help="seconds for which a failing remote file is retried (default: %(default)g)",
    )
    add("--uids", metavar="FILE", help="exclude samples whose uid is not in this list: DataComp's .npy, .json or .txt")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parse_arguments(argv)
    try:
        check_words(sys.argv[1:] if argv is None else argv)
        sizes = checked_dict(json.loads(Path(args.sizes).read_bytes()), args.sizes, int) if args.sizes else None
        uids = read_uids(args.uids) if args.uids else None
        urls = expand_shards(args.shards)
        output = Path(args.output) if args.output else _place_next_to(urls, args.image_key, args.caption_key)
        _check_output(output)
        journal, storage = output.with_name(f".{output.name}.journal"), Storage(args.remote_patience)
        manifest = Manifest.scan(urls, args.image_key, args.caption_key, sizes, args.workers, storage, journal)
        if uids is not None:
            manifest = keep_listed(manifest, uids, storage, args.workers)
        manifest.save(output)
        journal.unlink(missing_ok=True)
    except (OSError, ValueError, RecursionError) as error:
        echo(f"error: {error}", sys.stderr)
        return 1
    for line in manifest.report():
        echo(line)
    n, bad = manifest.num_samples, manifest.num_bad
    lost = f", about {manifest.num_lost:,} more lost in corrupt shards" if manifest.num_lost else ""
    if len(manifest.left_out):
        echo(f"{n - len(manifest.left_out):,} samples are trained on; the uids of the others are not in {args.uids}")
    echo(f"{n:,} samples in {len(urls):,} shards, {bad:,} ({bad / n:.2%}) without image or caption{lost}: {output}")
    return 0


def _place_next_to(urls: Sequence[str], image_key: str, caption_key: str) -> Path:
    """Return the path of a new manifest next to its shards, where training finds it."""
    for path, _ in candidates(urls, image_key, caption_key):
        if path.parent != cache_folder():
            return path
    raise ValueError(
        "the manifest cannot be next to these shards, which are remote or have manifests of different shards: give --output"
    )


def _check_output(path: Path) -> None:
    """Raise ValueError if the folder is not writable, or if the file exists and is not a manifest (such as a shard).

    A corrupt manifest may be overwritten. The scan, which may take hours, comes after this check.
    """
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} does not exist or is read-only: give another --output")
    if path.exists():
        with path.open("rb") as file:
            if FORMAT.encode() not in file.read(4096):
                raise ValueError(f"{path} exists and is not a manifest: give another --output")


if __name__ == "__main__":
    sys.exit(main())
