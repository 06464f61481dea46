"""CSV data sets: each row contains the path of an image and its caption. The index of a sample is its row number."""

import hashlib
import os
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from openclip_ext.data.sources.source import BadSampleError, DecodedImage, ImageDecoder, RawSample, Source, limited
from openclip_ext.data.storage import open_local


class _Texts:
    """Strings in one block of bytes. Forked workers share this block, but would copy millions of Python strings."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8") for text in texts]
        self.data = b"".join(encoded)
        self.ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)

    def __getitem__(self, row: int) -> str:
        begin = self.ends[row - 1] if row else 0
        return self.data[begin : self.ends[row]].decode("utf-8")


class CsvSource(Source):
    """Rows of a CSV file. Image paths are relative to the working directory; a blank caption counts as missing.

    Raises:
        FileNotFoundError, ValueError: The file, a column or all rows are missing, or an unbalanced quote hides rows.
    """

    def __init__(self, path: str, image_column: str, caption_column: str, separator: str = "\t") -> None:
        separator = "\t" if separator == r"\t" else separator  # most shells pass '\t' as a backslash and a t
        if len(separator) != 1:  # pandas would read a longer separator as a regular expression
            raise ValueError(f"--csv-separator {separator!r}: expected one character, such as ',' or '\\t'")
        # With keep_default_na=True, pandas would treat the captions "None" and "NA" as missing.
        try:
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
        except (ValueError, EOFError) as error:  # EOFError: an incomplete .csv.gz
            raise ValueError(
                f"{path} is not UTF-8 text or not CSV ({error}): check its encoding, quotes and --csv-separator"
            ) from error
        for column in (image_column, caption_column):
            if column not in table.columns:
                raise ValueError(
                    f"{path} has no column {column!r} but {list(table.columns)}; set --csv-separator (now {separator!r}), or "
                    "name the columns with --csv-img-key and --csv-caption-key"
                )
        if not isinstance(table.index, pd.RangeIndex):  # pandas reads surplus fields as row names
            raise ValueError(
                f"{path}: the first row has more fields than the header {list(table.columns)}: "
                f"quote fields that contain {separator!r}, or set --csv-separator"
            )
        if table.empty:
            raise ValueError(f"the data set is empty: {path} has no rows")
        _refuse_hidden_rows(path, table, image_column, separator)
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
                return limited(decoder, self.max_pixels)(file), caption
        except OSError as error:
            raise BadSampleError(f"row {raw.index}: {path} cannot be read: {error.strerror or error}") from error

    def files(self) -> list[str]:
        """Return the paths of the CSV file and of the images in it."""
        return [self._path, *(self._images[row] for row in range(self.num_samples))]

    def describe(self, raw: RawSample) -> tuple[str, str]:
        return self._images[raw.index], self._captions[raw.index]

    def group_of(self, index: int) -> tuple[str, int, int]:
        return self._path, 0, self.num_samples

    def known_bad(self) -> tuple[int, str]:
        rows = self._missing[:5].tolist()
        return len(self._missing), f"{self._path}, for example rows {rows}" if rows else ""


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
