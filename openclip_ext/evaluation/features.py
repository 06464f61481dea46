"""Encode images, texts and classifiers in batches, and each distinct text only once."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from openclip_ext.cli.command_line import progress_bar
from openclip_ext.data.images import split_transform
from openclip_ext.data.processes import begin_worker
from openclip_ext.evaluation.data import DataError, SampleFormat, SampleReader, Samples, StoredSample, collate
from openclip_ext.evaluation.models import ImageTextModel
from openclip_ext.evaluation.text import TextEncoder

PRECISIONS = ("datacomp", "fp32", "amp")


def resolve_precision(requested: str, device: str | torch.device) -> str:
    """Return the precision to use on a device.

    ``datacomp`` is that of DataComp's harness on CUDA (autocast for the text tower, float32 for the images of classification,
    autocast for both towers in retrieval and WinoGAViL), and float32 on the CPU. ``fp32`` is float32 everywhere. ``amp`` is
    autocast everywhere, and needs CUDA.
    """
    if torch.device(device).type == "cuda":
        return requested
    if requested == "amp":
        raise ValueError(f"--precision amp needs CUDA, the device is {device}; use datacomp or fp32.")
    return "fp32"


@dataclass
class Encoder:
    """Encodes images and texts with a model. It caches class embeddings, so the weights must not change.

    Attributes:
        model, preprocess, tokenizer: as in `LoadedModel`; the model is in evaluation mode on ``device``.
        precision: as `resolve_precision` returns it.
        workers: number of processes that decode images.
    """

    model: ImageTextModel
    preprocess: Callable[[Any], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    device: torch.device
    precision: str = "fp32"
    batch_size: int = 256
    workers: int = 4
    show_progress: bool = False
    _class_embeddings: dict[tuple[str, ...], dict[str, Tensor]] = field(default_factory=dict, repr=False)
    _text_encoder: TextEncoder = field(init=False, repr=False)
    _transform: Callable[[Any], Tensor] = field(init=False, repr=False)
    _normalize: Callable[[Tensor], Tensor] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text_encoder = TextEncoder(self.model)
        self._transform, self._normalize = split_transform(self.preprocess)

    def batches(self, samples: Sequence[StoredSample], spec: SampleFormat) -> Iterator[Samples]:
        """Read samples in batches. Reading starts at once, so that it overlaps with encoding texts.

        Raises:
            DataError: while iterating, if the data must not be scored.
        """
        reading = iter(
            DataLoader(
                SampleReader(samples, self._transform, spec),
                self.batch_size,
                num_workers=min(self.workers, -(-len(samples) // self.batch_size)),
                collate_fn=collate,
                worker_init_fn=begin_worker,
                pin_memory=self.device.type == "cuda",
                # Starting workers draws a seed. It must not come from the global generator, which a training run may use.
                generator=torch.Generator(),
            )
        )

        def checked() -> Iterator[Samples]:
            for batch in reading:
                if isinstance(batch, DataError):
                    raise type(batch)(*batch.args)  # itself, it would keep this frame, and with it the workers
                yield batch

        return checked()

    def collect(
        self, batches: Iterator[Samples], compute: Callable[[Samples], dict[str, Tensor]], name: str, total: int | None
    ) -> Samples:
        """Apply a function from a batch to values ``(B, ...)`` by name to all images of a data set.

        The result also has the batches' own values, except the images if the function does not replace them.
        """
        found, parts = Samples([], {}, [], []), defaultdict(list)
        with self.progress(total, name, "image") as bar:
            for batch in batches:
                found.skipped += batch.skipped
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
            raise DataError(f"No image to score in {name}; {(*found.skipped, 'the shards are empty')[0]}.")
        return replace(found, values={key: torch.cat(part) for key, part in parts.items()})

    def model_input(self, images: Tensor) -> Tensor:
        """Return the model's input for images from ``preprocess``, or for uint8 images from `batches`."""
        images = images.to(self.device, non_blocking=True)
        if self._normalize is not None and images.dtype == torch.uint8:
            images = self._normalize(images)
        return images.to(_input_dtype(self.model))

    @torch.no_grad()
    def encode_images(self, images: Tensor, autocast: bool = False) -> Tensor:
        """Return unit embeddings ``(B, d)`` of images, see `model_input`; ``autocast`` also with precision ``datacomp``."""
        with self._autocast(autocast or self.precision == "amp"):
            features = self.model.encode_image(self.model_input(images))
        return _unit(features, "image")

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit embeddings ``(len(texts), d)``, float32, of texts; equal texts are encoded once."""
        distinct = list(dict.fromkeys(texts))
        place = {text: index for index, text in enumerate(distinct)}
        with self.progress(len(distinct), "texts", "text") as bar:
            embeddings = self._encode_texts(distinct, bar)
        return embeddings[[place[text] for text in texts]]

    def class_embeddings(self, classnames: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the zero-shot classifier ``(C, d)``: each class's mean of its unit prompt embeddings, normalized again.

        Classes are cached by name and templates, so data sets that share them (ImageNet and its variants) encode them once.
        Repeated class names get equal rows. ``{c}`` in a template stands for the name.
        """
        known = self._class_embeddings.setdefault(tuple(templates), {})
        new = [name for name in dict.fromkeys(classnames) if name not in known]
        # In parts, because the embeddings of all prompts of ImageNet would fill gigabytes with large models.
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
        # Texts of similar length share a batch, which is as long as its longest text.
        order = self._text_encoder.lengths(tokens).argsort(stable=True)
        embeddings = []
        for rows in order.split(self.batch_size):
            with self._autocast(True):
                features = self._text_encoder(tokens[rows].to(self.device))
            embeddings.append(_unit(features, "text"))
            bar.update(len(rows))
        return torch.cat(embeddings)[order.argsort()]

    def progress(self, total: int | None, description: str, unit: str) -> tqdm:
        """Make the progress bar of one task, which is below the bar of all tasks."""
        options: dict[str, Any] = {"total": total, "desc": description, "unit": unit, "disable": not self.show_progress}
        return progress_bar(position=1, leave=False, delay=1, **options)

    def _autocast(self, wanted: bool) -> AbstractContextManager:
        if wanted and self.precision != "fp32":
            return torch.autocast(self.device.type)
        return contextlib.nullcontext()


def _input_dtype(model: ImageTextModel) -> torch.dtype:
    """Return the type of the visual tower's weights, which pure half-precision training leaves in half precision."""
    for module in model.visual.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            return module.weight.dtype
    return torch.float32


def _unit(features: Tensor, what: str) -> Tensor:
    """Scale features to unit length in float32.

    Raises:
        ValueError: if a feature is not finite. Every comparison with NaN is false, so the target would rank first.
    """
    features = F.normalize(features.float(), dim=-1)
    if not torch.isfinite(features).all():
        raise ValueError(f"The model gives {what} embeddings that are not finite: its weights are broken or overflow.")
    return features
