"""Encode images and texts in batches, and build zero-shot classifiers. Equal texts are encoded once."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from openclip_ext.cli.command_line import progress_bar
from openclip_ext.data.images import split_transform
from openclip_ext.data.processes import begin_worker
from openclip_ext.evaluation.data import DataError, SampleFormat, Samples, StoredSample, read_batch
from openclip_ext.evaluation.models import ImageTextModel
from openclip_ext.evaluation.text_tower import TextEncoder

PRECISIONS = ("datacomp", "fp32", "amp")


def resolve_precision(requested: str, device: str | torch.device) -> str:
    """Return the precision to use on a device: the requested precision on CUDA, otherwise ``fp32``.

    ``datacomp`` is the precision of DataComp's harness: autocast for texts, and for images only in retrieval and WinoGAViL.
    ``amp`` means autocast everywhere, and needs CUDA.
    """
    if torch.device(device).type == "cuda":
        return requested
    if requested == "amp":
        raise ValueError(f"--precision amp needs CUDA, found {device}. Use datacomp or fp32.")
    return "fp32"


@dataclass
class Encoder:
    """Encoder of images and texts. It caches class embeddings, so the model's weights must not change.

    Attributes:
        model, preprocess, tokenizer: As in `LoadedModel`. The model is in evaluation mode on ``device``.
        precision: The result of `resolve_precision`.
        workers: Number of processes that decode images.
    """

    model: ImageTextModel
    preprocess: Callable[[Any], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    device: torch.device
    precision: str = "fp32"
    batch_size: int = 256
    workers: int = 4
    show_progress: bool = False

    def __post_init__(self) -> None:
        self._class_embeddings: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self._text_encoder = TextEncoder(self.model)
        self._transform, self._normalize = split_transform(self.preprocess)

    def batches(self, samples: Sequence[StoredSample], spec: SampleFormat) -> Iterator[Samples]:
        """Read samples in batches. Workers start immediately, so they read images while the caller encodes texts."""
        loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # any sequence is a data set
            self.batch_size,
            num_workers=min(self.workers, -(-len(samples) // self.batch_size)),
            collate_fn=partial(read_batch, transform=self._transform, spec=spec),
            worker_init_fn=begin_worker,
            pin_memory=self.device.type == "cuda",
            # A DataLoader draws a seed for its workers. The global generator, which training may use, must not change.
            generator=torch.Generator(),
        )
        return iter(loader)

    def collect(
        self, batches: Iterator[Samples], compute: Callable[[Samples], dict[str, Tensor]], name: str, total: int | None
    ) -> Samples:
        """Apply ``compute`` to all batches of images, and concatenate the tensors ``(B, ...)`` that it returns, by name.

        The result also contains the batches' other values, such as labels, but not the input images. Raise DataError if a
        batch has an error or if no image decodes.
        """
        found, parts = Samples(), defaultdict(list)
        with self.progress(total, name, "image") as bar:
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
            raise DataError(f"No image to score in {name}: {(*found.skipped.values(), 'the shards are empty')[0]}.")
        return replace(found, values={key: torch.cat(part) for key, part in parts.items()})

    def embed_images(
        self, samples: Sequence[StoredSample], spec: SampleFormat, name: str, autocast: bool = False
    ) -> Samples:
        """Read and encode images; ``image`` in the result contains unit embeddings ``(N, d)``."""

        def compute(batch: Samples) -> dict[str, Tensor]:
            return {"image": self.encode_images(batch.values["image"], autocast)}

        return self.collect(self.batches(samples, spec), compute, name, len(samples))

    def model_input(self, images: Tensor) -> Tensor:
        """Convert images from ``preprocess``, or uint8 images from `batches`, to the model's input."""
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
        with self._autocast(autocast or self.precision == "amp"):
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

    def progress(self, total: int | None, description: str, unit: str) -> tqdm:
        """Return a progress bar for one task, shown below the bar of all tasks."""
        place: dict[str, Any] = {"position": 1, "leave": False, "delay": 1, "disable": not self.show_progress}
        return progress_bar(total=total, desc=description, unit=unit, **place)

    def _autocast(self, wanted: bool) -> AbstractContextManager:
        is_on = wanted and self.precision != "fp32"
        return torch.autocast(self.device.type) if is_on else contextlib.nullcontext()


def _unit(features: Tensor, what: str) -> Tensor:
    features = F.normalize(features.float(), dim=-1)
    # Every comparison with NaN is False, so NaN embeddings would rank every target first.
    if not torch.isfinite(features).all():
        raise ValueError(f"The model returns non-finite {what} embeddings: its weights are broken or overflow.")
    return features
