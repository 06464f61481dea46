"""One optimizer step: forward, loss, backward, update. Gradient accumulation gives the same result as one large batch."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import open_clip
import torch
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import HARD_NEGATIVES, ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE, SCALARS, frozen_batchnorm_statistics
from openclip_ext.data.reference import REFERENCE_KEYS
from openclip_ext.data.text_groups import texts_of
from openclip_ext.evaluation.text_tower import accept_groups
from openclip_ext.training import parallel
from openclip_ext.training.config import StepConfig
from openclip_ext.training.guard import StepGuard, StepOutcome

if TYPE_CHECKING:
    from openclip_ext.training.ema import ModelEma

Batch = dict[str, Any]  # tensors, and ``text_groups``


@dataclass(frozen=True)
class StepSettings:
    """Settings of an optimizer step: device, dtypes, autocast, gradient clipping and image normalization."""

    device: torch.device
    input_dtype: torch.dtype | None = None  # dtype to which images are converted; None means no conversion
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    grad_clip_norm: float | None = None
    normalize: Callable[[Tensor], Tensor] | None = None  # converts uint8 images to float32; None for float images
    groups_texts: bool = False  # whether the model encodes ``text_groups`` of the batches, if this is exact

    @classmethod
    def of(
        cls, config: StepConfig, device: torch.device, normalize: Callable[[Tensor], Tensor] | None = None
    ) -> "StepSettings":
        """Return the settings for a device. If images are integers, ``normalize`` converts them to floats."""
        dtype, autocast = open_clip.get_input_dtype(config.precision), compat.autocast_context(config.precision, device)
        return cls(device, dtype, autocast, config.grad_clip_norm, normalize, config.text_groups > 1)


def gradient_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a new gradient scaler if ``--precision`` needs one, else None."""
    return torch.amp.GradScaler(device=device.type) if precision == "amp" else None


@dataclass(eq=False)
class TrainStep:
    """A callable that takes one optimizer step of a training run.

    The model returns a dictionary. It may be wrapped (see ``training/parallel.py``) or compiled. The loss is on the device.
    The optimizer updates the parameters of the model and of the loss's projection heads.
    """

    model: nn.Module
    loss: ContrastiveLoss
    optimizer: torch.optim.Optimizer
    settings: StepSettings
    scaler: torch.amp.GradScaler | None = None
    ema: "ModelEma | None" = None

    def __post_init__(self) -> None:
        unwrapped = parallel.unwrap(self.model)
        self._logit_scale = unwrapped.get_parameter(LOGIT_SCALE)
        image_tower = unwrapped.get_submodule("visual")
        self._trains_images = any(parameter.requires_grad for parameter in image_tower.parameters())
        self._groups_texts = self.settings.groups_texts and accept_groups(unwrapped)
        head = self.loss.model_head()
        parameters = [] if head is None else head.parameters()
        self._head_parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.guard = StepGuard(self.model, self.loss)
        self._is_first = True
        self._is_checkpointed = any(getattr(module, "grad_checkpointing", False) for module in self.model.modules())

    def __call__(self, batches: list[Batch], number: int = 0) -> dict[str, Tensor]:
        """Take one optimizer step on one or more micro-batches. Return the detached terms of the loss.

        A micro-batch contains ``image`` ``(b, 3, H, W)`` (``(b, 2, 3, H, W)`` with two views per image), ``text`` ``(b, L)``
        and ``index`` ``(b,)``. Some losses also need ``caption_hash`` ``(b,)`` and optionally ``image_hash`` ``(b,)``, or the
        reference model's embeddings ``reference_image`` and ``reference_text`` ``(b, d)``. Data with hard negatives have
        ``hard_negative`` ``(b, L)``. If the image tower is locked, a batch may have unit ``image_features`` ``(b, k)`` instead
        of images: the embeddings, or the input of a trainable projection (``training/image_features.py``). The model encodes
        ``text_groups`` instead of texts if this is exact. The guard reports ``number`` if the step is skipped.
        """
        index = _joined(batches, "index")
        batches = [self._to_device(batch) for batch in batches]
        if self._is_first:
            parallel.order_buckets(self.model, lambda: self._forward(batches[0]), self.settings.device)
            self._is_first = False
        self.optimizer.zero_grad(set_to_none=True)
        self.guard.before_forward()
        if len(batches) == 1:
            outputs = self._forward(batches[0])
            terms = self._terms_after_backward(outputs, batches)
        else:
            terms, outputs = self._cached_features(batches)
        # With ``normalize``, the images were integers. These are always finite, so the guard does not check them.
        images = [batch["image"] for batch in batches if "image" in batch] if self.settings.normalize is None else []
        outcome = self._update(images, outputs)
        self.guard.finish(outcome, number, index)
        if self.ema is not None:
            self.ema.update(number, outcome.good)
        return {name: value.detach() for name, value in terms.items()}

    def is_grouped(self, batch: Batch) -> bool:
        """Return whether the model encodes the texts of a batch in groups."""
        return self._groups_texts and "text_groups" in batch

    def _to_device(self, batch: Batch) -> Batch:
        device = self.settings.device
        batch = compat.map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
        if "image" not in batch:
            return batch
        image = batch["image"]
        if self.settings.normalize is not None:
            image = self.settings.normalize(image)
        return batch | {"image": image.to(dtype=self.settings.input_dtype)}

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        with self.settings.autocast():
            texts = batch["text_groups"] if self.is_grouped(batch) else texts_of(batch)
            if "image" in batch:
                images = batch["image"]
                outputs = encode_views(self.model, images) if images.ndim == 5 else self.model(images, texts)
            elif self._trains_images:
                outputs = self.model(batch["image_features"].to(self.settings.input_dtype or torch.float32), texts)
            else:
                outputs = {**self.model(None, texts), "image_features": batch["image_features"].float()}
            if "hard_negative" in batch:
                features = outputs["text_features"].split(len(batch["text"]))
                outputs["text_features"], outputs[HARD_NEGATIVES] = features
        return {name: value for name, value in outputs.items() if value is not None}

    def _terms_after_backward(self, outputs: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
        more: dict[str, Any] = {"positives": _equality_labels(batches)} if self.loss.needs_positives else {}
        if REFERENCE_KEYS[0] in batches[0]:
            more["reference"] = tuple(_joined(batches, name) for name in REFERENCE_KEYS)
        self.guard.before_loss()
        with self.settings.autocast():
            terms = self.loss(**outputs, **more, index=_joined(batches, "index"), output_dict=True)
        total = functools.reduce(torch.add, terms.values())
        with self._backward_pass():
            (total if self.scaler is None else self.scaler.scale(total)).backward()
        return terms

    def _backward_pass(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a backward pass. If it repeats the forward pass, it does not update BatchNorm's statistics."""
        return frozen_batchnorm_statistics(self.model) if self._is_checkpointed else contextlib.nullcontext()

    def _cached_features(self, batches: list[Batch]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Accumulate gradients exactly, by calling the loss once on the features of all micro-batches.

        This is GradCache (Gao et al. 2021). A first forward pass computes the features without a graph, and the loss computes
        their gradients. A second forward pass of each micro-batch, with the same random numbers, builds the graph. The
        backward pass through this graph adds the micro-batch's part to the parameters' gradients.
        """
        outputs, generators = self._features_without_graph(batches)
        inputs = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in outputs.items()}
        terms = self._terms_after_backward(inputs, batches)
        gradients = {name: value.grad for name, value in inputs.items() if value.grad is not None}
        first = 0
        for number, (batch, (cpu, cuda)) in enumerate(zip(batches, generators, strict=True), 1):
            is_last = number == len(batches)
            rows = slice(first, first + len(batch["text"]))
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self.settings.device)
            # DDP averages the gradients over ranks only once, in the backward pass of the last micro-batch.
            with contextlib.nullcontext() if is_last else getattr(self.model, "no_sync", contextlib.nullcontext)():
                outputs = self._forward(batch)
                names = [name for name in gradients if outputs[name].requires_grad and (is_last or name not in SCALARS)]
                parts = [gradients[name] if name in SCALARS else gradients[name][rows] for name in names]
                parts = [part.to(outputs[name].dtype) for name, part in zip(names, parts, strict=True)]
                with self._backward_pass():
                    torch.autograd.backward([outputs[name] for name in names], parts)
            first = rows.stop
        return terms, inputs

    @torch.no_grad()
    def _features_without_graph(self, batches: list[Batch]) -> tuple[dict[str, Tensor], list[Any]]:
        """Return the outputs of all micro-batches, and the random generators' state before each micro-batch."""
        outputs, generators, device = [], [], self.settings.device
        with frozen_batchnorm_statistics(self.model):
            for batch in batches:
                cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
                generators.append((torch.get_rng_state(), cuda))
                outputs.append(self._forward(batch))
        joined = {
            name: outputs[0][name] if name in SCALARS else torch.cat([output[name] for output in outputs])
            for name in outputs[0]
        }
        return joined, generators

    def _average_head_gradients(self) -> None:
        """Average the gradients of the loss's projection heads over ranks, because DDP only averages the model's gradients."""
        if not self._head_parameters or distributed.world_size() == 1:
            return
        gradients = [parameter.grad for parameter in self._head_parameters if parameter.grad is not None]
        assert len(gradients) == len(self._head_parameters), "called after the backward pass"
        mean = distributed.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        mean /= distributed.world_size()
        parts = mean.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _update(self, images: list[Tensor], outputs: dict[str, Tensor]) -> StepOutcome:
        self._average_head_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [*self.model.parameters(), *self._head_parameters]
        outcome = self.guard.judge(images, outputs, parameters)
        if self.settings.grad_clip_norm is not None:
            parallel.clip_grad_norm_(parameters, self.settings.grad_clip_norm)
        logit_scale = parallel.local(self._logit_scale.detach())
        before = logit_scale.clone()
        self.guard.step(self.optimizer, outcome)
        if self.scaler is not None:
            self.scaler.update()
        with torch.no_grad():
            self.loss.finish_logit_scale_step(logit_scale, before)
            logit_scale.copy_(torch.where(outcome.good, logit_scale, before))
        return outcome


def encode_views(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Encode two views of each image, ``(B, 2, 3, H, W)``, as one batch without text. Return the model's outputs.

    ``image_features`` contains the embeddings of the first views, ``text_features`` the embeddings of the second views.
    """
    outputs = model(images.flatten(0, 1), None)
    features = outputs["image_features"].unflatten(0, images.shape[:2])
    return {**outputs, "image_features": features[:, 0], "text_features": features[:, 1]}


def _equality_labels(batches: list[Batch]) -> Tensor | None:
    """Return labels for the loss's ``positives``: of captions ``(B,)``, or if known, of captions and images ``(B, 2)``."""
    captions, images = (_joined(batches, name) for name in ("caption_hash", "image_hash"))
    return captions if captions is None or images is None else torch.stack([captions, images], dim=1)


def _joined(batches: list[Batch], name: str) -> Tensor | None:
    return torch.cat([batch[name] for batch in batches]) if name in batches[0] else None
