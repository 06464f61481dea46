"""Sources: what loaders read samples from, by index, raw first and decoded later.

Reading and decoding are apart because they happen at different times: a shuffle holds raw bytes, not images.
"""

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from openclip_ext.data.hashing import Purpose, hash_int
from openclip_ext.data.order import EpochSequence
from openclip_ext.data.scan import Key


class BadDataError(RuntimeError):
    """The data are too bad to go on: a shard without a usable sample, or too many bad samples."""


class BadSampleError(ValueError):
    """One sample lacks its image or caption or does not decode; it is skipped and counted."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as read.

    Attributes:
        index: Global index.
        fields: Data by field, in the form that the source decodes.
        found: Names of all fields of the sample, for messages.
        problem: Why the sample could not be read; None if it could.
    """

    index: int
    fields: dict[str, Any]
    found: Sequence[str] = ()
    problem: str | None = None


class Reader(ABC):
    """Reads samples one after the other; fast if their indices ascend. Belongs to one process."""

    @abstractmethod
    def read(self, index: int) -> RawSample:
        """The raw sample; never raises for a bad one."""

    def close(self) -> None:  # noqa: B027 (nothing to do for most)
        """Close open files."""


class Source(ABC):
    """A data set whose samples have indices ``0 .. num_samples - 1``."""

    #: Whether samples should be read in ascending order and shuffled in memory (tars), not at random.
    sequential: bool

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Size of the index space."""

    @property
    def num_kept(self) -> int:
        """Samples that are trained on; the others keep their index."""
        return self.num_samples

    def is_left_out(self, index: int) -> bool:
        """Whether a sample is not trained on."""
        return False

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identifies the data set; a run resumes in mid-epoch only on the same one."""

    @abstractmethod
    def sequence(self, seed: int, epoch: int, num_slots: int) -> EpochSequence:
        """The sequence of an epoch's samples; the first ``num_slots`` are used."""

    @abstractmethod
    def reader(self) -> Reader:
        """A new reader."""

    @abstractmethod
    def decode(self, raw: RawSample) -> tuple[Image.Image, str]:
        """Image (RGB) and caption.

        Raises:
            BadSampleError: It lacks one of them or does not decode.
        """

    @abstractmethod
    def group_of(self, index: int) -> tuple[str, int, int]:
        """Name, first index and number of samples of the shard (or file) that holds a sample."""

    def describe(self, raw: RawSample) -> tuple[str, str]:
        """A sample's name in its shard (or file) and its caption, for people; empty where it has none."""
        return "", ""

    def known_bad(self) -> tuple[int, str]:
        """How many samples are known to be bad before training starts, and where."""
        return 0, ""

    def replacements(self, index: int, seed: int, epoch: int) -> Iterator[int]:
        """Candidates to replace a bad sample: all others of its shard, starting at a random one."""
        _, first, count = self.group_of(index)
        offset = hash_int(Purpose.REPLACEMENT, seed, epoch, index) % count
        for step in range(count):
            candidate = first + (offset + step) % count
            if candidate != index:
                yield candidate


def decode_image(data: bytes | BinaryIO) -> Image.Image:
    """Decode to RGB, as webdataset's "pilrgb" does, except that 16-bit grey images are scaled to 8 bits.

    As in OpenCLIP, the EXIF orientation is not applied.

    Raises:
        BadSampleError: The bytes are no image that Pillow can read to the end.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)
        image.load()
        if image.mode.startswith("I"):
            image = _to_8_bits(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, DecompressionBombError and others.
    except Exception as error:
        raise BadSampleError(f"the image does not decode: {type(error).__name__}: {error}") from error


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Keep the upper byte, as Pillow does for 16-bit colours; ``convert`` would clip at 255 and turn the image white."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray((values >> 8).astype(np.uint8))


def decode_fields(raw: RawSample, image_keys: Sequence[Key], caption_keys: Sequence[Key]) -> tuple[Image.Image, str]:
    """Image and caption of a sample whose fields are bytes.

    Raises:
        BadSampleError: It lacks one of them or does not decode; the message names the fields that were found.
    """
    if raw.problem is not None:
        raise BadSampleError(raw.problem)
    image_key = _choose(raw, image_keys, "image")
    caption = decode_caption(raw, caption_keys)
    return decode_image(raw.fields[image_key.field]), caption


def decode_caption(raw: RawSample, caption_keys: Sequence[Key]) -> str:
    """Caption of a sample whose fields are bytes.

    Raises:
        BadSampleError: It has none, or it does not decode.
    """
    key = _choose(raw, caption_keys, "caption")
    return _caption(raw.fields[key.field], key)


def _choose(raw: RawSample, keys: Sequence[Key], what: str) -> Key:
    for key in keys:
        if key.field in raw.fields:
            return key
    wanted = " or ".join(key.field for key in keys)
    raise BadSampleError(f"no {what}: expected {wanted}, found {', '.join(raw.found) or 'nothing'}")


def _caption(data: bytes, key: Key) -> str:
    try:
        text = data.decode("utf-8")
        if key.entry is None:
            return text
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"the caption ({key.field}) does not decode: {error}") from error
    entry = content.get(key.entry) if isinstance(content, dict) else None
    if not isinstance(entry, str):
        found = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise BadSampleError(f"no caption: expected the text {key.entry!r} in {key.field}, found {found or 'nothing'}")
    if not entry.isprintable() and any("\ud800" <= character <= "\udfff" for character in entry):
        # JSON can write half of a surrogate pair, on which tokenizers fail.
        raise BadSampleError(f"the caption ({key.field}) does not decode: it has a lone surrogate")
    return entry
