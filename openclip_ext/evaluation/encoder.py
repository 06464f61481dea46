"""Encode images and texts in batches, and build zero-shot classifiers. Equal texts are encoded once."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from openclip_ext import compat
from openclip_ext.cli.command_line import progress_bar
from openclip_ext.data.images import split_transform
from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.samples import Batch, DataError, Samples
from openclip_ext.evaluation.text_tower import TextEncoder
from openclip_ext.files.writing import naming

# A module with the interface of OpenCLIP's models: ``visual``, ``encode_image`` (maps images ``(B, 3, H, W)`` to ``(B, d)``)
# and ``encode_text`` (maps tokens ``(B, context_length)`` int64 to ``(B, d)``).
ImageTextModel = Any
PRECISIONS = ("datacomp", "fp32", "amp")


def resolve_precision(requested: str, device: str | torch.device) -> str:
    """Return the precision to use on a device: the requested precision on CUDA, otherwise ``fp32``.

    ``datacomp`` is the precision of DataComp's harness: autocast for texts, and for images only in tasks that ask for it.
    ``amp`` means autocast everywhere, and needs CUDA.
    """
    if torch.device(device).type == "cuda":
        return requested
    if requested == "amp":
        raise ValueError(f"--precision amp needs CUDA, found {device}. Use datacomp or fp32.")
    return "fp32"


@dataclass(frozen=True)
class Embeddings:
    """Unit embeddings ``(n, d)`` float32 of a training set, in host memory or memory-mapped files."""

    image: Tensor
    text: Tensor
    index: Tensor  # ``(n,)`` positions in the data set; bad and excluded samples are missing
    logit_scale: float  # the model's ``1/τ``


@dataclass
class Encoder:
    """Encoder of images and texts. It caches class embeddings, so the model's weights must not change.

    Attributes:
        model: A live model in evaluation mode on ``device``; it may have projection heads.
        transform: PIL image -> ``(3, H, W)``.
        tokenizer: Texts -> ``(B, context_length)`` int64.
        autocast: ``datacomp`` (see :func:`resolve_precision`), or a value of OpenCLIP's ``--precision``.
        workers: Number of processes that decode images.
    """

    model: ImageTextModel
    transform: Callable[[Any], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    device: torch.device
    autocast: str = "fp32"
    batch_size: int = 256
    workers: int = 4
    show_progress: bool = False

    def __post_init__(self) -> None:
        self._class_embeddings: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self._text_encoder = TextEncoder(self.model)
        self._to_pixels, self._normalize = split_transform(self.transform)

    def batches(self, samples: Samples) -> Iterator[Batch]:
        """Read samples in batches, see :meth:`Samples.batches`."""
        return samples.batches(self._to_pixels, self.batch_size, self.workers, self.device.type == "cuda")

    def collect(
        self, batches: Iterator[Batch], compute: Callable[[Batch], dict[str, Tensor]], samples: Samples
    ) -> Batch:
        """Apply ``compute`` to all batches of images, and concatenate the tensors ``(B, ...)`` that it returns, by name.

        The result also contains the batches' other values, such as labels, but not the input images. Raise DataError if a
        batch has an error or if no image decodes.
        """
        found, parts = Batch(), defaultdict(list)
        with self.progress(len(samples), samples.name, "image") as bar:
            for batch in batches:
                if batch.error:
                    raise DataError(batch.error)
                found.skipped |= batch.skipped
                if not batch.keys:
                    continue
                found.keys += batch.keys
                found.captions += batch.captions
                computed = compute(batch)
                del batch.values["image"]
                for key, value in {**batch.values, **computed}.items():
                    parts[key].append(value)
                bar.update(len(batch.keys))
        if not found.keys:
            reason = (*found.skipped.values(), "the shards are empty")[0]
            raise DataError(f"No image to score in {samples.name}: {reason}.")
        return replace(found, values={key: torch.cat(part) for key, part in parts.items()})

    def embed_images(self, samples: Samples, autocast: bool = False) -> Batch:
        """Read and encode images; ``image`` in the result contains unit embeddings ``(N, d)``."""

        def compute(batch: Batch) -> dict[str, Tensor]:
            return {"image": self.encode_images(batch.values["image"], autocast)}

        return self.collect(self.batches(samples), compute, samples)

    def model_input(self, images: Tensor) -> Tensor:
        """Convert images from ``transform``, or uint8 images from `batches`, to the model's input."""
        images = images.to(self.device, non_blocking=True)
        if self._normalize is not None and images.dtype == torch.uint8:
            images = self._normalize(images)
        # The input must have the dtype of the tower's weights, which is half precision after pure half-precision training.
        kinds = (nn.Conv2d, nn.Linear)
        dtypes = (module.weight.dtype for module in self.model.visual.modules() if isinstance(module, kinds))
        return images.to(next(dtypes, torch.float32))

    @torch.no_grad()
    def encode_images(self, images: Tensor, autocast: bool = False) -> Tensor:
        """Return unit embeddings ``(B, d)`` of images. ``autocast``: whether to use autocast in the precision ``datacomp``."""
        with self._autocast(autocast):
            features = self.model.encode_image(self.model_input(images))
        return _unit(features, "image")

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the unit embeddings of texts, ``(len(texts), d)`` float32. Equal texts are encoded once."""
        distinct = list(dict.fromkeys(texts))
        place = {text: index for index, text in enumerate(distinct)}
        with self.progress(len(distinct), "texts", "text") as bar:
            embeddings = self._encode_texts(distinct, bar)
        return embeddings[[place[text] for text in texts]]

    def class_embeddings(self, classnames: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the zero-shot classifier ``(C, d)``. A row is the normalized mean of the embeddings of a class's prompts.

        Rows are cached by class name and templates, so classes that data sets share (such as ImageNet and its variants) are
        encoded once. Equal class names have equal rows. ``{c}`` in a template stands for the class name.
        """
        known = self._class_embeddings.setdefault(tuple(templates), {})
        new = [name for name in dict.fromkeys(classnames) if name not in known]
        # Classes are encoded in parts, because the embeddings of all ImageNet prompts would need gigabytes with large models.
        step = max(1, 16 * self.batch_size // len(templates))
        with self.progress(len(new) * len(templates), "classes", "prompt") as bar:
            for start in range(0, len(new), step):
                names = new[start : start + step]
                prompts = [template.format(c=name) for name in names for template in templates]
                embeddings = self._encode_texts(prompts, bar).unflatten(0, (len(names), len(templates)))
                known.update(zip(names, F.normalize(embeddings.mean(dim=1), dim=-1), strict=True))
        return torch.stack([known[name] for name in classnames])

    @torch.no_grad()
    def _encode_texts(self, texts: Sequence[str], bar: tqdm) -> Tensor:
        tokens = self.tokenizer(list(texts))
        # Texts are sorted by length, because a batch has the length of its longest text.
        order = self._text_encoder.lengths(tokens).argsort(stable=True)
        embeddings = []
        for rows in order.split(self.batch_size):
            with self._autocast(True):
                features = self._text_encoder.encode(tokens[rows].to(self.device))
            embeddings.append(_unit(features, "text"))
            bar.update(len(rows))
        return torch.cat(embeddings)[order.argsort()]

    def pairs(self, spec: DataSpec) -> Iterable[Mapping[str, Tensor]]:
        """Return the batches of a set of image-caption pairs, as in training's validation."""
        parts: dict[str, Any] = {"preprocess": self.transform, "tokenizer": self.tokenizer}
        return build_eval_loader(spec, **parts, batch_size=self.batch_size, workers=self.workers)

    @torch.no_grad()
    def outputs(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[tuple[Mapping[str, Tensor], dict]]:
        """Yield each batch of ``image`` and ``text`` with the outputs of ``model(image, text)`` for it."""
        input_dtype = open_clip.get_input_dtype(self.autocast)
        for batch in batches:
            image, text = batch["image"].to(self.device, input_dtype, non_blocking=True), batch["text"]
            with self._autocast(True):
                output = self.model(image, text.to(self.device, non_blocking=True))
            yield batch, output

    def embed_pairs(
        self, batches: Iterable[Mapping[str, Tensor]]
    ) -> Iterator[tuple[Mapping[str, Tensor], Tensor, Tensor, float]]:
        """Yield each batch with its unit embeddings ``(B, d)`` float32 of images and of texts, and the model's ``1/τ``."""
        for batch, output in self.outputs(batches):
            features = [output[name] for name in ("image_features", "text_features")]
            # The norms of embeddings in half precision differ from 1 by up to 0.3 %.
            if features[0].dtype != torch.float32:
                features = [F.normalize(side.float(), dim=1) for side in features]
            yield batch, features[0], features[1], output["logit_scale"]

    def embed(self, batches: Iterable[Mapping[str, Tensor]], rows: int, folder: Path | None = None) -> Embeddings:
        """Return the embeddings of all batches of ``image``, ``text`` and ``index``, which have up to ``rows`` samples.

        The embeddings are stored in memory-mapped files in ``folder``, or in host memory if ``folder`` is None (default),
        because a GPU has no room for the model and a large training set's embeddings.
        """
        kept: tuple[Tensor, ...] = ()
        count = 0
        scale = torch.nan
        for batch, images, texts, scale in self.embed_pairs(batches):  # noqa: B007  # the last scale
            kept = kept or tables(folder, rows, images.shape[1])
            here = slice(count, count + len(batch["index"]))
            for table, values in zip(kept, (images, texts, batch["index"]), strict=True):
                table[here] = values
            count = here.stop
        image, text, index = (table[:count] for table in kept)
        return Embeddings(image, text, index, float(scale))

    def progress(self, total: int | None, description: str, unit: str) -> tqdm:
        """Return a progress bar for one task, shown below the bar of all tasks."""
        place: dict[str, Any] = {"position": 1, "leave": False, "delay": 1, "disable": not self.show_progress}
        return progress_bar(total=total, desc=description, unit=unit, **place)

    def _autocast(self, wanted: bool) -> AbstractContextManager:
        if self.autocast == "datacomp":
            return torch.autocast(self.device.type) if wanted else contextlib.nullcontext()
        return compat.autocast_context(self.autocast, self.device)()


def _unit(features: Tensor, what: str) -> Tensor:
    features = F.normalize(features.float(), dim=-1)
    # Every comparison with NaN is False, so NaN embeddings would rank every target first.
    if not torch.isfinite(features).all():
        raise ValueError(f"The model returns non-finite {what} embeddings: its weights are broken or overflow.")
    return features


TABLES = ("image", "text", "index")  # the files of :func:`tables`


def tables(folder: Path | None, rows: int, width: int) -> tuple[Tensor, ...]:
    """Return unfilled tables for image embeddings, text embeddings and indices: files in ``folder``, or in memory if None."""

    def table(name: str, size: int, dtype: torch.dtype) -> Tensor:
        if folder is None:
            return torch.empty(size, dtype=dtype)
        path = folder / name
        path.touch()
        if hasattr(os, "posix_fallocate"):  # not on macOS. Without it, a full disk would later be a bus error
            with naming(path), path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype)

    image, text = (table(side, rows * width, torch.float32).view(rows, width) for side in TABLES[:2])
    return image, text, table(TABLES[2], rows, torch.int64)
