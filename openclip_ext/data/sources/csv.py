"""CSV data sets: each row contains the path of an image and its captions."""

import ast
import contextlib
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from openclip_ext.cli.messages import for_people
from openclip_ext.data.sources.keys import CAPTION_COLUMNS, IMAGE_COLUMNS, LABEL_COLUMNS
from openclip_ext.data.sources.rows import FIRST_ROWS, ONE_IMAGE, RowSource, located, log_columns, refuse_empty
from openclip_ext.data.sources.spec import DataSpec, is_image_file
from openclip_ext.data.storage import is_local, local_path

_SEPARATORS = ("\t", ",", ";", "|")
# OpenCLIP's columns, which have precedence if the user names none.
_OPENCLIP_IMAGE, _OPENCLIP_CAPTION = "filepath", "title"


class _Format(NamedTuple):
    """How to read a table."""

    image_column: str
    caption_column: str  # or several columns, separated by ``;``
    separator: str


class _Texts:
    """Strings in one block of bytes. Forked workers share this block, but would copy millions of Python strings."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8") for text in texts]
        self.data = b"".join(encoded)
        self.ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __getitem__(self, row: int) -> str:
        begin = self.ends[row - 1] if row else 0
        return self.data[begin : self.ends[row]].decode("utf-8")


class CsvSource(RowSource):
    """Rows of a CSV file. A blank caption counts as missing.

    Columns that are None, and a tab that does not fit, are detected. ``caption_column`` and ``hard_negative_column`` (see
    :meth:`RowSource.hard_negatives`) may name several columns, separated by ``;``.

    Raises:
        FileNotFoundError, ValueError: The file, a column or all rows are missing, or an unbalanced quote hides rows.
    """

    def __init__(
        self,
        path: str,
        image_column: str | None = None,
        caption_column: str | None = None,
        separator: str = DataSpec.csv_separator,
        hard_negative_column: str | None = None,
    ) -> None:
        usual = _Format(image_column or _OPENCLIP_IMAGE, caption_column or _OPENCLIP_CAPTION, separator)
        image_column, caption_column, separator = found = _find_format(path, image_column, caption_column, separator)
        if found != usual:
            log_columns(path, image_column, caption_column)
        table = _read(path, separator)
        if table.empty:
            raise ValueError(f"the data set is empty: {path} has no rows")
        _refuse_hidden_rows(path, table, image_column, separator)
        columns = _caption_columns(table.columns, caption_column)
        self.several_captions = len(columns) > 1
        self._images = _Texts(table[image_column].tolist())
        self._captions = [_Texts(table[column].tolist()) for column in columns]
        hard = [] if hard_negative_column is None else _caption_columns(table.columns, hard_negative_column)
        if unknown := [column for column in hard if column not in table.columns]:
            raise ValueError(
                f"{path} has no column {unknown[0]!r}; found {', '.join(table.columns)}: set --hard-negative-key"
            )
        self._hard = [_Texts(table[column].tolist()) for column in hard]
        self.has_hard_negatives = bool(hard)
        self._missing = np.flatnonzero(
            (table[image_column] == "") | (table[columns].apply(lambda texts: texts.str.strip()) == "").all(axis=1)
        )
        content = hashlib.blake2b(digest_size=8)
        for texts in (self._images, *self._captions):
            content.update(texts.data)
            content.update(texts.ends.tobytes())
        super().__init__(path, len(table), content.hexdigest())
        content = hashlib.blake2b(b"".join(texts.data for texts in self._captions), digest_size=8)
        for name in table[image_column]:
            content.update(f"\0{os.path.basename(name)}".encode())
        self.index_digest = content.hexdigest()

    def row(self, number: int) -> tuple[str, list[str]]:
        return self._images[number], _texts_of(self._captions, number)

    def hard_negatives(self, number: int) -> list[str]:
        return _texts_of(self._hard, number)

    def files(self) -> list[str]:
        return [self.path, *(located(self._images[row], self.path) for row in range(self.num_samples))]

    def known_bad(self) -> tuple[int, str]:
        rows = self._missing[:5].tolist()
        return len(self._missing), f"{self.path}, for example rows {rows}" if rows else ""


def _texts_of(columns: Sequence[_Texts], row: int) -> list[str]:
    return [text for text in (column[row] for column in columns) if text.strip()]


def check_first_rows(path: str, image_column: str | None, caption_column: str | None, separator: str) -> None:
    """Raise ValueError if a table has no readable columns, or if no image of its first rows exists. Reads only these rows."""
    found = _find_format(path, image_column, caption_column, separator)
    table = _read(path, found.separator, FIRST_ROWS)
    images = [image for image in table[found.image_column] if image]
    if images and not any(os.path.isfile(located(image, path)) for image in images):
        raise ValueError(for_people(f"{path}: {_unreadable(images)}"))
    for column in _caption_columns(table.columns, found.caption_column):
        captions = [caption for caption in table[column] if caption.strip()]
        if captions and all(map(_is_list, captions)):
            raise ValueError(
                f"{path}: the column {column!r} contains lists, which are not split: write a column for each caption, or "
                "shards with --caption-key json:ENTRY"
            )


def _unreadable(images: Sequence[str]) -> str:
    if not is_local(images[0]):
        return f"images such as {images[0]} are URLs, which are not read: make shards of them with img2dataset"
    return (
        f"none of the first {len(images)} images exists, such as {images[0]}: write paths that are absolute, or relative to "
        "the working directory or the table's folder"
    )


def _is_list(caption: str) -> bool:
    """Return whether a caption is a list of texts, in JSON or as Python prints it."""
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        value = ast.literal_eval(caption) if caption.startswith("[") else None
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return False


def _read(path: str, separator: str, rows: int | None = None) -> pd.DataFrame:
    """Return a table of texts, or only its first rows; raise ValueError if it is not a CSV file."""
    refuse_empty(path)
    # With keep_default_na=True, pandas would treat the captions "None" and "NA" as missing.
    try:
        file = local_path(path) if is_local(path) else path
        table = pd.read_csv(file, sep=separator, dtype=str, keep_default_na=False, nrows=rows)
    except (ValueError, EOFError) as error:  # EOFError: an incomplete .csv.gz
        raise ValueError(
            f"{path} is not UTF-8 text or not CSV ({error}): check its encoding, quotes and --csv-separator"
        ) from error
    if len(table) and not isinstance(table.index, pd.RangeIndex):  # pandas reads surplus fields as row names
        raise ValueError(
            f"{path}: the first row has more fields than the header {list(table.columns)}: quote fields that contain "
            f"{separator!r}, or set --csv-separator"
        )
    return table


def _find_format(path: str, image_column: str | None, caption_column: str | None, separator: str) -> _Format:
    """Return the given separator and columns. In place of None, and of a tab that does not fit, return what fits the header.

    Raises:
        ValueError: Nothing fits.
    """
    separator = "\t" if separator == r"\t" else separator  # most shells pass '\t' as a backslash and a t
    if len(separator) != 1:  # pandas would read a longer separator as a regular expression
        raise ValueError(f"--csv-separator {separator!r}: expected one character, such as ',' or '\\t'")
    possible = _SEPARATORS if separator == DataSpec.csv_separator else ()
    headers, candidates = {}, {}
    for each in dict.fromkeys((separator, *possible)):
        header = headers[each] = [*_read(path, each, 0).columns]
        # ``a;b`` names several captions, but never several images.
        images = [name for name in _matching(header, image_column, _OPENCLIP_IMAGE, IMAGE_COLUMNS) if name in header]
        if not images and image_column is None:
            images = _columns_whose_cells(is_image_file, path, each)
        captions = _matching(header, caption_column, _OPENCLIP_CAPTION, CAPTION_COLUMNS)
        others = [column for column in header if images and column not in images]
        if not captions and caption_column is None:
            numbers = _columns_whose_cells(_is_number, path, each)
            texts = [name for name in others if name.strip().lower() not in LABEL_COLUMNS and name not in numbers]
            captions = texts if len(texts) == 1 else []
        if len(images) == len(captions) == 1:
            return _Format(images[0], captions[0], each)
        possible_captions = captions or (others if len(others) == 1 else [])
        candidates[each] = [*images, "COLUMN"][0], [*possible_captions, "COLUMN"][0]
    best = max(headers, key=lambda each: len(headers[each]))
    if image_column and image_column not in headers[best] and _matching(headers[best], image_column, "", ()):
        raise ValueError(f"{path}: --csv-img-key {shlex.quote(image_column)} {ONE_IMAGE}")
    image, caption = map(shlex.quote, candidates[best])
    flag = "" if best == separator else f"--csv-separator {shlex.quote(best)} "
    missing = [name for name in (image_column, caption_column) if name and not _matching(headers[best], name, name, ())]
    found = (
        f"has no column {' and no '.join(map(repr, missing))}" if missing else "shows no columns of paths and captions"
    )
    raise ValueError(
        f"{path}: the header {headers[best]} {found}: add {flag}--csv-img-key {image} --csv-caption-key {caption}"
    )


def _columns_whose_cells(fit: Callable[[str], bool], path: str, separator: str) -> list[str]:
    """Return the columns whose first cells all fit."""
    with contextlib.suppress(ValueError):  # another separator is right
        table = _read(path, separator, FIRST_ROWS)
        return [column for column in table if len(table) and all(map(fit, table[column].str.strip()))]
    return []


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _matching(header: Sequence[str], given: str | None, usual: str, known: Collection[str]) -> list[str]:
    if given is None and usual not in header:
        return [column for column in header if column.strip().lower() in known]
    name = usual if given is None else given
    return [name] if {*_caption_columns(header, name)} <= {*header} else []


def _caption_columns(header: Collection[str], given: str) -> list[str]:
    """Return the columns that ``--csv-caption-key`` names: one, or several that are separated by ``;``."""
    return [given] if given in header else [name.strip() for name in given.split(";") if name.strip()]


def _refuse_hidden_rows(path: str, table: pd.DataFrame, image_column: str, separator: str) -> None:
    """Raise ValueError if a field contains other rows, because an unclosed quote joins all rows up to the next quote.

    A caption of several lines is accepted if no part of it looks like the name of an image file.
    """
    endings = {os.path.splitext(name)[1] for name in table[image_column].str.strip()} - {""}
    image = f"(?:{'|'.join(map(re.escape, endings))})\\s*(?:{re.escape(separator)}|\n|$)"
    for column in table.columns:
        fields = table[column][table[column].str.contains("\n", regex=False)]
        if column != image_column and endings:
            fields = fields[fields.str.contains(image) & fields.str.contains(separator, regex=False)]
        for row, field in fields.items():
            raise ValueError(
                f"{path}: the field {column!r} of row {row} has {field.count(chr(10)) + 1} lines, which look like rows, "
                f'{field[:40]!r} ...: check the quotes (a " that begins a field must also end it) and --csv-separator'
            )
