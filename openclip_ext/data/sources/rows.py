"""Rows of a table, each with an image (a file or its content) and its captions. The index of a sample is its row number."""

import functools
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Iterator
from urllib.parse import unquote

from openclip_ext.cli.messages import get_logger
from openclip_ext.data.sources.source import BadSampleError, DecodedImage, ImageDecoder, RawSample, Source, limited
from openclip_ext.data.storage import is_local, local_path, open_local

logger = get_logger(__name__)

# Rows by whose cells a column is recognized.
FIRST_ROWS = 20
ONE_IMAGE = "names several columns, but each row has one image: write a row for each image"


def refuse_empty(path: str) -> None:
    """Raise ValueError if the file of a table has no content."""
    if os.path.isfile(path) and not os.path.getsize(path):
        raise ValueError(f"the data set is empty: {path} has 0 bytes")


class RowSource(Source):
    """A table. Paths of images are relative to the working directory or, if there is no such file, to the table's folder.

    Args:
        path: Path of the table.
        num_samples: Number of rows.
        digest: Hash of the rows.
    """

    def __init__(self, path: str, num_samples: int, digest: str) -> None:
        super().__init__(num_samples, digest)
        self.path = local_path(path)

    @abstractmethod
    def row(self, number: int) -> tuple[bytes | str, list[str]]:
        """Return the content or the path of a row's image, empty if missing, and its captions without blank ones."""

    @abstractmethod
    def files(self) -> list[str]:
        """Return the paths of the table's files, and of the images that they name."""

    def hard_negatives(self, number: int) -> list[str]:
        """Return a row's captions that do not fit its image, without blank ones."""
        return []

    def hard_negative(self, raw: RawSample, draw: int) -> str:
        """See :meth:`Source.hard_negative`."""
        captions = self.hard_negatives(raw.index)
        if not captions:
            raise BadSampleError(f"row {raw.index} has no hard negative")
        return captions[draw % len(captions)]

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        image, captions = self.row(raw.index)
        if not image or not captions:
            raise BadSampleError(f"row {raw.index} has no {'caption' if image else 'image'}")
        decoder, caption = limited(decoder, self.max_pixels), captions[draw % len(captions)]
        if isinstance(image, bytes):
            return decoder(image), caption
        try:
            with open_local(located(image, self.path)) as file:
                return decoder(file), caption
        except BadSampleError as error:
            raise BadSampleError(f"{image}: {error}") from error
        except OSError as error:
            is_url = not is_local(image) and "is a URL, which is not read: make shards with img2dataset"
            reason = is_url or f"cannot be read: {error.strerror or error}"
            raise BadSampleError(f"row {raw.index}: {image} {reason}") from error

    def describe(self, raw: RawSample) -> tuple[str, str]:
        image, captions = self.row(raw.index)
        return image if image and isinstance(image, str) else f"row {raw.index}", (captions or [""])[0]

    def group_of(self, index: int) -> tuple[str, int, int]:
        return self.path, 0, self.num_samples


def log_columns(path: str, image_column: str, caption_column: str) -> None:
    """Log the detected columns of a table, once."""
    if logger.isEnabledFor(logging.INFO):  # a run checks its tables before it has a log
        _log_columns(path, image_column, caption_column)


@functools.cache  # validation data are opened at each evaluation
def _log_columns(path: str, image_column: str, caption_column: str) -> None:
    logger.info(f"{path}: images in the column {image_column!r}, captions in {caption_column!r}.")


def located(image: str, table: str) -> str:
    """Return the existing file that a table's path of an image means; if there is none, the path."""
    return next(filter(os.path.exists, _possible_paths(image, os.path.dirname(local_path(table)))), image)


def _possible_paths(image: str, folder: str) -> Iterator[str]:
    yield image
    is_url = image.startswith("file:")
    name = unquote(re.sub("^file:(//(localhost)?(?=/))?", "", image)) if is_url else os.path.expanduser(image)
    for path in (name, name.replace("\\", "/")):  # Windows writes backslashes
        yield path
        yield os.path.join(folder, path)
