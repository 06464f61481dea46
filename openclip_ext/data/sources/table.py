"""Tables of images and captions, read with the library ``datasets``: Parquet, JSON lines, saved data sets, class folders.

``datasets`` maps the rows from disk, so workers share them.
"""

import glob
import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openclip_ext.cli.messages import get_logger
from openclip_ext.cli.options import nearest
from openclip_ext.data.sources.keys import CAPTION_COLUMNS, DATA_FORMATS, IMAGE_COLUMNS, LABEL_COLUMNS
from openclip_ext.data.sources.rows import FIRST_ROWS, ONE_IMAGE, RowSource, located, log_columns, refuse_empty
from openclip_ext.data.sources.spec import (
    TABLE_LOADERS,
    class_folders,
    files_below,
    images_below,
    is_image_file,
    is_saved,
)

logger = get_logger(__name__)


class TableSource(RowSource):
    """Rows of a table that the library ``datasets`` reads.

    Args:
        path: Parquet or JSON-lines file (or a pattern of files), folder of ``Dataset.save_to_disk``, or folder with a
            subfolder of images for each class.
        image_column: Column with images or their paths. None means the only suitable column.
        caption_column: Column with a caption, a list of captions, captions by name (such as by language), or a class; or
            several columns, separated by ``;``. None means the only suitable column.
        template: Caption of an image with a class. ``{}`` is the name of the class.
        hard_negative_column: Column with captions that do not fit the images, like ``caption_column``. None means no column.

    Raises:
        ValueError: The table is unreadable or empty, a column is missing, or several columns are suitable.
        ImportError: The library ``datasets`` is missing.
    """

    def __init__(
        self,
        path: str,
        image_column: str | None = None,
        caption_column: str | None = None,
        template: str = "{}",
        hard_negative_column: str | None = None,
    ) -> None:
        from datasets import ClassLabel, Image, disable_progress_bars

        disable_progress_bars()
        table = _load(path)
        if not len(table):
            raise ValueError(f"the data set is empty: {path} has no rows")
        names_images = partial(_names_images, table)
        self._image, *surplus = _columns(
            path, table, image_column, "image", "--csv-img-key", _holds_image, names_images
        )
        if surplus:
            raise ValueError(f"{path}: --csv-img-key {shlex.quote(str(image_column))} {ONE_IMAGE}")
        others = table if caption_column else table.remove_columns(self._image)  # a column of paths has no captions
        self._texts = _columns(
            path, others, caption_column, "caption", "--csv-caption-key", _holds_caption, _holds_text
        )
        self._hard: list[str] = []
        if hard_negative_column is not None:
            self._hard = _columns(
                path, table, hard_negative_column, "hard negative", "--hard-negative-key", _holds_caption
            )
        self.has_hard_negatives = bool(self._hard)
        self._classes = {
            name: [template.replace("{}", label.replace("_", " ")) for label in table.features[name].names]
            for name in self._texts
            if isinstance(table.features[name], ClassLabel)
        }
        self.has_classes = bool(self._classes)
        if caption_column is None and not self._classes:
            log_columns(path, self._image, *self._texts)
        table = table.select_columns(list(dict.fromkeys([self._image, *self._texts, *self._hard])))
        if isinstance(table.features[self._image], Image):
            table = table.cast_column(self._image, Image(decode=False))
        self._table = table
        captions = table.select_columns(self._texts)
        self.several_captions = len(self._texts) > 1
        content = hashlib.blake2b(repr(self._classes).encode(), digest_size=8)
        for rows in captions.iter(batch_size=10_000):
            content.update(repr(list(rows.values())).encode(errors="surrogateescape"))
            # The first rows may be empty, and JSON lines may contain texts and lists in one column.
            self.several_captions |= any(isinstance(value, list | dict) for value in rows[self._texts[0]])
        for image, size in _places_of_images(table, self._image):
            content.update(repr((_below(image, path), size)).encode(errors="surrogateescape"))
        super().__init__(path, len(table), content.hexdigest())

    def row(self, number: int) -> tuple[bytes | str, list[str]]:
        cells = self._table[number]
        return _image(cells[self._image]), self._captions(cells, self._texts)

    def hard_negatives(self, number: int) -> list[str]:
        return self._captions(self._table.select_columns(self._hard)[number], self._hard)

    def files(self) -> list[str]:
        if os.path.isdir(self.path):
            files = list(files_below(self.path))
        else:
            files = [self.path] if os.path.isfile(self.path) else sorted(glob.glob(self.path)) or [self.path]
        images = (path for path, size in _places_of_images(self._table, self._image) if path and not size)
        return list(dict.fromkeys([*files, *(located(path, self.path) for path in images)]))

    def _captions(self, row: dict[str, Any], columns: Sequence[str]) -> list[str]:
        """Return the texts in some columns of a row, without blank ones."""
        found: list[Any] = []
        for name in columns:
            value = row[name]
            if name in self._classes and value is not None:
                value = self._classes[name][value]
            value = [*value.values()] if isinstance(value, dict) else value
            found += value if isinstance(value, list) else [value]
        return [text for text in found if isinstance(text, str) and text.strip()]


def _load(path: str) -> Any:
    """Return the rows of a table as a ``datasets.Dataset``."""
    import datasets

    ending = path.rpartition(".")[2]
    refuse_empty(path)
    try:
        if os.path.isdir(path) and is_saved(path):
            table = datasets.load_from_disk(path)
        elif os.path.isdir(path):
            return _load_class_folders(path)
        else:
            # The name of an existing file is no pattern, as for shards, even if it contains brackets.
            files = glob.escape(path) if os.path.isfile(path) else path
            return datasets.load_dataset(TABLE_LOADERS[ending], data_files=files, split="train")
    except Exception as error:  # the library and pyarrow raise many types of errors
        raise ValueError(
            f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}; {DATA_FORMATS}"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        parts = ", ".join(str(Path(path) / name) for name in table)
        raise ValueError(f"{path} contains several data sets: give one of them, {parts}")
    return table


def _load_class_folders(path: str) -> Any:
    """Return the images and classes of a folder with a subfolder for each class.

    The loader ``imagefolder`` has no classes if the images have different depths, and omits files such as ``test_1.jpg``.
    """
    from datasets import ClassLabel, Dataset, Features, Image

    listed = ((name, list(images_below(os.path.join(path, name)))) for name in class_folders(path))
    images = {name: files for name, files in listed if files}
    if unused := sorted(name for name in os.listdir(path) if is_image_file(name) and not name.startswith(".")):
        logger.warning(
            "%s: the %d images beside the class folders, such as %s, have no class and are not used",
            path,
            len(unused),
            unused[0],
        )
    columns = {
        "image": [file for files in images.values() for file in files],
        "label": [number for number, files in enumerate(images.values()) for _ in files],
    }
    return Dataset.from_dict(columns, Features(image=Image(decode=False), label=ClassLabel(names=list(images))))


def _columns(
    path: str, table: Any, given: str | None, what: str, flag: str, *rules: Callable[[str, Any], bool]
) -> list[str]:
    """Return the names of the given columns, or else the name of the only column that fits the first rule that one fits."""
    names: Sequence[str] = table.column_names
    fitting = ([name for name in names if fits(name, table.features[name])] for fits in rules)
    found = next(filter(None, fitting), [])
    if given is not None:
        asked = [name.strip() for name in given.split(";")]
        if unknown := [name for name in asked if name not in names]:
            hint = nearest(unknown[0], names)
            raise ValueError(f"{path} has no column {unknown[0]!r}{hint}; found {', '.join(names)}: set {flag}")
        return asked
    if len(found) != 1:
        count = f"several columns with {what}s: {', '.join(found)}" if found else f"no column with {what}s"
        raise ValueError(f"{path} has {count}. Name one with {flag}; found {', '.join(names)}")
    return found


def _holds_image(name: str, feature: Any) -> bool:
    from datasets import Image, Value

    if isinstance(feature, dict):
        return "bytes" in feature
    if isinstance(feature, Value):
        return feature.dtype in ("binary", "large_binary") or (_is_text(feature) and name.lower() in IMAGE_COLUMNS)
    return isinstance(feature, Image)


def _names_images(table: Any, name: str, feature: Any) -> bool:
    """Return whether the first cells of a column are texts that all end like the names of image files."""
    cells = table.select_columns([name])[:FIRST_ROWS][name] if _is_text(feature) else [None]
    return all(cell is not None and is_image_file(cell.strip()) for cell in cells)


def _holds_caption(name: str, feature: Any) -> bool:
    from datasets import ClassLabel

    return isinstance(feature, ClassLabel) or (_has_texts(feature) and name.lower() in CAPTION_COLUMNS)


def _holds_text(name: str, feature: Any) -> bool:
    return _has_texts(feature) and name.lower() not in (*LABEL_COLUMNS, *IMAGE_COLUMNS)


def _has_texts(feature: Any) -> bool:
    """Return whether the cells of a column are texts, lists of texts, or texts by name (such as by language)."""
    if isinstance(feature, dict):
        return all(map(_is_text, feature.values()))
    return _is_text(feature) or _is_text(getattr(feature, "feature", None))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _places_of_images(table: Any, column: str) -> Iterator[tuple[str, int]]:
    """Yield the path of each image, or an empty text, and its size in bytes if the table contains it, or 0.

    The images are not read.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    for rows in table.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        for cells in rows.column(column).chunks:
            fields = [field.name for field in cells.type] if types.is_struct(cells.type) else []
            parts = [pc.struct_field(cells, name) for name in ("path", "bytes") if name in fields] or [cells]
            columns: list[list[Any]] = [[""] * len(cells), [0] * len(cells)]
            for part in parts:
                is_content = types.is_binary(part.type) or types.is_large_binary(part.type)
                columns[is_content] = (pc.binary_length(part) if is_content else part).to_pylist()
            yield from ((path or "", size or 0) for path, size in zip(*columns, strict=True))


def _below(path: str, table: str) -> str:
    """Return an image's path without the folder of its table, or its file name if it is elsewhere."""
    folder = os.path.join(table if os.path.isdir(table) else os.path.dirname(table), "")
    return path.removeprefix(folder) if folder and path.startswith(folder) else os.path.basename(path)


def _image(value: Any) -> bytes | str:
    """Return the content of the image in a cell, or its path, or an empty text."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return value or ""
