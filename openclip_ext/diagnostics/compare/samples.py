"""The pilot's data: decoded once into a memory-mapped file, so that many short runs do not decode the same images again.

Training goes through the ordinary loader, whose order and pixels depend on the seed alone. A training set that does not fit
into the cache is read from its shards.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from openclip_ext.data.build import build_source, build_train_loader
from openclip_ext.data.eval_loader import EvalLoader, SourcePass
from openclip_ext.data.source import BadDataError, ImageDecoder, RawSample, Source
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoader, TrainLoaderConfig
from openclip_ext.text_tower import find_causal_tower, shrink

# Stored images are at most this many times as large as the model's: the training's random crops lose nothing visible.
_LARGEST = 2
_PIXELS, _TABLE = "pixels.bin", "samples.json"
# Samples by which the size of the rest is judged.
_PROBE = 100
_FEWEST_VALIDATION = 20


class DoesNotFit(Exception):
    """The decoded images are larger than the cache may be."""


@dataclass(frozen=True)
class Cache:
    """Decoded samples in a folder.

    Attributes:
        folder: where they are.
        rows: which of them are meant, in order.
    """

    folder: Path
    rows: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path) -> "Cache":
        """All samples of a folder."""
        table = json.loads((folder / _TABLE).read_text())
        return cls(folder, tuple(range(len(table["captions"]))))

    def part(self, positions: Sequence[int]) -> "Cache":
        """Some of these samples."""
        return replace(self, rows=tuple(self.rows[position] for position in positions))

    @cached_property
    def _table(self) -> dict[str, Any]:
        return json.loads((self.folder / _TABLE).read_text())

    @cached_property
    def _pixels(self) -> np.ndarray:
        return np.memmap(self.folder / _PIXELS, np.uint8, "r")

    @property
    def digest(self) -> str:
        """Identifies the samples."""
        return hashlib.sha256(json.dumps([self._table["digest"], self.rows]).encode()).hexdigest()[:16]

    def captions(self) -> list[str]:
        """Of the samples, in order."""
        return [self._table["captions"][row] for row in self.rows]

    def classes(self) -> list[int] | None:
        """Of the samples, in order; None where nobody said them."""
        classes = self._table["classes"]
        return None if classes is None else [classes[row] for row in self.rows]

    def image(self, position: int) -> Image.Image:
        """A sample's image."""
        row = self.rows[position]
        height, width = self._table["shapes"][row]
        end = self._table["ends"][row]
        return Image.fromarray(self._pixels[end - 3 * height * width : end].reshape(height, width, 3))

    def images(self, transform: Callable[[Image.Image], Tensor]) -> Tensor:
        """All images, transformed: ``(N, 3, H, W)``."""
        return torch.stack([transform(self.image(position)) for position in range(len(self.rows))])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "rows": self.rows}


def write_cache(
    spec: DataSpec, folder: Path, image_size: int, limit: float, classes: int | None, progress: Callable[[Any], Any]
) -> Cache:
    """Decode a data set into a folder, once: a finished one is opened.

    Args:
        spec: the data set.
        folder: where to.
        image_size: side of the model's images.
        limit: bytes that the images may take.
        classes: number of classes, to read each sample's from its member ``cls``; None: do not.
        progress: wraps the samples, to show how far it is.

    Raises:
        DoesNotFit: the images are larger than the limit.
        BadDataError: more samples than ``--max-bad-fraction`` cannot be read.
        ValueError: a class is missing or out of range.
    """
    if (folder / _TABLE).exists():
        return Cache.open(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images, captions, shapes, indices = _Writer(folder / _PIXELS), [], [], []
    shrunk = _Shrunk(_LARGEST * image_size)
    source = build_source(spec, shrunk)
    loader = EvalLoader(SourcePass(source), preprocess=shrunk, tokenizer=_whole, batch_size=1)
    asked = source.num_kept  # a manifest may leave samples out
    with images:
        for batch in progress(loader):
            pixels = batch["image"][0].numpy()
            images.add(pixels)
            captions.append(batch["text"][0])
            shapes.append(pixels.shape[:2])
            indices.append(int(batch["index"][0]))
            if len(captions) == _PROBE or len(captions) == asked:
                expected = images.ends[-1] / len(captions) * asked
                if expected > limit:
                    raise DoesNotFit(
                        f"{spec.source}: its images would take {expected / 2**30:.2g} GiB decoded, --cache allows "
                        f"{limit / 2**30:.2g}"
                    )
    bad = asked - len(captions)
    if bad > spec.max_bad_fraction * asked:
        raise BadDataError(
            f"{bad:,} of the {asked:,} samples of {spec.source} have no image or no caption that can be read, "
            f"more than the allowed {spec.max_bad_fraction:.1%} (--max-bad-fraction)"
        )
    labels = None if classes is None else _read_classes(spec, classes, indices)
    digest = hashlib.sha256(json.dumps([images.digest(), captions, labels]).encode()).hexdigest()[:16]
    table = {"captions": captions, "shapes": shapes, "ends": images.ends, "classes": labels, "digest": digest}
    (folder / f"{_TABLE}.partial").write_text(json.dumps(table))
    (folder / f"{_TABLE}.partial").rename(folder / _TABLE)
    return Cache.open(folder)


def remove_others(parent: Path, kept: Sequence[Path]) -> None:
    """Remove caches of data that have changed since; folders that are no caches stay."""
    for pixels in parent.glob(f"*/{_PIXELS}"):
        if pixels.parent not in kept:
            shutil.rmtree(pixels.parent, ignore_errors=True)


class _Writer:
    """Appends images to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._content = hashlib.blake2b(digest_size=8)
        self.ends: list[int] = []

    def add(self, pixels: np.ndarray) -> None:
        self._file.write(pixels.tobytes())
        self._content.update(pixels.tobytes())
        self.ends.append((self.ends[-1] if self.ends else 0) + pixels.nbytes)

    def digest(self) -> str:
        return self._content.hexdigest()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Shrunk:
    """Image to ``(H, W, 3)`` uint8, made smaller where its shorter side is longer than ``side``."""

    side: int

    def __call__(self, image: Image.Image) -> Tensor:
        shorter = min(image.size)
        if shorter > self.side:
            width, height = (max(1, round(length * self.side / shorter)) for length in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(image))


def _whole(text: str) -> Any:
    """Stands in for a tokenizer."""
    return [text]


def _read_classes(spec: DataSpec, count: int, indices: Sequence[int]) -> list[int]:
    if spec.resolved_type != "webdataset":
        raise ValueError("--classes needs shards with a member cls for each sample: CSV has none")
    labels: dict[int, int] = {}
    source = build_source(replace(spec, caption_key="cls"), _Shrunk(1))
    for batch in EvalLoader(SourcePass(source), preprocess=_Shrunk(1), tokenizer=_whole, batch_size=1):
        text = str(batch["text"][0]).strip()
        if not text.isdigit() or int(text) >= count:
            raise ValueError(
                f"sample {int(batch['index'][0])} of {spec.source} has the class {text!r}: expected in its member cls a line "
                f"number of the --classes file, from 0 to {count - 1}"
            )
        labels[int(batch["index"][0])] = int(text)
    missing = [index for index in indices if index not in labels]
    if missing:
        raise ValueError(
            f"{len(missing)} samples of {spec.source} have no member cls, the first is sample {missing[0]}"
        )
    return [labels[index] for index in indices]


class _CachedSource(Source):
    """A cache as the training loader's source; the index of a sample is its position."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._captions = cache.captions()

    @property
    def num_samples(self) -> int:
        return len(self._captions)

    @property
    def digest(self) -> str:
        return self._cache.digest

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[Image.Image, str]:
        return self._cache.image(raw.index), self._captions[raw.index]

    def group_of(self, index: int) -> tuple[str, int, int]:
        return str(self._cache.folder), 0, self.num_samples


@dataclass(frozen=True)
class PilotData:
    """What a pilot trains on and is scored on.

    Attributes:
        train: decoded training samples, or where to read them from.
        num_samples: size of the index space.
        choice: validation samples that choose hyper-parameters.
        verdict: validation samples that give the reported numbers.
        names: of the classes, or empty.
        tokens: of all texts; None where the training's are not in memory.
        digest: identifies all of it.
    """

    train: Cache | DataSpec
    num_samples: int
    choice: Cache
    verdict: Cache
    names: tuple[str, ...]
    tokens: "Tokens | None"
    digest: str

    def loader(
        self, config: TrainLoaderConfig, preprocess: Callable, tokenizer: Callable, epoch_samples: int
    ) -> TrainLoader:
        """The ordinary training loader over these samples."""
        if isinstance(self.train, DataSpec):
            spec = replace(self.train, num_samples=epoch_samples)
            return build_train_loader(spec, config, preprocess=preprocess, tokenizer=tokenizer)
        source = _CachedSource(self.train)
        return TrainLoader(source, config, preprocess=preprocess, tokenizer=tokenizer, epoch_samples=epoch_samples)


def divide(count: int, share: float, most: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Positions of a seeded part of so many samples, and of the rest, both in order.

    Raises:
        ValueError: the part is too small to say anything.
    """
    size = min(round(count * share), most)
    if size < _FEWEST_VALIDATION:
        raise ValueError(
            f"{size} of {count} samples are too few to score with, {_FEWEST_VALIDATION} are the least, and validation samples "
            "are halved: give at least 40 with --val, or without it 400 samples"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[:size]), sorted(order[size:])


@dataclass(frozen=True)
class Tokens:
    """All texts that runs can meet, tokenized once; only the tokens and positions that occur are numbered.

    Attributes:
        texts: each once.
        numbers: ``(len(texts), L)`` places in the vocabulary.
        vocabulary: the tokenizer's tokens that occur, in order.
        length: positions up to the longest text's end.
    """

    texts: tuple[str, ...]
    numbers: np.ndarray
    vocabulary: np.ndarray
    length: int

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Callable) -> "Tokens":
        """Tokenize texts."""
        unique = tuple(dict.fromkeys(texts))
        tokens = tokenizer(list(unique)).numpy()
        # To the last token that is not 0: among the others 0 is a token, too ("!").
        length = int(np.nonzero(tokens)[1].max(initial=0)) + 1
        vocabulary, numbers = np.unique(tokens, return_inverse=True)
        return cls(unique, numbers.reshape(tokens.shape).astype(np.int32), vocabulary, length)


class Texts:
    """A tokenizer that looks texts up, and makes the model's text tower as small as they allow.

    Args:
        tokens: of all texts; None: any text may come, and tokenizer and model stay as they are.
        tokenizer: the model's.
        model: changed in place, where its text tower is causal and trained as a whole, see :func:`shrink`.
    """

    def __init__(self, tokens: Tokens | None, tokenizer: Callable, model: nn.Module) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Tensor] = {}
        if tokens is None:
            return
        rows = torch.from_numpy(tokens.numbers.astype(np.int64))
        tower = find_causal_tower(model)
        if tower is not None and all(parameter.requires_grad for parameter in model.parameters()):
            rows = rows[:, : tokens.length].contiguous()
            shrink(tower[1], torch.from_numpy(tokens.vocabulary), tokens.length)
        else:
            rows = torch.from_numpy(tokens.vocabulary)[rows]
        self._known = dict(zip(tokens.texts, rows, strict=True))

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """``(N, L)``."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        return torch.stack([self._known[text] for text in texts]) if self._known else self._tokenizer(texts)
