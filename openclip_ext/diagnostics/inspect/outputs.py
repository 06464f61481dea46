"""Write findings as a self-contained HTML page, JSON and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from openclip_ext.data.shards.shardlist import shard_name
from openclip_ext.data.sources.source import MAX_CAPTION, Source, decode_image, decode_with_hash, no_image
from openclip_ext.diagnostics.inspect.findings import Found, Thresholds
from openclip_ext.files import json_lines
from openclip_ext.files.writing import write_text
from openclip_ext.pages.rendering import render_page, thumbnail

_THUMBNAIL = 112  # pixels


@dataclass(frozen=True)
class Sample:
    """A sample's global index, shard, key and caption."""

    index: int
    shard: str
    key: str
    caption: str


@dataclass(frozen=True)
class Inspection:
    """A run, and the findings in its data by category, with global indices instead of rows of the embeddings."""

    about: Mapping[str, Any]
    thresholds: Thresholds
    found: Mapping[str, Found]
    samples: Mapping[int, Sample]


def read_samples(source: Source, found: Mapping[str, Found], show: int) -> tuple[dict[int, Sample], dict[int, str]]:
    """Return all samples of the findings, and thumbnails (data URIs) for up to ``show`` findings of each category."""
    listed = {index for one in found.values() for index in one.samples.flatten().tolist()}
    shown = {index for one in found.values() for index in one.samples[one.shown(show)].flatten().tolist()}
    samples, thumbnails = {}, {}
    for raw in source.read([np.array(sorted(listed), dtype=np.int64)]):
        index = raw.index
        key, caption = source.describe(raw)
        samples[index] = Sample(index, shard_name(source.group_of(index)[0]), key, caption[:MAX_CAPTION])
        if index in shown:
            image, _ = source.decode(raw, decode_image)
            assert isinstance(image, Image.Image)
            thumbnails[index] = thumbnail(image, _THUMBNAIL)
    return samples, thumbnails


def image_hashes(source: Source, indices: Sequence[int]) -> dict[int, int]:
    """Return a hash of the image file of each sample, without decoding the images."""
    raws = source.read([np.array(sorted(set(indices)), dtype=np.int64)])
    return {raw.index: decode_with_hash(source, raw, no_image)[2] for raw in raws}


def write_json(path: Path, inspection: Inspection) -> None:
    """Write counts, definitions and findings. A finding is ``[index, value]`` or ``[index, other index, value]``."""
    define = inspection.thresholds.definition
    categories = {
        name: {"definition": define(name), "count": found.count, "found": found.entries()}
        for name, found in inspection.found.items()
    }
    content = {
        **inspection.about,
        "thresholds": asdict(inspection.thresholds),
        "categories": categories,
        "listed": {index: astuple(sample)[1:] for index, sample in inspection.samples.items()},
    }
    write_text(path, json_lines.dumps(content, ensure_ascii=False) + "\n")


def write_csv(path: Path, inspection: Inspection) -> None:
    """Write a CSV file with one line for each sample or pair."""
    content = io.StringIO(newline="")
    writer = csv.writer(content)
    columns = [field.name for field in fields(Sample)]
    writer.writerow(["category", "value", *columns, *(f"other_{column}" for column in columns)])
    for name, found in inspection.found.items():
        for *members, value in found.entries():
            texts = [text for index in members for text in astuple(inspection.samples[index])]
            writer.writerow([name, f"{value:.6g}", *(f"'{text}" if _is_formula(text) else text for text in texts)])
    write_text(path, content.getvalue())


def _is_formula(text: Any) -> bool:  # a spreadsheet program would execute a formula
    return isinstance(text, str) and text[:1] in "=+-@\t\r"


_NOTES = {
    "misfit-captions": "Left: the caption with its own image. Right: the image that matches it best, with its caption.",
    "misfit-images": "Left: the image with its own caption. Right: the caption that matches it best, with its image.",
}


def write_page(path: Path, inspection: Inspection, thumbnails: Mapping[int, str], show: int) -> None:
    """Write the HTML page: counts, definitions, and up to ``show`` findings of each category."""
    categories = [
        {
            "name": name,
            "count": found.count,
            "definition": inspection.thresholds.definition(name),
            "note": _NOTES.get(name, ""),
            "is_pair": found.samples.shape[1] == 2,
            "value": "cosine similarity" if found.samples.shape[1] == 2 else "log-normalizer",
            "shown": [
                ([inspection.samples[index] for index in members], value)
                for *members, value in (entries[place] for place in found.shown(show))
            ],
            "is_cut": found.samples.shape[1] == 2 and len(entries) > show,
        }
        for name, found, entries in ((name, found, found.entries()) for name, found in inspection.found.items())
    ]
    title = f"Data of {inspection.about['run']}"
    page = render_page("inspect.html", title, about=inspection.about, categories=categories, thumbnails=thumbnails)
    write_text(path, page)
