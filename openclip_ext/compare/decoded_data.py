"""Decode the data once for many short runs: images into a memory-mapped file, and texts into tokens.

Runs use the training loader, so the order of samples and the augmentation depend only on the seed. If the training set does
not fit into the cache, each run reads and decodes the files again.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from openclip_ext.cli.command_line import progress_bar
from openclip_ext.data.loader.build import build_source, build_train_loader
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.loader.single_source import AnyTrainLoader
from openclip_ext.data.loader.train_loader import TrainLoader
from openclip_ext.data.reference import EmbeddingStore
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
_PIXELS, _TABLE = "pixels.bin", "table.json"
# Number of images from which the total size of the cache is estimated.
_PROBE = 100
_READ_TOGETHER = 4096  # a source prefetches the remote shards of this many samples


class DoesNotFit(ValueError):
    """The decoded images are larger than the cache's limit."""


class Cache(Source):
    """Decoded samples in a folder. A sample's index is its position in ``rows``, which selects samples of the folder.

    Args:
        rows: Positions of the samples in the folder. None (default) means all samples.
    """

    def __init__(self, folder: Path, rows: Sequence[int] | None = None) -> None:
        self.folder = folder
        self._table: dict[str, Any] = json.loads((folder / _TABLE).read_text())
        self._pixels = np.memmap(folder / _PIXELS, np.uint8, "r")
        self.rows = tuple(range(len(self._table["captions"])) if rows is None else rows)
        super().__init__(len(self.rows), config_digest([self._table["digest"], self.rows]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.folder, self.rows)  # another process maps the file again

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, positions: Sequence[int]) -> "Cache":
        return Cache(self.folder, tuple(self.rows[position] for position in positions))

    def captions(self) -> list[str]:
        return [self._table["captions"][row] for row in self.rows]

    def image_hashes(self) -> list[int]:
        """Return a hash of each sample's image file. Equal files have equal hashes."""
        return [self._table["images"][row] for row in self.rows]

    def indices(self) -> list[int]:
        """Return the samples' positions in the original data set."""
        return [self._table["indices"][row] for row in self.rows]

    def classes(self) -> list[int] | None:
        """Return the samples' classes; None if they have no classes."""
        classes = self._table["classes"]
        return None if classes is None else [classes[row] for row in self.rows]

    def pixels(self, position: int) -> np.ndarray:
        """Return a sample's image: ``(H, W, 3)`` uint8."""
        row = self.rows[position]
        height, width = self._table["shapes"][row]
        end = self._table["ends"][row]
        return self._pixels[end - 3 * height * width : end].reshape(height, width, 3)

    def image(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels(position))

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[Image.Image, str]:
        return self.image(raw.index), self._table["captions"][self.rows[raw.index]]

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
    indices: list[int] = []
    captions: list[str] = []
    images: list[int] = []
    shapes: list[tuple[int, ...]] = []
    content = hashlib.blake2b(digest_size=8)
    with (folder / _PIXELS).open("wb") as file:
        for index, image, caption, image_hash in _decoded(source):
            pixels = _shrunk(image, _LARGEST * image_size)
            file.write(pixels.data)
            content.update(pixels.data)
            captions.append(caption)
            images.append(image_hash)
            shapes.append(pixels.shape[:2])
            indices.append(index)
            if len(indices) in (_PROBE, expected) and (size := file.tell() / len(indices) * expected) > limit:
                needed, allowed = (f"{value / 2**30:.2g}" for value in (size, limit))
                raise DoesNotFit(
                    f"the decoded images of {spec.source} need {needed} GiB, --cache allows {allowed}: increase --cache, or "
                    "give a small validation set with --val"
                )
    bad = expected - len(captions)
    if bad > spec.max_bad_fraction * expected:
        raise BadDataError(
            f"{bad:,} of the {expected:,} samples of {spec.source} have no readable image or caption, more than the allowed "
            f"{spec.max_bad_fraction:.1%} (--max-bad-fraction)"
        )
    labels = None if classes is None else _read_classes(spec, classes, indices)
    table = {"captions": captions, "images": images, "shapes": shapes, "classes": labels, "indices": indices}
    table["ends"] = np.cumsum([3 * height * width for height, width in shapes]).tolist()
    table["digest"] = config_digest([content.hexdigest(), captions, images, labels])
    write_text(folder / _TABLE, json.dumps(table))
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


class Tokens(NamedTuple):
    """The ``T`` distinct texts of a run and their tokens ``(T, L)``."""

    texts: tuple[str, ...]
    rows: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Callable) -> "Tokens":
        unique = tuple(dict.fromkeys(texts))
        return cls(unique, tokenizer(list(unique)).numpy().astype(np.int32))


class KnownTexts:
    """A tokenizer that looks up the tokens of known texts, and shrinks the text tower to their length and vocabulary.

    The tower is shrunk in place, but only if it is causal and all parameters of the model are trained (see :func:`shrink`).

    Attributes:
        vocabulary: ``(V,)`` int64, the tokens that the model keeps. None means all tokens.
    """

    vocabulary: Tensor | None = None

    def __init__(self, tokens: Tokens, model: nn.Module) -> None:
        self._place = {text: place for place, text in enumerate(tokens.texts)}
        self._rows = torch.from_numpy(tokens.rows.astype(np.int64))
        tower = find_causal_tower(model)
        if tower is not None and all(parameter.requires_grad for parameter in model.parameters()):
            # 0 is both the padding and the token "!", so a text ends at its last token that is not 0.
            length = int(tokens.rows.nonzero()[1].max(initial=0)) + 1
            self.vocabulary, self._rows = self._rows[:, :length].unique(return_inverse=True)
            shrink(tower[1], self.vocabulary, length)

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Return the tokens ``(N, L)`` of ``N`` texts."""
        return self._rows[[self._place[text] for text in ([texts] if isinstance(texts, str) else texts)]]


@dataclass(frozen=True)
class PilotData:
    """The data to train and score runs.

    Attributes:
        train: Decoded training samples, or their files if they do not fit into the cache.
        val: Samples for choosing settings.
        test: Samples for the reported results.
        names: Class names, if any.
        tokens: Tokens of all texts; None if the training texts are not in memory.
        reference: A reference model's embeddings of the training samples. None (default) means no reference model.
    """

    train: Cache | DataSpec
    num_samples: int
    val: Cache
    test: Cache
    names: tuple[str, ...]
    tokens: Tokens | None
    digest: str
    reference: EmbeddingStore | None = None

    def loader(
        self, config: TrainLoaderConfig, preprocess: Callable, tokenizer: Callable, epoch_samples: int
    ) -> AnyTrainLoader:
        if isinstance(self.train, DataSpec):
            spec = replace(self.train, num_samples=epoch_samples)
            return build_train_loader(spec, config, preprocess=preprocess, tokenizer=tokenizer)
        self.train.reference = self.reference
        return TrainLoader(self.train, config, preprocess=preprocess, tokenizer=tokenizer, epoch_samples=epoch_samples)
