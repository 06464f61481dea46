"""Find the images that fit a text or an image best, in embeddings: ``openclip-ext search EMBEDDINGS "red mug"``."""

import argparse
import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.reference import ABOUT, EmbeddingStore
from openclip_ext.data.sources.source import decode_image
from openclip_ext.data.sources.spec import IMAGE_FILE_ENDINGS, DataSpec
from openclip_ext.evaluation import command_line as shared
from openclip_ext.evaluation.embedding_folder import KEY_COLUMNS, KEYS
from openclip_ext.evaluation.models import OpenedModel, open_model
from openclip_ext.evaluation.results import config_digest
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.pages.rendering import render_page, thumbnail

PAGE = "search.html"
_THUMBNAIL = 224  # pixels
_ROWS = 2**16  # rows of embeddings in memory at a time


def main(argv: Sequence[str] | None = None) -> None:
    """Print the nearest samples and write a page; raise ValueError or OSError for wrong input."""
    parser = command_line.Parser(prog="openclip-ext search", description=__doc__)
    parser.add_argument("embeddings", type=Path, help="folder that openclip-ext embed wrote")
    parser.add_argument("query", help="a text, or an image file")
    parser.add_argument("--top", type=command_line.count, default=20, help="number of samples (default: 20)")
    where = f"page with the images (default: EMBEDDINGS/{PAGE})"
    parser.add_argument("--output", type=output_path, metavar="FILE", help=where)
    weights = f"{shared.REF_HELP}, if the weights of the embeddings have moved"
    parser.add_argument("--pretrained", help=weights)
    parser.add_argument("--train-data", help="new path of the data, if they have moved")
    shared.add_model_options(parser)
    args = parser.parse_args(argv)
    if not (args.embeddings / ABOUT).is_file():
        raise UsageError(f"{args.embeddings} has no {ABOUT}: expected a folder that openclip-ext embed wrote")
    store = EmbeddingStore.open(args.embeddings)
    opened = _model_of(store, args)
    rows, similarities = nearest(store, embed_query(opened, args.query), args.top)
    names = _names(args.embeddings, rows)
    unnamed = dict.fromkeys(KEY_COLUMNS, "")
    found = [
        {**unnamed, **names.get(row, {}), "index": row, "similarity": value}
        for row, value in zip(rows, similarities, strict=True)
    ]
    for entry in found:
        echo("  ".join([f"{entry['similarity']:.3f}", *(str(entry[name]) for name in KEY_COLUMNS)]))
    images, problem = _thumbnails(store, rows, args.train_data)
    page = args.output or args.embeddings / PAGE
    write_text(page, render_page("search.html", args.query, found=found, thumbnails=images, problem=problem))
    echo(f"{page} shows the samples{f' without their images: {problem}' if problem else ''}")


def nearest(store: EmbeddingStore, query: torch.Tensor, top: int) -> tuple[list[int], list[float]]:
    """Return the rows whose images have the largest cosine similarities to a unit embedding ``(d,)``, and these similarities.

    Samples without an embedding (rows of zeros) are omitted.
    """
    parts = []
    for first in range(0, len(store.images), _ROWS):
        images = torch.from_numpy(np.array(store.images[first : first + _ROWS], dtype=np.float32))
        parts.append(torch.where(images.any(dim=1), images @ query, -torch.inf))
    values, rows = torch.cat(parts).sort(descending=True, stable=True)
    count = min(top, int(values.isfinite().sum()))
    return rows[:count].tolist(), values[:count].tolist()


@torch.no_grad()
def embed_query(opened: OpenedModel, query: str) -> torch.Tensor:
    """Return the unit embedding ``(d,)`` float32 of a text, or of an image if ``query`` is the path of a file."""
    model: Any = opened.model
    if os.path.isfile(query):
        features = model.encode_image(opened.transform(decode_image(Path(query).read_bytes()))[None])
    elif query.lower().endswith(IMAGE_FILE_ENDINGS):
        raise UsageError(f"the image {query} is not found: check the path. To search for a text, remove the ending")
    else:
        features = model.encode_text(opened.tokenizer([query]))
    return normalize(features.float(), dim=-1)[0]


def _model_of(store: EmbeddingStore, args: argparse.Namespace) -> OpenedModel:
    """Open the model of the embeddings; raise UsageError if the weights or the configuration differ."""
    about = store.about
    opened = open_model(
        args.pretrained or about["pretrained"], about["model"], args.model_config, **shared.model_options(args)
    )
    differs = opened.weights_sha256 != about["weights"] or config_digest(opened.config) != about["config"]
    if differs:
        raise UsageError(
            f"{opened.checkpoint} is not the model of {store.folder}: its weights or settings differ. Give the embeddings' "
            "model with --pretrained, or write new embeddings with openclip-ext embed"
        )
    return opened


def _names(folder: Path, rows: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the line of ``keys.csv`` of each row, if the file exists."""
    if not (folder / KEYS).is_file():
        return {}
    wanted = set(rows)
    with (folder / KEYS).open(encoding="utf-8", newline="") as file:
        return {int(line["index"]): line for line in csv.DictReader(file) if int(line["index"]) in wanted}


def _thumbnails(store: EmbeddingStore, rows: Sequence[int], moved_to: str | None) -> tuple[dict[int, str], str]:
    """Return data URIs of the images by row, and why there are none; this text is empty if the data are readable."""
    spec = store.about.get("spec", {}) | ({} if moved_to is None else {"source": moved_to})
    try:
        source = build_source(DataSpec(**spec))
        if source.index_digest != store.about["data"]:
            raise ValueError("the data have changed since they were embedded: embed them again")
        images = {}
        for raw in source.read([np.array(sorted(rows), dtype=np.int64)]):
            image, _ = source.decode(raw, decode_image)
            assert isinstance(image, Image.Image)
            images[raw.index] = thumbnail(image, _THUMBNAIL)
        return images, ""
    except (OSError, ValueError, TypeError) as error:
        return {}, f"{error}. Give the data with --train-data"


if __name__ == "__main__":
    command_line.run(main)
