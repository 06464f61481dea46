"""Write shards from a CSV file, a table or class folders: ``openclip-ext shards TABLE FOLDER``.

Use shards for more than about a million pairs, or if the images are on a slow or remote disk.
"""

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.data.sources.rows import RowSource
from openclip_ext.data.sources.source import BadSampleError, decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.files.writing import output_path

# Extensions of files that are copied unchanged, by Pillow's name of the format. Other images become PNG.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the shards; raise ValueError or OSError for wrong input."""
    parser = command_line.Parser(prog="openclip-ext shards", description=__doc__)
    parser.add_argument("train_data", metavar="TABLE", help="data in a format of --train-data, except shards")
    parser.add_argument("output", type=output_path, metavar="FOLDER", help="new or empty folder")
    parser.add_argument("--samples", type=command_line.count, default=10_000, help="samples per shard (default: 10000)")
    parser.add_argument("--csv-separator", default=DataSpec.csv_separator)
    parser.add_argument("--csv-img-key", help="column of the images")
    several = "column of the captions; several, separated by ;, are stored as a list"
    parser.add_argument("--csv-caption-key", help=several)
    template = "caption of the images in a class folder (default: %(default)s)"
    parser.add_argument("--caption-template", default=DataSpec.caption_template, help=template)
    write(parser.parse_args(argv))


def write(args: argparse.Namespace) -> None:
    """Write ``00000.tar``, ... and their manifest into an empty folder. Unusable rows are left out, and counted."""
    spec = DataSpec(
        args.train_data,
        csv_separator=args.csv_separator,
        csv_image_key=args.csv_img_key,
        csv_caption_key=args.csv_caption_key,
        caption_template=args.caption_template,
    )
    source = build_source(spec)
    if not isinstance(source, RowSource):
        raise UsageError(f"{args.train_data} has shards already: expected a CSV file, a table or class folders")
    folder: Path = args.output
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: give another folder")
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    bad: list[str] = []
    with webdataset.ShardWriter(f"{folder}/%05d.tar", maxcount=args.samples, verbose=0, mtime=0) as writer:
        for sample in tqdm(_samples(source, bad), total=source.num_samples, unit="sample", disable=None):
            writer.write(sample)
    if writer.total == 0:
        raise UsageError(f"no sample can be used: {bad[0]}. The folder {folder} has no samples")
    manifest = find_or_create_manifest(f"{folder}/*.tar")
    echo(f"{manifest.num_samples:,} samples in {len(manifest.shards):,} shards: --train-data '{folder}/*.tar'")
    if source.several_captions:
        echo("For all captions of a sample: --caption-key json:captions --draw-captions")
    if bad:
        echo(f"{len(bad):,} rows are left out; the first: {bad[0]}")


def _samples(source: RowSource, bad: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples as webdataset writes them; add the reasons of unusable rows to ``bad``."""
    for raw in source.read([np.arange(source.num_samples)]):
        contents: list[bytes] = []

        def keep(file: Any, contents: list[bytes] = contents) -> Image.Image:
            contents.append(file if isinstance(file, bytes) else file.read())
            return decode_image(contents[0])

        try:
            image, caption = source.decode(raw, keep)
        except BadSampleError as error:
            bad.append(str(error))
            continue
        assert isinstance(image, Image.Image)
        name = Image.open(io.BytesIO(contents[0])).format
        sample: dict[str, str | bytes] = {"__key__": f"{raw.index:08d}", "txt": caption}
        if name in _EXTENSIONS:
            sample[_EXTENSIONS[name]] = contents[0]
        else:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            sample["png"] = buffer.getvalue()
        if source.several_captions:
            sample["json"] = json.dumps({"captions": source.row(raw.index)[1]}, ensure_ascii=False).encode()
        yield sample


if __name__ == "__main__":
    command_line.run(main)
