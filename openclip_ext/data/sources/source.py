"""Sources: data sets whose samples are read by index, kept undecoded in a shuffle buffer, and then decoded."""

import contextlib
import io
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from openclip_ext.cli.messages import for_people
from openclip_ext.data.hashing import hash_bytes
from openclip_ext.data.order import EpochSequence, kept_samples, shuffled_rows
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.data.sources.keys import BadSampleError, Key, captions_of, parse_keys

# An RGB image: a Pillow image, or a (3, H, W) uint8 tensor.
DecodedImage = Image.Image | Tensor
ImageDecoder = Callable[[bytes | BinaryIO], DecodedImage]

# Maximum characters of a caption. The time to tokenize a word grows at least with the square of its length, and models read
# fewer than a hundred tokens.
MAX_CAPTION = 4000
# Maximum ratio of an image's long side to its short side. For a larger ratio, resizing could take gigabytes.
MAX_ASPECT = 500
# Usual depths, in bits, of gray values that files store with 8, 16 or 32 bits.
_GRAY_DEPTHS = (8, 10, 12, 14, 16, 24, 32)


class BadDataError(RuntimeError):
    """Too many samples are bad, so the run stops."""

    def __init__(self, message: str) -> None:
        super().__init__(for_people(message))


@dataclass(frozen=True, slots=True)
class RawSample:
    """An undecoded sample with its global index."""

    index: int
    fields: dict[str, bytes] = field(default_factory=dict)  # contents of the fields that decoding needs, by name
    found: Sequence[str] = ()  # names of all fields of the sample, for messages
    key: str = ""  # the sample's name in its shard
    problem: str | None = None  # why the sample could not be read, or None


class Source(ABC):
    """A data set whose samples have indices ``0 .. num_samples - 1``.

    Attributes:
        num_samples: Number of samples, including excluded samples.
        num_kept: Number of samples used for training. Excluded samples keep their index.
        digest: Hash of the data set. A run resumes mid-epoch only with the same digest.
        index_digest: Hash of the samples and their indices. It ignores folders and exclusions. None if unknown.
        sequential: Whether samples should be read in ascending order and shuffled in memory, as from tars.
        several_captions: Whether a sample may have several captions.
        has_hard_negatives: Whether each sample has captions that do not fit its image, see :meth:`hard_negative`.
        has_classes: Whether the captions are made of a table's numbered classes.
        reference: Embeddings of the samples from a reference model, which are added to the batches. None means no embeddings.
        image_features: Embeddings of the samples, whose images are in the batches instead of pixels. None means pixels.
        max_pixels: Samples whose image has more pixels are bad. None means Pillow's limit.
    """

    sequential = False
    several_captions = False
    has_hard_negatives = False
    has_classes = False
    reference: EmbeddingStore | None = None
    image_features: EmbeddingStore | None = None
    max_pixels: int | None = None

    def __init__(self, num_samples: int, digest: str) -> None:
        self.num_samples = self.num_kept = num_samples
        self.digest = digest
        self.index_digest: str | None = digest

    def is_left_out(self, index: int) -> bool:
        """Return whether a sample is excluded from training."""
        return False

    def sequence(self, seed: int, epoch: int, num_slots: int, bad: np.ndarray) -> tuple[EpochSequence, int | None]:
        """Return the sequence of an epoch's samples, and its length; None means at least ``num_slots``.

        The epoch uses at most ``num_slots`` samples. ``bad`` ``(k,)`` int64 contains ascending indices of samples to exclude.
        """
        kept = self.num_samples - len(bad)
        return kept_samples(shuffled_rows(kept, seed, epoch), bad), kept

    def read(self, indices: Iterable[np.ndarray]) -> Iterator[RawSample]:
        """Yield the undecoded samples at these indices ``(k,)``, in their order; for a bad sample, set its ``problem``.

        A ``sequential`` source is fast if the indices ascend, and prefetches remote shards of the next array.
        """
        for part in indices:
            yield from map(RawSample, part.tolist())

    def read_one(self, index: int) -> RawSample:
        """Return one undecoded sample, see :meth:`read`."""
        return next(iter(self.read([np.array([index])])))

    @abstractmethod
    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        """Return the RGB image and the caption; raise BadSampleError if either is missing or does not decode.

        ``decoder`` receives the bytes of an image file, or the open file. The number ``draw``, modulo the number of captions,
        selects the caption.
        """

    def hard_negative(self, raw: RawSample, draw: int) -> str:
        """Return one of the captions that do not fit the image, selected by ``draw`` modulo the number of these captions.

        Raises:
            BadSampleError: The sample has no such caption.
        """
        raise NotImplementedError

    @abstractmethod
    def group_of(self, index: int) -> tuple[str, int, int]:
        """Return the name, the first index and the number of samples of the shard (or file) that contains a sample."""

    def describe(self, raw: RawSample) -> tuple[str, str]:
        """Return a sample's name in its shard (or file) and its caption, for messages. A missing text is empty."""
        return "", ""

    def known_bad(self) -> tuple[int, str]:
        """Return the number of samples known to be bad before training, and a text that describes some of them."""
        return 0, ""


def decode_image(data: bytes | BinaryIO) -> Image.Image:
    """Decode an image to RGB.

    As in webdataset's "pilrgb" and OpenCLIP, the EXIF orientation is not applied. Gray images of more than 8 bits are scaled
    to 8 bits.

    Raises:
        BadSampleError: The image does not decode.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)
        if max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels, expected an aspect ratio of at most {MAX_ASPECT}")
        image.load()
        image = in_8_bits(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, DecompressionBombError and others.
    except Exception as error:
        raise BadSampleError(f"the image does not decode: {reason_of(error)}") from error


def no_image(data: bytes | BinaryIO) -> Image.Image:
    """Stand for a decoder where nobody needs the pixels: a black image of one pixel."""
    return Image.new("RGB", (1, 1))


def decode_with_hash(
    source: Any, raw: RawSample, decoder: ImageDecoder, draw: int = 0
) -> tuple[DecodedImage, str, int]:
    """Return the result of ``source.decode`` and the image's hash, which is equal for equal image files.

    If the source does not decode files, the hash is equal for equal pixels.
    """
    hashes = []

    def hashing(data: bytes | BinaryIO) -> DecodedImage:
        content = data if isinstance(data, bytes) else data.read()
        hashes.append(hash_bytes(content))
        return decoder(content)

    image, caption = source.decode(raw, hashing, draw)
    return image, caption, hashes[-1] if hashes else hash_bytes(np.asarray(image).tobytes())


def limited(decoder: ImageDecoder, max_pixels: int | None) -> ImageDecoder:
    """Return a decoder that raises BadSampleError for images of more than ``max_pixels``. None means Pillow's limit."""
    return decoder if max_pixels is None else partial(_decode_limited, decoder, max_pixels)


def _decode_limited(decoder: ImageDecoder, max_pixels: int, data: bytes | BinaryIO) -> DecodedImage:
    Image.MAX_IMAGE_PIXELS = None  # ``max_pixels`` may be more than Pillow's limit
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    width = height = 0
    with contextlib.suppress(Exception):  # the decoder reports why the file cannot be opened
        width, height = Image.open(file).size
    if width * height > max_pixels:
        raise BadSampleError(f"the image has {width} x {height} pixels, more than --max-image-pixels {max_pixels}")
    file.seek(0)
    return decoder(data)


def reason_of(error: Exception) -> str:
    """Describe an exception of Pillow's decoders."""
    if isinstance(error, UnidentifiedImageError):
        return "the format is unknown"  # Pillow's text has only the address of a buffer
    return f"{type(error).__name__}: {error}"


def in_8_bits(image: Image.Image) -> Image.Image:
    """Scale a gray image of more than 8 bits to 8 bits, and return others unchanged; raise ValueError for invalid values."""
    is_gray = image.mode == "F" or image.mode.startswith("I")
    return Image.fromarray(_to_8_bits(np.asarray(image))) if is_gray else image


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """Scale gray values to uint8. Pillow's ``convert`` would clip at 255, and make most images white.

    Cameras and microscopes store 10 or 12 bits in files of 16 or 32 bits. The assumed depth is the smallest usual depth that
    can represent the largest value. Floats are assumed to range up to 1. If the largest value exceeds 1, they are assumed to
    range up to 255, or up to the largest value if it exceeds 255.
    """
    largest = values.max()
    if not 0 <= largest < np.inf:
        raise ValueError(f"gray values: expected finite values of at least 0, found a maximum of {largest}")
    if values.dtype.kind == "f":
        return (values.clip(0, None) * (255 if largest <= 1 else 255 / max(largest, 255))).astype(np.uint8)
    depth = next(bits for bits in _GRAY_DEPTHS if largest < 1 << bits)
    return (values.clip(0, None) >> (depth - 8)).astype(np.uint8)


class SampleKeys:
    """The keys of images, captions and hard negatives, see :func:`~openclip_ext.data.sources.keys.parse_keys`."""

    def __init__(
        self,
        image_key: str,
        caption_key: str,
        hard_negative_key: str | None = None,
        caption_weights: Sequence[float] = (),
    ) -> None:
        self._images = parse_keys(image_key, allow_json=False)
        self._captions = parse_keys(caption_key, allow_json=True)
        self._weights = padded_weights(caption_weights, self._captions) if caption_weights else None
        self._hard_negatives = () if hard_negative_key is None else parse_keys(hard_negative_key, allow_json=True)
        self.fields = frozenset(key.field for key in (*self._images, *self._captions, *self._hard_negatives))

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        """Decode a sample, like :meth:`Source.decode`. If ``draw`` is not 0, select among the captions of all fields."""
        if raw.problem is not None:
            raise BadSampleError(raw.problem)
        image_key = _first_key(raw, self._images, "image")
        if draw and self._weights is not None:
            return decoder(raw.fields[image_key.field]), self._weighted_caption(raw, draw, self._weights)
        caption_key = _first_key(raw, self._captions, "caption")
        present = [key for key in self._captions if key.field in raw.fields] if draw else [caption_key]
        captions = [caption for key in present for caption in captions_of(raw.fields[key.field], key)]
        return decoder(raw.fields[image_key.field]), captions[draw % len(captions)]

    def _weighted_caption(self, raw: RawSample, draw: int, weights: Sequence[float]) -> str:
        """Return a caption of a key that is drawn in proportion to its weight, among the keys with a caption.

        If all of these have weight 0, the first is used. The lower 32 bits of ``draw`` select the key.
        """
        found: list[tuple[float, list[str]]] = []
        for key, weight in zip(self._captions, weights, strict=True):
            with contextlib.suppress(BadSampleError):
                found.append((weight, captions_of(raw.fields.get(key.field, b""), key)))
        if not found:
            return self.caption(raw)  # raises the reason
        point = sum(weight for weight, _ in found) * (draw & 0xFFFFFFFF) / 2**32
        ends = itertools.accumulate(weight for weight, _ in found)
        captions = next((captions for end, (_, captions) in zip(ends, found, strict=True) if point < end), found[0][1])
        return captions[(draw >> 32) % len(captions)]

    def hard_negative(self, raw: RawSample, draw: int) -> str:
        """See :meth:`Source.hard_negative`."""
        key = _first_key(raw, self._hard_negatives, "hard negative")
        captions = captions_of(raw.fields[key.field], key, "hard negative")
        return captions[draw % len(captions)]

    def caption(self, raw: RawSample) -> str:
        """Return the first caption of a sample; raise BadSampleError if it is missing, blank, or does not decode."""
        key = _first_key(raw, self._captions, "caption")
        return captions_of(raw.fields[key.field], key)[0]


def padded_weights(weights: Sequence[float], keys: Sequence[Key]) -> list[float]:
    """Return a weight for each key; missing ones are 0. Raise ValueError if there are too many, or all are 0."""
    if len(weights) > len(keys) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ValueError(
            f"--json-text-key-probs {' '.join(map(str, weights))}: expected up to {len(keys)} numbers >= 0, one for each part "
            "of --caption-key, not all 0"
        )
    return [*weights, *[0.0] * (len(keys) - len(weights))]


def _first_key(raw: RawSample, keys: Sequence[Key], what: str) -> Key:
    for key in keys:
        if key.field in raw.fields:
            return key
    wanted = " or ".join(key.field for key in keys)
    raise BadSampleError(f"no {what}: expected {wanted}, found {', '.join(raw.found[:20]) or 'nothing'}")
