"""Decode data once for many short runs: images into a memory-mapped file, and texts into tokens."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor, nn

from openclip_ext.cli.command_line import progress_bar
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.sources.source import (
    BadDataError,
    BadSampleError,
    ImageDecoder,
    RawSample,
    Source,
    decode_image,
    decode_with_hash,
)
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.results import config_digest
from openclip_ext.evaluation.text_tower import find_causal_tower, shrink
from openclip_ext.files.writing import write_text

# Maximum length of a stored image's shorter side, in units of the model's input side. With 2, crops lose no visible detail.
_LARGEST = 2
_PIXELS, _TABLE = "pixels.bin", "samples.json"
# Number of images from which the total size of the cache is estimated.
_PROBE = 100
_READ_TOGETHER = 4096  # a source prefetches the remote shards of this many samples


class DoesNotFit(ValueError):
    """The decoded images are larger than the cache's limit."""


class Sample(NamedTuple):
    """A decoded sample."""

    source_index: int  # index in the original data set
    caption: str
    image_hash: int  # equal for equal image files
    height: int
    width: int
    end: int  # of the image's bytes in the file of pixels
    label: int | None = None  # the class, if any


class Cache(Source):
    """Decoded samples in a folder. A sample's index is its position in ``rows``, which selects samples of the folder.

    Args:
        rows: Positions of the samples in the folder. None (default) means all samples.
    """

    def __init__(self, folder: Path, rows: Sequence[int] | None = None) -> None:
        self.folder = folder
        table: dict[str, Any] = json.loads((folder / _TABLE).read_text())
        self._pixels = np.memmap(folder / _PIXELS, np.uint8, "r")
        self.rows = tuple(range(len(table["samples"])) if rows is None else rows)
        self.samples = [Sample(*table["samples"][row]) for row in self.rows]
        super().__init__(len(self.rows), config_digest([table["digest"], self.rows]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.folder, self.rows)  # another process maps the file again

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, positions: Sequence[int]) -> "Cache":
        return Cache(self.folder, tuple(self.rows[position] for position in positions))

    def captions(self) -> list[str]:
        return [sample.caption for sample in self.samples]

    def image_hashes(self) -> list[int]:
        return [sample.image_hash for sample in self.samples]

    def classes(self) -> list[int] | None:
        """Return the samples' classes; None if they have no classes."""
        labels = [sample.label for sample in self.samples if sample.label is not None]
        return labels or None

    def pixels(self, position: int) -> np.ndarray:
        """Return a sample's image: ``(H, W, 3)`` uint8."""
        _, _, _, height, width, end, _ = self.samples[position]
        return self._pixels[end - 3 * height * width : end].reshape(height, width, 3)

    def image(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels(position))

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[Image.Image, str]:
        return self.image(raw.index), self.samples[raw.index].caption

    def group_of(self, index: int) -> tuple[str, int, int]:
        return str(self.folder), 0, self.num_samples


def write_cache(
    spec: DataSpec, folder: Path, image_size: int, limit: float = float("inf"), classes: int | None = None
) -> Cache:
    """Decode a data set into a folder, or open the folder if it is complete.

    Args:
        image_size: Side of the model's input images in pixels.
        limit: Maximum total size of all decoded images in bytes.
        classes: Number of classes. Each sample's class is read from its member ``cls``. None (default) reads no classes.

    Raises:
        DoesNotFit: All images together are larger than the limit.
        BadDataError: More samples are unreadable than ``--max-bad-fraction`` allows.
        ValueError: A class is missing or out of range.
    """
    if (folder / _TABLE).exists():
        return Cache(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = build_source(spec)
    expected = source.num_kept
    samples: list[Sample] = []
    content = hashlib.blake2b(digest_size=8)
    with (folder / _PIXELS).open("wb") as file:
        for index, image, caption, image_hash in _decoded(source):
            pixels = _shrunk(image, _LARGEST * image_size)
            file.write(pixels.data)
            content.update(pixels.data)
            height, width = pixels.shape[:2]
            samples.append(Sample(index, caption, image_hash, height, width, file.tell()))
            if len(samples) in (_PROBE, expected) and (size := file.tell() / len(samples) * expected) > limit:
                needed, allowed = (f"{value / 2**30:.2g}" for value in (size, limit))
                raise DoesNotFit(
                    f"the decoded images of {spec.source} need {needed} GiB, --cache allows {allowed}: increase --cache, or "
                    "give a small validation set with --val"
                )
    bad = expected - len(samples)
    if bad > spec.max_bad_fraction * expected:
        raise BadDataError(
            f"{bad:,} of the {expected:,} samples of {spec.source} have no readable image or caption, more than the allowed "
            f"{spec.max_bad_fraction:.1%} (--max-bad-fraction)"
        )
    labels = None
    if classes is not None:
        labels = _read_classes(spec, classes, [sample.source_index for sample in samples])
        samples = [sample._replace(label=label) for sample, label in zip(samples, labels, strict=True)]
    texts_and_images = ([sample[place] for sample in samples] for place in (1, 2))
    digest = config_digest([content.hexdigest(), *texts_and_images, labels])
    write_text(folder / _TABLE, json.dumps({"digest": digest, "samples": samples}))
    return Cache(folder)


def _decoded(source: Source) -> Iterator[tuple[int, Image.Image, str, int]]:
    kept = np.array([index for index in range(source.num_samples) if not source.is_left_out(index)], dtype=np.int64)
    raws = source.read(np.array_split(kept, -(-len(kept) // _READ_TOGETHER)))
    for raw in progress_bar(raws, total=len(kept), desc="decoding", unit="sample", leave=False):
        with contextlib.suppress(BadSampleError):
            image, caption, image_hash = decode_with_hash(source, raw, decode_image)
            assert isinstance(image, Image.Image)
            yield raw.index, image, caption, image_hash


def _shrunk(image: Image.Image, side: int) -> np.ndarray:
    """Return the pixels ``(H, W, 3)`` uint8 of an image, resized if its shorter side is longer than ``side``."""
    if (shorter := min(image.size)) > side:
        width, height = (max(1, round(length * side / shorter)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(image)


def _read_classes(spec: DataSpec, count: int, indices: Sequence[int]) -> list[int]:
    if spec.resolved_type != "webdataset":
        raise ValueError("--classes needs shards with a member cls for each sample: CSV has none")
    source = build_source(replace(spec, caption_key="cls"))
    classes = []
    for raw in source.read([np.asarray(indices)]):
        text = raw.fields.get("cls", b"").decode().strip()
        if not text.isdigit() or int(text) >= count:
            raise ValueError(
                f"sample {raw.index} of {spec.source}: expected field cls to be a line number of the --classes file, from 0 "
                f"to {count - 1}, found {text!r}"
            )
        classes.append(int(text))
    return classes


class KnownTexts:
    """A tokenizer that looks up the tokens of known texts.

    Attributes:
        texts: The ``T`` distinct texts.
        rows: Their tokens ``(T, L)``.
        vocabulary: ``(V,)`` int64, the tokens that the model keeps. None means all tokens.
    """

    vocabulary: Tensor | None = None

    def __init__(self, texts: Iterable[str], tokenizer: Callable[[list[str]], Tensor]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self.rows = tokenizer(list(self.texts)).int()
        self._place = {text: place for place, text in enumerate(self.texts)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the tokens ``(N, L)`` int64 of ``N`` texts."""
        return self.rows[[self._place[text] for text in texts]].long()

    def shrink(self, model: nn.Module) -> None:
        """Reduce the tokens, and a model's text tower in place, to the length and the vocabulary of the texts.

        This needs a causal tower and a model of which all parameters are trained (see :func:`shrink`). Otherwise, nothing
        is changed.
        """
        tower = find_causal_tower(model)
        if tower is not None and all(parameter.requires_grad for parameter in model.parameters()):
            # 0 is both the padding and the token "!", so a text ends at its last token that is not 0.
            length = int(self.rows.nonzero()[:, 1].max()) + 1
            vocabulary, rows = self.rows[:, :length].unique(return_inverse=True)
            self.vocabulary, self.rows = vocabulary.long(), rows.int()
            shrink(tower[1], self.vocabulary, length)
