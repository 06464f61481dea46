"""What was found, for people and programs: a self-contained HTML page, JSON and CSV."""

import base64
import csv
import html
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from openclip_ext.data.shardlist import shard_name
from openclip_ext.data.source import Source, decode_image
from openclip_ext.diagnostics.inspect.findings import Found, Thresholds

_THUMBNAIL = 112  # pixels
_COLUMNS = ("category", "value", "index", "shard", "key", "caption")
_PARTNER_COLUMNS = ("other_index", "other_shard", "other_key", "other_caption")


@dataclass(frozen=True)
class Sample:
    """A sample as people know it.

    Attributes:
        index: global index.
        shard, key: where it lies.
        caption: its caption.
    """

    index: int
    shard: str
    key: str
    caption: str


@dataclass(frozen=True)
class Inspection:
    """A run, and what was found in its data.

    Attributes:
        about: what was inspected, by name, for display.
        thresholds: what the categories mean.
        found: by category; rows are global indices here.
        samples: all that were found, by index.
    """

    about: Mapping[str, Any]
    thresholds: Thresholds
    found: Mapping[str, Found]
    samples: Mapping[int, Sample]


def read_samples(source: Source, indices: Iterable[int]) -> dict[int, Sample]:
    """Where samples lie, and their captions; images are not decoded."""
    samples, reader = {}, source.reader()
    for index in sorted(set(indices)):
        key, caption = source.describe(reader(index))
        samples[index] = Sample(index, shard_name(source.group_of(index)[0]), key, caption)
    return samples


def read_thumbnails(source: Source, indices: Iterable[int]) -> dict[int, str]:
    """Small images as data URIs."""
    thumbnails, reader = {}, source.reader()
    for index in sorted(set(indices)):
        image, _ = source.decode(reader(index), decode_image)
        assert isinstance(image, Image.Image)
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        thumbnails[index] = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return thumbnails


def write_json(path: Path, inspection: Inspection) -> None:
    """Counts, definitions and everything listed: entries are ``[index, value]`` or ``[index, other index, value]``."""
    categories = {
        name: {
            "definition": inspection.thresholds.definition(name),
            "count": found.count,
            "found": [[*map(int, entry[:-1]), float(entry[-1])] for entry in _entries(found)],
        }
        for name, found in inspection.found.items()
    }
    content = {
        **inspection.about,
        "thresholds": asdict(inspection.thresholds),
        "categories": categories,
        "listed": {sample.index: [sample.shard, sample.key, sample.caption] for sample in inspection.samples.values()},
    }
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def write_csv(path: Path, inspection: Inspection) -> None:
    """One line for each sample or pair that is listed."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS + _PARTNER_COLUMNS)
        for name, found in inspection.found.items():
            for *members, value in _entries(found):
                samples = [inspection.samples[int(index)] for index in members]
                writer.writerow(
                    [name, f"{value:.6g}", *(field for sample in samples for field in asdict(sample).values())]
                )


def _entries(found: Found) -> Iterable[tuple[Any, ...]]:
    columns = [found.sample, found.partner, found.value]
    return zip(*(column.tolist() for column in columns if column is not None), strict=True)


# --- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d5d8dd, #3d424a); --quiet: light-dark(#59616d, #a2aab6); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; } small, .quiet, dt { color: var(--quiet); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
table { border-collapse: collapse; } th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem .35rem 0; }
th { text-align: left; } td { vertical-align: top; }
td:first-child { white-space: nowrap; } .number { text-align: right; font-variant-numeric: tabular-nums; }
details { border-top: 1px solid var(--line); margin-top: 1.5rem; } summary { cursor: pointer; padding: .6rem 0; }
summary b { font-size: 1.15rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(var(--card), 1fr)); gap: .7rem; }
.card { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem; content-visibility: auto;
  contain-intrinsic-size: auto 14rem; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem; } figure { margin: 0; }
figure img { background: #fff; display: block; max-width: 100%; }
figcaption { max-height: 7.5rem; overflow: auto; }
"""
_PARTNER_NOTES = {
    "misfit-captions": "Left: the caption with its own image. Right: the image that fits it best, with its caption.",
    "misfit-images": "Left: the image with its own caption. Right: the pair of the caption that fits it best.",
    "hardest": "The number is the log-normalizer.",
    "easiest": "The number is the log-normalizer.",
}


def write_page(path: Path, inspection: Inspection, thumbnails: Mapping[int, str], show: int) -> None:
    """The HTML page: counts and definitions, then the first ``show`` of each category, in one file without a script."""
    title = html.escape(f"Data of {inspection.about['run']}")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><dl>",
        *(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in inspection.about.items()),
        '</dl><table><tr><th>category</th><th class="number">found</th><th>definition</th></tr>',
        *(
            f'<tr><td><a href="#{name}">{name}</a></td><td class="number">{found.count:,}</td>'
            f"<td>{_text(inspection.thresholds.definition(name))}</td></tr>"
            for name, found in inspection.found.items()
        ),
        "</table>",
        *(_section(inspection, name, thumbnails, show) for name in inspection.found),
        "</body></html>\n",
    ]
    path.write_text("".join(parts), encoding="utf-8")


def _section(inspection: Inspection, name: str, thumbnails: Mapping[int, str], show: int) -> str:
    found = inspection.found[name]
    cards = []
    for *members, value in list(_entries(found))[:show]:
        figures = "".join(_figure(inspection.samples[index], thumbnails) for index in members)
        cards.append(
            f'<div class="card"><small>{value:.3f}</small><div class="{_card_class(found)}">{figures}</div></div>'
        )
    shown = f"{len(cards):,} of {found.count:,}" if cards else "none"
    width = "12rem" if found.partner is None else "19rem"
    return (
        f'<details open id="{name}"><summary><b>{name}</b> <span class="quiet">{shown}. '
        f"{_text(inspection.thresholds.definition(name))}. {_PARTNER_NOTES.get(name, '')}</span></summary>"
        f'<div class="cards" style="--card: {width}">{"".join(cards)}</div></details>'
    )


def _card_class(found: Found) -> str:
    return "single" if found.partner is None else "pair"


def _figure(sample: Sample, thumbnails: Mapping[int, str]) -> str:
    place = " · ".join(filter(None, (f"{sample.index}", sample.shard, sample.key)))
    return (
        f'<figure><img loading="lazy" decoding="async" alt="" src="{thumbnails[sample.index]}">'
        f"<figcaption>{_text(sample.caption)}<br><small>{_text(place)}</small></figcaption></figure>"
    )


def _text(value: Any) -> str:
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))


def shown_indices(found: Mapping[str, Found], show: int | None = None) -> Iterable[int]:
    """Indices of the first ``show`` of each category and of their partners; None for all."""
    for category in found.values():
        for column in (category.sample, category.partner):
            yield from [] if column is None else np.asarray(column)[:show].tolist()
