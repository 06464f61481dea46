"""Convert retrieval sets and WinoGAViL from the Hugging Face hub's format (a CSV table and a zip of images) to tars.

DataComp reads these sets with loading scripts, which current versions of ``datasets`` reject. The result has DataComp's
format, with two additions: retrieval tars have a ``KEY.txt`` with one caption per line, and WinoGAViL has ``instances.jsonl``.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pandas as pd
import webdataset

from openclip_ext.evaluation.samples import IMAGE_EXTENSIONS, INSTANCES_FILE

IMAGES_PER_SHARD = 1000
_SUFFIX = re.compile(rf"\.({'|'.join(IMAGE_EXTENSIONS)})$", re.IGNORECASE)


def convert_retrieval(source: Path, folder: Path) -> None:
    """Convert Flickr or MSCOCO: read the zip and the CSV in ``source``, write images and captions to ``folder``.

    The CSV's column ``filename`` contains an image's name, and ``raw`` a JSON list of its captions. If there is a column
    ``split``, only rows with the value ``test`` are used.
    """
    samples = {}
    for row in _read_table(source, "filename", "raw"):
        if row.get("split", "test") == "test":
            if row["filename"] in samples:
                raise ValueError(f"{source}: the CSV table has two rows for {row['filename']!r}. Download it again.")
            captions = "\n".join(" ".join(caption.split()) for caption in json.loads(row["raw"]))
            samples[row["filename"]] = {"txt": captions.encode()}
    _write_shards(source, folder, samples)
    (folder / "dataset_type.txt").write_text("retrieval\n")


def convert_winogavil(source: Path, folder: Path) -> None:
    """Convert WinoGAViL: read the zip and the CSV in ``source``, write images and ``instances.jsonl`` to ``folder``.

    The CSV's columns are ``cue``, ``candidates`` and ``associations``. The last two are JSON lists of image names without
    suffix.
    """
    lines, names = [], set()
    for row in _read_table(source, "cue", "candidates", "associations"):
        lists = {column: json.loads(row[column]) for column in ("candidates", "associations")}
        names |= set(lists["candidates"])
        keys = {column: [_key(name) for name in found] for column, found in lists.items()}
        lines.append(json.dumps({"cue": row["cue"], **keys}, ensure_ascii=False) + "\n")
    _write_shards(source, folder, {name: {} for name in sorted(names)})
    (folder / INSTANCES_FILE).write_text("".join(lines), encoding="utf-8")
    (folder / "dataset_type.txt").write_text("winogavil\n")


def _read_table(source: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the CSV in ``source`` with these columns; raise ValueError if no CSV or several CSVs have them."""
    tables = {path.name: pd.read_csv(path, dtype=str, keep_default_na=False) for path in sorted(source.glob("*.csv"))}
    found = [table for table in tables.values() if set(columns) <= set(table.columns)]
    if len(found) != 1:
        headers = {name: list(table.columns) for name, table in tables.items()}
        raise ValueError(
            f"{source}: expected one CSV with columns {', '.join(columns)}, found {len(found)} in {headers}"
        )
    return found[0].to_dict("records")


def _key(name: str) -> str:
    # In WebDataset, a key ends at the first dot of the file name, so a key must not contain dots.
    return _SUFFIX.sub("", name).replace(".", "_").replace("/", "_")


def _write_shards(source: Path, folder: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write ``test/{0..}.tar`` and ``test/nshards.txt``, first to a temporary folder, which is renamed when it is complete.

    ``samples`` maps each image's name to the other fields of its sample.
    """
    zips = sorted(source.glob("*.zip"))
    if len(zips) != 1:
        raise ValueError(f"{source}: expected one zip of images, found {[path.name for path in zips]}")
    unfinished, finished = folder / "test.tmp", folder / "test"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    pattern = str(unfinished / "%d.tar")
    with (
        zipfile.ZipFile(zips[0]) as archive,
        # With a fixed modification time, equal data give equal tars.
        webdataset.ShardWriter(pattern, maxcount=IMAGES_PER_SHARD, verbose=0, encoder=False, mtime=0) as writer,
    ):
        images: dict[str, str] = {}  # paths in the zip, by file name with and without suffix
        ambiguous = set[str]()  # file names of different images in several folders
        for member in archive.namelist():
            name = PurePosixPath(member).name
            # A zip made on macOS also contains a resource file "._NAME" for every image.
            if _SUFFIX.search(name) and not name.startswith("._"):
                if name in images and archive.getinfo(images[name]).CRC != archive.getinfo(member).CRC:
                    ambiguous.add(name)
                images[name] = member
                images.setdefault(_SUFFIX.sub("", name), member)
        for name, fields in samples.items():
            if name not in images:
                raise ValueError(
                    f"{zips[0]} has no image {name!r}, which is in the CSV table. Download both files again."
                )
            if PurePosixPath(images[name]).name in ambiguous:
                raise ValueError(f"{zips[0]} has different images {name!r} in several folders. Download it again.")
            suffix = PurePosixPath(images[name]).suffix[1:].lower()
            writer.write({"__key__": _key(name), suffix: archive.read(images[name]), **fields})
    (unfinished / "nshards.txt").write_text(f"{len(list(unfinished.glob('*.tar')))}\n")
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.rename(finished)
