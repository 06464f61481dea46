"""Convert retrieval sets and WinoGAViL from the hub's CSV table and zip of images to tars.

DataComp reads them through loading scripts, which today's ``datasets`` refuses to run. The local format is DataComp's own,
with two additions: ``key.txt`` (one caption a line) for retrieval, and ``instances.jsonl`` for WinoGAViL.
"""

import csv
import io
import json
import re
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from .data import IMAGE_EXTENSIONS
from .retrieval import INSTANCES_FILE

IMAGES_PER_SHARD = 1000
_SUFFIX = re.compile(rf"\.({'|'.join(IMAGE_EXTENSIONS)})$", re.IGNORECASE)

# An image's name, and what accompanies it in its sample.
_Entry = tuple[str, dict[str, bytes]]


def convert_retrieval(source: Path, folder: Path) -> None:
    """Write the images of Flickr or MSCOCO with their captions.

    Args:
        source: folder with the zip and the CSV. Column ``raw`` holds a JSON list of captions, ``filename`` the image's
            name; of an optional column ``split``, only the rows ``test`` are taken.
        folder: the data set folder to write.

    Raises:
        ValueError: if the files are not as described, or an image of the table is not in the zip.
    """
    entries = []
    for row in _read_table(source, ("filename", "raw")):
        if row.get("split", "test") == "test":
            captions = [" ".join(caption.split()) for caption in _names_in(row, "raw")]
            entries.append((row["filename"], {"txt": "\n".join(captions).encode()}))
    _write_shards(source, folder, entries)
    (folder / "dataset_type.txt").write_text("retrieval\n")


def convert_winogavil(source: Path, folder: Path) -> None:
    """Write the pool of images, and ``instances.jsonl`` with a line an instance.

    Args:
        source: folder with the zip and the CSV; columns ``cue``, ``candidates`` and ``associations``, the latter two
            JSON lists of image names without suffix.
        folder: the data set folder to write.

    Raises:
        ValueError: if the files are not as described, or an image of the table is not in the zip.
    """
    lines, names = [], set()
    for row in _read_table(source, ("cue", "candidates", "associations")):
        candidates, associations = _names_in(row, "candidates"), _names_in(row, "associations")
        if strangers := set(associations) - set(candidates):
            raise ValueError(f"cue {row['cue']!r}: associations {sorted(strangers)} are not among the candidates")
        names |= set(candidates)
        keys = {"candidates": list(map(_key, candidates)), "associations": list(map(_key, associations))}
        lines.append(json.dumps({"cue": row["cue"], **keys}, ensure_ascii=False) + "\n")
    _write_shards(source, folder, [(name, {}) for name in sorted(names)])
    (folder / INSTANCES_FILE).write_text("".join(lines), encoding="utf-8")
    (folder / "dataset_type.txt").write_text("winogavil\n")


def _read_table(source: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of the one CSV in a folder that has the columns."""
    csv.field_size_limit(1 << 24)
    fitting, headers = [], {}
    for path in sorted(source.glob("*.csv")):
        with open(path, newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            headers[path.name] = reader.fieldnames
            if set(columns) <= set(reader.fieldnames or ()):
                fitting.append(list(reader))
    if len(fitting) != 1:
        raise ValueError(
            f"{source} should hold one CSV with the columns {', '.join(columns)}; {len(fitting)} fit of {headers}"
        )
    return fitting[0]


def _names_in(row: dict[str, str], column: str) -> list[str]:
    """Return the strings of a column that holds a JSON list of them."""
    try:
        values = json.loads(row[column])
    except ValueError:
        values = None
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"column {column} should be a JSON list of strings, it is {row[column]!r}")
    return values


def _key(name: str) -> str:
    """Return the key of an image in a tar; WebDataset ends it at the first dot of the file name."""
    return _SUFFIX.sub("", name).replace(".", "_").replace("/", "_")


def _write_shards(source: Path, folder: Path, entries: Sequence[_Entry]) -> None:
    """Write ``test/{0..}.tar`` and ``test/nshards.txt``, in place only when all are written."""
    keys = [_key(name) for name, _ in entries]
    if not keys or len(set(keys)) < len(keys):
        repeated = sorted({key for key in keys if keys.count(key) > 1})[:5]
        raise ValueError(
            f"the table names images more than once, or they differ only in dots: {repeated}"
            if keys
            else f"the table for {folder.name} has no rows for the test split"
        )
    unfinished, finished = folder / "test.tmp", folder / "test"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    starts = range(0, len(entries), IMAGES_PER_SHARD)
    with _open_zip(source) as archive:
        images = _images_of(archive)
        for number, start in enumerate(starts):
            with tarfile.open(unfinished / f"{number}.tar", "w") as tar:
                for name, texts in entries[start : start + IMAGES_PER_SHARD]:
                    if name not in images:
                        raise ValueError(f"{archive.filename} has no image {name!r}, which the table names")
                    suffix = PurePosixPath(images[name]).suffix[1:].lower()
                    for extension, content in {suffix: archive.read(images[name]), **texts}.items():
                        member = tarfile.TarInfo(f"{_key(name)}.{extension}")  # time 0: the same bytes each time
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    (unfinished / "nshards.txt").write_text(f"{len(starts)}\n")
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.rename(finished)


def _open_zip(source: Path) -> zipfile.ZipFile:
    paths = sorted(source.glob("*.zip"))
    if len(paths) != 1:
        raise ValueError(f"{source} should hold one zip of images, it has {[path.name for path in paths]}")
    try:
        return zipfile.ZipFile(paths[0])
    except zipfile.BadZipFile as error:
        raise ValueError(f"{paths[0]} is not a readable zip: {error}") from error


def _images_of(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the members of a zip that are images, by file name and by name without suffix."""
    images: dict[str, str] = {}
    for member in archive.namelist():
        name = PurePosixPath(member).name
        # A zip made on macOS carries a "._name" resource file next to every image.
        if _SUFFIX.search(name) and not name.startswith("._"):
            images[name] = member
            images.setdefault(_SUFFIX.sub("", name), member)
    return images
