"""Tables of images and captions, read with the library ``datasets``: Parquet, JSON lines, saved data sets, class folders.

The index of a sample is its row number. ``datasets`` maps the rows from disk, so workers share them.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.cli.options import nearest
from openclip_ext.data.sources.keys import CAPTION_COLUMNS, DATA_FORMATS, IMAGE_COLUMNS
from openclip_ext.data.sources.source import BadSampleError, DecodedImage, ImageDecoder, RawSample, Source, limited
from openclip_ext.data.sources.spec import TABLE_LOADERS, is_saved
from openclip_ext.data.storage import open_local


class TableSource(Source):
    """Rows of a table. Paths of images are relative to the working directory, or else to the table's folder.

    Args:
        path: Parquet or JSON-lines file (or a pattern of files), folder of ``Dataset.save_to_disk``, or folder with a
            subfolder of images for each class.
        image_column: Column with images or their paths. None means the only suitable column.
        caption_column: Column with a caption, a list of captions, or a class; or several columns, separated by ``;``. None
            means the only suitable column.
        template: Caption of an image with a class. ``{}`` is the name of the class.

    Raises:
        ValueError: The table is unreadable or empty, a column is missing, or several columns are suitable.
        ImportError: The library ``datasets`` is missing.
    """

    def __init__(
        self, path: str, image_column: str | None = None, caption_column: str | None = None, template: str = "{}"
    ) -> None:
        from datasets import ClassLabel, Image, disable_progress_bars

        disable_progress_bars()
        table = _load(path)
        if not len(table):
            raise ValueError(f"the data set is empty: {path} has no rows")
        self._path, self._folder = os.path.abspath(path), os.path.dirname(os.path.abspath(path))
        (self._image,) = _columns(path, table, image_column, "image", "--csv-img-key", _holds_image)
        self._texts = _columns(path, table, caption_column, "caption", "--csv-caption-key", _holds_caption)
        self._classes = {
            name: [template.replace("{}", label.replace("_", " ")) for label in table.features[name].names]
            for name in self._texts
            if isinstance(table.features[name], ClassLabel)
        }
        table = table.select_columns([self._image, *self._texts])
        if isinstance(table.features[self._image], Image):
            table = table.cast_column(self._image, Image(decode=False))
        self._table = table
        captions = table.select_columns(self._texts)
        self.several_captions = len(self._texts) > 1 or isinstance(captions[0][self._texts[0]], list)
        content = hashlib.blake2b(repr(self._classes).encode(), digest_size=8)
        for rows in captions.iter(batch_size=10_000):
            content.update(repr(list(rows.values())).encode(errors="surrogateescape"))
        super().__init__(len(table), content.hexdigest())

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        row = self._table[raw.index]
        captions = self._captions(row)
        if not captions:
            raise BadSampleError(f"row {raw.index} has no caption")
        decoder = limited(decoder, self.max_pixels)
        content, path = _bytes_and_path(row[self._image])
        if content is not None:
            return decoder(content), captions[draw % len(captions)]
        if not path:
            raise BadSampleError(f"row {raw.index} has no image")
        try:
            with open_local(self._located(path)) as file:
                return decoder(file), captions[draw % len(captions)]
        except OSError as error:
            raise BadSampleError(f"row {raw.index}: {path} cannot be read: {error.strerror or error}") from error

    def describe(self, raw: RawSample) -> tuple[str, str]:
        row = self._table[raw.index]
        return _bytes_and_path(row[self._image])[1] or f"row {raw.index}", (self._captions(row) or [""])[0]

    def files(self) -> list[str]:
        """Return the path of the table."""
        return [self._path]

    def group_of(self, index: int) -> tuple[str, int, int]:
        return self._path, 0, self.num_samples

    def _captions(self, row: dict[str, Any]) -> list[str]:
        """Return the captions of a row, without blank ones."""
        found: list[Any] = []
        for name in self._texts:
            value = row[name]
            if name in self._classes and value is not None:
                value = self._classes[name][value]
            found += value if isinstance(value, list) else [value]
        return [text for text in found if isinstance(text, str) and text.strip()]

    def _located(self, path: str) -> str:
        return path if os.path.exists(path) else os.path.join(self._folder, path)


def _load(path: str) -> Any:
    """Return the rows of a table as a ``datasets.Dataset``."""
    import datasets

    ending = path.rpartition(".")[2]
    try:
        if os.path.isdir(path) and is_saved(path):
            table = datasets.load_from_disk(path)
        elif os.path.isdir(path):
            return datasets.load_dataset("imagefolder", data_dir=path, split="train")
        else:
            return datasets.load_dataset(TABLE_LOADERS[ending], data_files=path, split="train")
    except Exception as error:  # the library and pyarrow raise many types of errors
        raise ValueError(
            f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}; {DATA_FORMATS}"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        parts = ", ".join(str(Path(path) / name) for name in table)
        raise ValueError(f"{path} contains several data sets: give one of them, {parts}")
    return table


def _columns(
    path: str, table: Any, given: str | None, what: str, flag: str, fits: Callable[[str, Any], bool]
) -> list[str]:
    """Return the names of the given columns, or else the name of the only column that fits."""
    names: Sequence[str] = table.column_names
    found = [name for name in names if fits(name, table.features[name])]
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


def _holds_caption(name: str, feature: Any) -> bool:
    from datasets import ClassLabel

    inner = getattr(feature, "feature", None)  # of a list of texts
    is_text = _is_text(feature) or (inner is not None and _is_text(inner))
    return isinstance(feature, ClassLabel) or (is_text and name.lower() in CAPTION_COLUMNS)


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _bytes_and_path(value: Any) -> tuple[bytes | None, str]:
    """Return the content of an image in a cell, None if the cell only has the path, and the path or an empty text."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path") or ""
    return (value, "") if isinstance(value, bytes) else (None, value or "")
