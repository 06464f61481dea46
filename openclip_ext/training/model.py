"""The model of a run: built as OpenCLIP builds it, prepared for the loss."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.images import ImagePipeline, image_pipeline
from openclip_ext.training.errors import UsageError
from openclip_ext.training.views import train_image_tower_only

# Folder of a run in which its model's configuration is.
MODEL_CONFIG = "model_config"


@dataclass(frozen=True)
class TowerLock:
    """What of a tower is frozen.

    Attributes:
        unlocked: number of layer groups, counted from the output, that still train.
        freeze_statistics: also freeze BatchNorm's running statistics (image) or LayerNorm's parameters (text).
    """

    unlocked: int = 0
    freeze_statistics: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """OpenCLIP's flags that say how the model is built; the names are those of ``open_clip``'s factory.

    Attributes:
        name: ``--model``.
        pretrained: tag or file of weights to start from, or empty.
        precision: ``--precision``.
        siglip_start: start values of ``logit_scale`` and ``logit_bias`` for SigLIP.
        trace: ``torch.jit.trace`` with this batch size, for evaluation only; None: do not.
        image_backend: what reads the training images, see :func:`openclip_ext.data.images.image_pipeline`.
        linear_replacement: class of bitsandbytes that replaces the linear layers (``--use-bnb-linear``).
    """

    name: str
    pretrained: str | None = None
    pretrained_image: bool = False
    precision: str = "fp32"
    torchscript: bool = False
    force_quick_gelu: bool = False
    force_custom_text: bool = False
    force_patch_dropout: float | None = None
    force_image_size: int | tuple[int, ...] | None = None
    force_context_length: int | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    image_interpolation: str | None = None
    image_resize_mode: str | None = None
    aug_cfg: Mapping[str, Any] = field(default_factory=dict)
    image_backend: str = "pil"
    cache_dir: str | None = None
    siglip_start: bool = False
    lock_image: TowerLock | None = None
    lock_text: TowerLock | None = None
    grad_checkpointing: bool = False
    trace: int | None = None
    linear_replacement: str | None = None

    @property
    def file_name(self) -> str:
        """OpenCLIP's name of the configuration: ``ViT-B-32`` also for ``ViT-B/32``."""
        return self.name.replace("/", "-")

    def create(self, device: torch.device) -> tuple[Any, Callable, Callable]:
        """The bare model, the training transform and the evaluation transform."""
        return compat.create_model(
            self.name,
            device,
            pretrained=self.pretrained,
            precision=self.precision,
            siglip_start=self.siglip_start,
            jit=self.torchscript,
            pretrained_image=self.pretrained_image,
            force_quick_gelu=self.force_quick_gelu,
            force_custom_text=self.force_custom_text,
            force_patch_dropout=self.force_patch_dropout,
            force_image_size=self.force_image_size,
            force_context_length=self.force_context_length,
            image_mean=self.image_mean,
            image_std=self.image_std,
            image_interpolation=self.image_interpolation,
            image_resize_mode=self.image_resize_mode,
            aug_cfg=dict(self.aug_cfg),
            cache_dir=self.cache_dir,
        )

    def tokenizer(self) -> Callable:
        """The model's tokenizer."""
        return open_clip.get_tokenizer(self.name, cache_dir=self.cache_dir, context_length=self.force_context_length)


def write_model_config(config: ModelConfig, folder: Path) -> None:
    """Write the configuration from which stock OpenCLIP builds this model, flags included, into the run's folder.

    Nothing is written for models that OpenCLIP finds elsewhere (``hf-hub:``, ``local-dir:``).
    """
    content = open_clip.get_model_config(config.file_name) if ":" not in config.name else None
    if content is None:
        return
    if config.force_quick_gelu:
        content["quick_gelu"] = True
    if config.force_custom_text:
        content["custom_text"] = True
    if config.force_patch_dropout is not None:
        content["vision_cfg"]["patch_dropout"] = config.force_patch_dropout
    if config.force_image_size is not None:
        content["vision_cfg"]["image_size"] = config.force_image_size
    if config.force_context_length is not None:
        content["text_cfg"]["context_length"] = config.force_context_length
    if config.siglip_start:
        content |= compat.SIGLIP_START
    (folder / MODEL_CONFIG).mkdir(exist_ok=True)
    (folder / MODEL_CONFIG / f"{config.file_name}.json").write_text(json.dumps(content, indent=4) + "\n")


def loading_lines(config: ModelConfig, folder: Path, checkpoint: Path) -> list[str]:
    """What to write after ``import open_clip`` to load a checkpoint of the run, without this package."""
    overrides = {
        "image_mean": config.image_mean,
        "image_std": config.image_std,
        "image_interpolation": config.image_interpolation,
        "image_resize_mode": config.image_resize_mode,
    }
    given = "".join(f", {name}={value!r}" for name, value in overrides.items() if value is not None)
    name = config.file_name if ":" not in config.name else config.name
    load = (
        f"model, _, preprocess = open_clip.create_model_and_transforms({name!r}, pretrained={str(checkpoint)!r}{given})"
    )
    if ":" in config.name:
        return [load]
    return [f"open_clip.add_model_config({str(folder / MODEL_CONFIG)!r})", load]


@dataclass(frozen=True)
class BuiltModel:
    """What training and evaluation need of a model.

    Attributes:
        model: OpenCLIP's, which have no common typed base.
        images: how training images become the model's input.
        preprocess_val: transform of an image for evaluation.
        tokenizer: of captions.
        device: where the model is.
    """

    model: Any
    images: ImagePipeline
    preprocess_val: Callable
    tokenizer: Callable
    device: torch.device


def build_model(config: ModelConfig, device: torch.device, seed: int) -> BuiltModel:
    """Build the model from the same random numbers on all ranks; afterwards each rank draws its own."""
    _seed(seed)
    model, preprocess_train, preprocess_val = config.create(device)
    if config.linear_replacement is not None:
        model = compat.replace_linear_layers(model, config.linear_replacement, device)
    _seed(seed + distributed.rank())
    if config.trace is not None:
        model = open_clip.trace_model(model, batch_size=config.trace, device=device)
    if config.lock_image is not None:
        _lock_image(model, config.lock_image)
    if config.lock_text is not None:
        _lock_text(model, config.lock_text)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    images = image_pipeline(preprocess_train, config.image_backend)
    return BuiltModel(model, images, preprocess_val, config.tokenizer(), device)


def _lock_image(model: Any, lock: TowerLock) -> None:
    try:
        model.lock_image_tower(unlocked_groups=lock.unlocked, freeze_bn_stats=lock.freeze_statistics)
    except AssertionError as error:
        raise UsageError(
            f"--lock-image-unlocked-groups {lock.unlocked} is not possible for this model {error}"
        ) from error


def _lock_text(model: Any, lock: TowerLock) -> None:
    try:
        model.lock_text_tower(unlocked_layers=lock.unlocked, freeze_layer_norm=lock.freeze_statistics)
    except AssertionError as error:
        # OpenCLIP's own text towers can only be frozen as a whole.
        raise UsageError(f"--lock-text needs --lock-text-freeze-layer-norm for this model ({error})") from error


def prepare_for(loss: ContrastiveLoss, model: nn.Module, set_logit_scale: bool) -> None:
    """Set the temperature's start value, and freeze what the loss does not train.

    DistributedDataParallel fails on a parameter that never receives a gradient.

    Args:
        loss: says what it learns.
        model: changed in place.
        set_logit_scale: whether the loss's start value replaces the model's.
    """
    logit_scale = model.get_parameter("logit_scale")
    if set_logit_scale and loss.initial_logit_scale is not None:
        with torch.no_grad():
            logit_scale.fill_(loss.initial_logit_scale)
    if not loss.learns_logit_scale:
        logit_scale.requires_grad_(False)
    logit_bias = getattr(model, "logit_bias", None)
    if logit_bias is not None and not loss.uses_logit_bias:
        logit_bias.requires_grad_(False)
    if loss.views > 1:
        train_image_tower_only(model)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
