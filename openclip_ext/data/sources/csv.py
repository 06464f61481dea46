"""CSV data sets: a row names an image file and its caption. The index of a sample is its row."""

import hashlib
import os
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from openclip_ext.data.sources.source import BadSampleError, DecodedImage, ImageDecoder, RawSample, Source
from openclip_ext.data.storage import open_local


class _Texts:
    """Strings in one block of bytes: millions of Python strings would be copied into every worker, page by page."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8") for text in texts]
        self.data = b"".join(encoded)
        self.ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __getitem__(self, row: int) -> str:
        begin = self.ends[row - 1] if row else 0
        return self.data[begin : self.ends[row]].decode("utf-8")


class CsvSource(Source):
    """Rows of a CSV file; paths of images are as seen from the working directory, a blank caption is a missing one.

    Raises:
        FileNotFoundError: The file is not there.
        ValueError: A column is not there, there are no rows, or an unbalanced quote hides some.
    """

    def __init__(self, path: str, image_column: str, caption_column: str, separator: str = "\t") -> None:
        separator = "\t" if separator == r"\t" else separator  # as most shells pass '\t' on
        if len(separator) != 1:  # pandas would take a longer one for a regular expression
            raise ValueError(f"--csv-separator {separator!r}: expected one character, such as ',' or '\\t'")
        # Without keep_default_na the captions "None" and "NA" would be missing values.
        try:
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
        except FileNotFoundError:
            raise FileNotFoundError(f"the CSV file {path} is not there") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}): convert it, with iconv for example") from error
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ValueError(f"{path} cannot be read as CSV ({error}): check its quotes and --csv-separator") from error
        for column in (image_column, caption_column):
            if column not in table.columns:
                raise ValueError(
                    f"{path} has no column {column!r} but {list(table.columns)}; {_other_separator(table)}name the "
                    f"columns with --csv-img-key and --csv-caption-key (--csv-separator is {separator!r})"
                )
        if table.empty:
            raise ValueError(f"the data set is empty: {path} has no rows")
        _refuse_swallowed_rows(path, table, image_column, separator)
        self._path = os.path.abspath(path)
        self._images = _Texts(table[image_column].tolist())
        self._captions = _Texts(table[caption_column].tolist())
        missing = (table[image_column] == "") | (table[caption_column].str.strip() == "")
        self._missing = np.flatnonzero(missing)
        content = hashlib.blake2b(digest_size=8)
        for texts in (self._images, self._captions):
            content.update(texts.data)
            content.update(texts.ends.tobytes())
        super().__init__(len(table), content.hexdigest())
        content = hashlib.blake2b(self._captions.data, digest_size=8)
        for name in table[image_column]:
            content.update(f"\0{os.path.basename(name)}".encode())
        self.index_digest = content.hexdigest()

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        path, caption = self.describe(raw)
        if not path or not caption.strip():
            raise BadSampleError(f"row {raw.index} has no {'caption' if path else 'image'}")
        try:
            with open_local(path) as file:
                return decoder(file), caption
        except OSError as error:
            raise BadSampleError(f"row {raw.index}: {path} cannot be read: {error.strerror or error}") from error

    def files(self) -> list[str]:
        """The CSV file and the images that it names."""
        return [self._path, *(self._images[row] for row in range(self.num_samples))]

    def describe(self, raw: RawSample) -> tuple[str, str]:
        return self._images[raw.index], self._captions[raw.index]

    def group_of(self, index: int) -> tuple[str, int, int]:
        return self._path, 0, self.num_samples

    def known_bad(self) -> tuple[int, str]:
        rows = self._missing[:5].tolist()
        return len(self._missing), f"{self._path}, among them rows {rows}" if rows else ""


def _other_separator(table: pd.DataFrame) -> str:
    """Return the advice to give another separator, if the only column's name holds one."""
    name = table.columns[0]
    found = [separator for separator in (",", ";", "|", "\t") if separator in name]
    typed = "\\t" if found == ["\t"] else "".join(found[:1])
    return f"add --csv-separator '{typed}', or " if found and len(table.columns) == 1 else ""


def _refuse_swallowed_rows(path: str, table: pd.DataFrame, image_column: str, separator: str) -> None:
    """Raise ValueError where a field holds other rows: a quote without its partner joins all up to the next quote.

    A caption of several lines is in order, unless one of its parts ends as the names of the images do.
    """
    endings = {os.path.splitext(name)[1] for name in table[image_column].str.strip()} - {""}
    image = f"(?:{'|'.join(map(re.escape, endings))})\\s*(?:{re.escape(separator)}|\n|$)"
    for column in table.columns:
        fields = table[column][table[column].str.contains("\n", regex=False)]
        if column != image_column and endings:
            fields = fields[fields.str.contains(image) & fields.str.contains(separator, regex=False)]
        for row, field in fields.items():
            raise ValueError(
                f"{path}: the field {column!r} of row {row} holds {field.count(chr(10)) + 1} lines, which look like rows "
                f'of their own, {field[:40]!r} ...: check the quotes there (a " that begins a field must also end it) '
                "and --csv-separator"
            )
