"""One optimizer step: forward, loss, backward, update; with gradient accumulation that equals the large batch."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE, SCALARS, frozen_batchnorm_statistics
from openclip_ext.data.reference import REFERENCE_KEYS
from openclip_ext.training import parallel
from openclip_ext.training.config import StepConfig
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.guard import StepGuard, StepOutcome

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepSettings:
    """How a step computes.

    Attributes:
        device: the device of the batches.
        input_dtype: type of the images, from OpenCLIP's ``--precision``; None: as loaded.
        autocast: makes the autocast context.
        grad_clip_norm: largest gradient norm, or None.
        normalize: from a batch of images in uint8 to float32, or None where they come as floats.
    """

    device: torch.device
    input_dtype: torch.dtype | None = None
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    grad_clip_norm: float | None = None
    normalize: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(
        cls, config: StepConfig, device: torch.device, normalize: Callable[[Tensor], Tensor] | None = None
    ) -> "StepSettings":
        """Return the settings for a device, and for images that ``normalize`` turns into floats."""
        return cls(
            device=device,
            input_dtype=open_clip.get_input_dtype(config.precision),
            autocast=compat.autocast_context(config.precision, device),
            grad_clip_norm=config.grad_clip_norm,
            normalize=normalize,
        )


def gradient_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a new gradient scaler if OpenCLIP's ``--precision`` needs one."""
    return torch.amp.GradScaler(device=device.type) if precision == "amp" else None


class TrainStep:
    """Runs optimizer steps.

    Args:
        model: OpenCLIP model returning a dictionary, possibly wrapped (see ``training/parallel.py``) or compiled.
        loss: a loss of this package, moved to the device.
        optimizer: over the parameters of the model and of the loss's head.
        settings: see ``StepSettings``.
        scaler: gradient scaler for float16, or None.
        ema: average of the model's weights, or None.

    Attributes:
        guard: makes sure that a step that is not finite changes nothing, and reports such steps.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: ContrastiveLoss,
        optimizer: torch.optim.Optimizer,
        settings: StepSettings,
        scaler: torch.amp.GradScaler | None = None,
        ema: ModelEma | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.settings = settings
        self.scaler = scaler
        self.ema = ema
        self._logit_scale = parallel.unwrap(model).get_parameter(LOGIT_SCALE)
        head = loss.model_head()
        parameters = [] if head is None else head.parameters()
        self._head_parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.guard = StepGuard(model, loss)

    def __call__(self, batches: list[Batch], number: int = 0) -> dict[str, Tensor]:
        """Take one optimizer step on one or more micro-batches; it changes nothing if it is not finite.

        Args:
            batches: micro-batches of ``image`` ``(b, 3, H, W)``, or ``(b, 2, 3, H, W)`` for two views of each image,
                ``text`` ``(b, L)``, ``index`` ``(b,)``, and where the loss needs them ``caption_hash`` ``(b,)`` and the
                reference model's embeddings, ``reference_image`` and ``reference_text`` ``(b, d)``.
            number: number of the step, for the report of :attr:`guard`.

        Returns:
            The loss's terms, detached.
        """
        index = _joined(batches, "index")
        batches = [self._to_device(batch) for batch in batches]
        self.optimizer.zero_grad(set_to_none=True)
        self.guard.before_forward()
        terms, outputs = self._one_batch(batches[0]) if len(batches) == 1 else self._cached_features(batches)
        # Images that were normalized here came as integers, which are finite.
        images = [batch["image"] for batch in batches] if self.settings.normalize is None else []
        outcome = self._update(images, outputs)
        self.guard.finish(outcome, number, index)
        if self.ema is not None:
            self.ema.update(number, outcome.good)
        return {name: value.detach() for name, value in terms.items()}

    def _to_device(self, batch: Batch) -> Batch:
        device = self.settings.device
        batch = compat.map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
        image = batch["image"]
        if self.settings.normalize is not None:
            image = self.settings.normalize(image)
        return batch | {"image": image.to(dtype=self.settings.input_dtype)}

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        with self.settings.autocast():
            images = batch["image"]
            outputs = encode_views(self.model, images) if images.ndim == 5 else self.model(images, batch["text"])
        return {name: value for name, value in outputs.items() if value is not None}

    def _terms(self, outputs: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
        index = _joined(batches, "index")
        more: dict[str, Any] = {"positives": _joined(batches, "caption_hash")} if self.loss.needs_positives else {}
        if REFERENCE_KEYS[0] in batches[0]:
            more["reference"] = tuple(_joined(batches, name) for name in REFERENCE_KEYS)
        self.guard.before_loss()
        with self.settings.autocast():
            return self.loss(**outputs, **more, index=index, output_dict=True)

    def _one_batch(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss's terms and the model's outputs, after the backward pass."""
        outputs = self._forward(batch)
        terms = self._terms(outputs, [batch])
        self._scaled(_total(terms)).backward()
        return terms, outputs

    def _cached_features(self, batches: list[Batch]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Accumulate gradients exactly: the loss is called once, on all features (GradCache, Gao et al. 2021).

        A first forward pass gives the features without a graph, and the loss their gradients. A second one of each
        micro-batch, with the same random numbers, passes its share of the gradients to the parameters.
        """
        outputs, generators = self._features_without_graph(batches)
        inputs = {name: _leaf(value) for name, value in outputs.items()}
        terms = self._terms(inputs, batches)
        self._scaled(_total(terms)).backward()
        gradients = {name: value.grad for name, value in inputs.items() if value.grad is not None}
        first = 0
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            count = len(batch["text"])
            generators[number].replay()
            with self._synchronised_only_if(is_last):
                self._backward_share(self._forward(batch), gradients, slice(first, first + count), is_last)
            first += count
        return terms, inputs

    @torch.no_grad()
    def _features_without_graph(self, batches: list[Batch]) -> tuple[dict[str, Tensor], list["_GeneratorState"]]:
        outputs, generators = [], []
        with frozen_batchnorm_statistics(self.model):
            for batch in batches:
                generators.append(_GeneratorState(self.settings.device))
                outputs.append(self._forward(batch))
        joined = {
            name: outputs[0][name] if name in SCALARS else torch.cat([output[name] for output in outputs])
            for name in outputs[0]
        }
        return joined, generators

    def _backward_share(
        self, outputs: dict[str, Tensor], gradients: dict[str, Tensor], rows: slice, with_scalars: bool
    ) -> None:
        tensors, shares = [], []
        for name, gradient in gradients.items():
            if not outputs[name].requires_grad or (name in SCALARS and not with_scalars):
                continue
            tensors.append(outputs[name])
            share = gradient if name in SCALARS else gradient[rows]
            shares.append(share.to(outputs[name].dtype))
        torch.autograd.backward(tensors, shares)

    def _synchronised_only_if(self, synchronised: bool) -> AbstractContextManager:
        """Let DDP average the gradients over the ranks once, with the last micro-batch."""
        no_sync = getattr(self.model, "no_sync", None)
        return contextlib.nullcontext() if synchronised or no_sync is None else no_sync()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _average_head_gradients(self) -> None:
        """Average the gradients of the loss's head over the ranks, as DDP does the model's."""
        if not self._head_parameters or distributed.world_size() == 1:
            return
        gradients = [_gradient(parameter) for parameter in self._head_parameters]
        mean = distributed.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        mean /= distributed.world_size()
        parts = mean.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _update(self, images: list[Tensor], outputs: dict[str, Tensor]) -> StepOutcome:
        """Update the parameters, if the gradients are finite."""
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
    """Return the model's outputs for a loss of two views of each image.

    Args:
        model: OpenCLIP model returning a dictionary, possibly wrapped. It gets all views as one batch, and no text.
        images: ``(B, 2, 3, H, W)``.

    Returns:
        The outputs with the first views' embeddings as ``image_features`` and the second views' as ``text_features``.
    """
    outputs = model(images.flatten(0, 1), None)
    features = outputs["image_features"].unflatten(0, images.shape[:2])
    return {**outputs, "image_features": features[:, 0], "text_features": features[:, 1]}


def _joined(batches: list[Batch], name: str) -> Tensor | None:
    """Join an entry of all micro-batches; None if they have none."""
    return torch.cat([batch[name] for batch in batches]) if name in batches[0] else None


def _total(terms: dict[str, Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms.values())


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "called after the backward pass"
    return parameter.grad


def _leaf(value: Tensor) -> Tensor:
    """Return a detached tensor that collects a gradient, if its type can have one."""
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


class _GeneratorState:
    """The state of torch's random generators before a forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def replay(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
