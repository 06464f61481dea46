"""Convert retrieval and WinoGAViL sets from the hub's table and zip to tars.

The hub has a CSV table and a zip of images for each. DataComp reads them through loading scripts, which current versions
of ``datasets`` refuse to run. The local format is DataComp's own, with two additions: ``key.txt`` (one caption a line) for
retrieval, and ``instances.jsonl`` for WinoGAViL.
"""

import csv
import io
import json
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ..retrieval import INSTANCES_FILE

IMAGES_PER_SHARD = 1000
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_RETRIEVAL_COLUMNS = ("filename", "raw")
_WINOGAVIL_COLUMNS = ("cue", "candidates", "associations")


def convert_retrieval(source: Path, folder: Path) -> int:
    """Images with their captions, for Flickr and MSCOCO.

    Args:
        source: folder with the zip and the CSV. Column ``raw`` holds a JSON list of captions, ``filename`` the image's
            name; of an optional column ``split``, only the rows ``test`` are taken.
        folder: the data set folder to write.

    Returns:
        Number of images.

    Raises:
        ValueError: if the files are not as described, or an image of the table is not in the zip.
    """
    rows = [row for row in _read_table(source, _RETRIEVAL_COLUMNS) if row.get("split", "test") == "test"]
    keys = _sample_keys(row["filename"].rsplit(".", 1)[0] for row in rows)
    with _ImageZip(source) as images:
        _write_shards(folder, (_retrieval_sample(key, row, images) for key, row in zip(keys, rows, strict=True)))
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return len(rows)


def convert_winogavil(source: Path, folder: Path) -> int:
    """The pool of images, and ``instances.jsonl`` with a line an instance.

    Args:
        source: folder with the zip and the CSV; columns ``cue``, ``candidates`` and ``associations``, the latter two
            JSON lists of image names without suffix.
        folder: the data set folder to write.

    Returns:
        Number of instances.

    Raises:
        ValueError: if the files are not as described, or an image of the table is not in the zip.
    """
    instances = [_winogavil_instance(row) for row in _read_table(source, _WINOGAVIL_COLUMNS)]
    names = sorted({name for instance in instances for name in instance["candidates"]})
    keys = dict(zip(names, _sample_keys(names), strict=True))
    with _ImageZip(source) as images:
        _write_shards(folder, ((keys[name], images.fields(name)) for name in names))
    with open(folder / INSTANCES_FILE, "w", encoding="utf-8") as stream:
        for instance in instances:
            line = {
                "cue": instance["cue"],
                "candidates": [keys[name] for name in instance["candidates"]],
                "associations": [keys[name] for name in instance["associations"]],
            }
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    (folder / "dataset_type.txt").write_text("winogavil\n")
    return len(instances)


class _ImageZip:
    """The images of the one zip in a folder, by file name and by name without suffix."""

    def __init__(self, source: Path) -> None:
        paths = sorted(source.glob("*.zip"))
        if len(paths) != 1:
            raise ValueError(f"{source} should hold one zip of images, it has {[path.name for path in paths]}")
        self._path = paths[0]

    def __enter__(self) -> "_ImageZip":
        try:
            self._zip = zipfile.ZipFile(self._path)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{self._path} is not a readable zip: {error}") from error
        self._members = {}
        for member in self._zip.namelist():
            path = PurePosixPath(member)
            # A zip made on macOS carries a "._name" resource file next to every image.
            if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("._"):
                self._members[path.name] = member
                self._members.setdefault(path.stem, member)
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def fields(self, name: str) -> dict[str, bytes]:
        """``{suffix: content}`` of the image ``name``, which is given with or without its suffix."""
        if name not in self._members:
            raise ValueError(f"{self._path.name} has no image {name!r}, which the table names")
        member = self._members[name]
        return {PurePosixPath(member).suffix[1:].lower(): self._zip.read(member)}


def _read_table(source: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of the one CSV in a folder that has the columns."""
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


def _json_list(row: Mapping[str, str], column: str) -> list[str]:
    try:
        values = json.loads(row[column])
    except ValueError as error:
        raise ValueError(f"column {column} should be a JSON list, it is {row[column]!r}") from error
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"column {column} should be a list of strings, it is {row[column]!r}")
    return values


def _retrieval_sample(key: str, row: Mapping[str, str], images: _ImageZip) -> tuple[str, dict[str, bytes]]:
    captions = [" ".join(caption.split()) for caption in _json_list(row, "raw")]
    return key, {**images.fields(row["filename"]), "txt": "\n".join(captions).encode()}


def _winogavil_instance(row: Mapping[str, str]) -> dict:
    candidates, associations = _json_list(row, "candidates"), _json_list(row, "associations")
    strangers = set(associations) - set(candidates)
    if strangers:
        raise ValueError(f"cue {row['cue']!r}: associations {sorted(strangers)} are not among the candidates")
    return {"cue": row["cue"], "candidates": candidates, "associations": associations}


def _sample_keys(names: Iterable[str]) -> list[str]:
    """Names of images -> names of tar members; WebDataset ends a key at the first dot of the file name."""
    keys = [name.replace(".", "_").replace("/", "_") for name in names]
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise ValueError(f"the table names images more than once, or they differ only in dots: {repeated[:5]}")
    return keys


def _write_shards(folder: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """``test/{0..}.tar`` and ``test/nshards.txt``, in place only when all are written."""
    unfinished, finished = folder / "test.tmp", folder / "test"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    shards = 0
    for shards, batch in enumerate(_batches(samples, IMAGES_PER_SHARD), start=1):
        with tarfile.open(unfinished / f"{shards - 1}.tar", "w") as tar:
            for key, fields in batch:
                for suffix, content in fields.items():
                    member = tarfile.TarInfo(f"{key}.{suffix}")  # time 0: the same input gives the same bytes
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    if not shards:
        raise ValueError(f"the table for {folder.name} has no rows for the test split")
    (unfinished / "nshards.txt").write_text(f"{shards}\n")
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.rename(finished)


def _batches(samples: Iterable, size: int) -> Iterator[list]:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
