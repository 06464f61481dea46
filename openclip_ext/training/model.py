"""The model of a run, built as OpenCLIP builds it, and the loss that it is prepared for."""

import contextlib
import json
import logging
import os
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.options import flag
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.images import IMAGE_BACKENDS, ImagePipeline, image_pipeline
from openclip_ext.losses import registry
from openclip_ext.losses.heads import read_heads

# Folder of a run in which its model's configuration is.
MODEL_CONFIG = "model_config"
# Fields of ModelConfig that ``open_clip.create_model_and_transforms`` takes under these names.
_FACTORY_OPTIONS = (
    *("pretrained", "pretrained_image", "precision", "cache_dir"),
    *("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length"),
    *("image_mean", "image_std", "image_interpolation", "image_resize_mode"),
)


@dataclass(frozen=True)
class ModelConfig:
    """OpenCLIP's flags that say how the model is built; the names are those of ``open_clip``'s factory.

    Attributes:
        pretrained: tag or file of weights to start from, or empty.
        siglip_start: start values of ``logit_scale`` and ``logit_bias`` for SigLIP.
        trace: ``torch.jit.trace`` with this batch size, for evaluation only; None: do not.
        lock_image, lock_text: freeze a tower, but for ``unlocked`` layer groups, counted from the output; its BatchNorm
            statistics or LayerNorm parameters only where the flag says so.
    """

    name: str = flag(dest="model")
    aug_cfg: Mapping[str, Any] = flag()
    pretrained: str | None = flag(None)
    pretrained_image: bool = flag(False)
    precision: str = flag("fp32")
    torchscript: bool = flag(False)
    force_quick_gelu: bool = flag(False)
    force_custom_text: bool = flag(False)
    force_patch_dropout: float | None = flag(None, minimum=0.0, exclusive_maximum=1.0)
    force_image_size: int | tuple[int, ...] | None = flag(None)
    force_context_length: int | None = flag(None, minimum=1)
    image_mean: Sequence[float] | None = flag(None)
    image_std: Sequence[float] | None = flag(None)
    image_interpolation: str | None = flag(None)
    image_resize_mode: str | None = flag(None)
    image_backend: str = flag(
        "pil",
        "what decodes, crops and resizes training images; pil: OpenCLIP's pixels, bit for bit; torchvision: in a third of "
        "the time, pixels differ by a rounding",
        choices=IMAGE_BACKENDS,
        needs="train_data",
    )
    cache_dir: str | None = flag(None)
    siglip_start: bool = flag(False, dest="siglip")
    lock_image: bool = flag(False)
    lock_image_unlocked_groups: int = flag(0, needs="lock_image", minimum=0)
    lock_image_freeze_bn_stats: bool = flag(False, needs="lock_image")
    lock_text: bool = flag(False)
    lock_text_unlocked_layers: int = flag(0, needs="lock_text", minimum=0)
    lock_text_freeze_layer_norm: bool = flag(False, needs="lock_text")
    grad_checkpointing: bool = flag(False)
    trace: int | None = None

    @property
    def file_name(self) -> str:
        """Name of the configuration: ``ViT-B-32`` also for ``ViT-B/32``, and ``m`` for ``local-dir:models/m``."""
        if not self.is_folder:
            return self.name.replace("/", "-")
        return re.sub(r"[^\w.-]", "-", os.path.basename(os.path.abspath(self.name.partition(":")[2])))

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder with configuration and weights, ``local-dir:`` or ``hf-hub:``."""
        return ":" in self.name

    @property
    def weights(self) -> str | None:
        """Tag or file of the weights that the model starts from; None: it is untrained."""
        return self.pretrained or compat.hub_weights(self.name, self.cache_dir)

    def create(self, device: torch.device) -> tuple[Any, Callable, Callable]:
        """Return the bare model, the training transform and the evaluation transform."""
        options = {name: getattr(self, name) for name in _FACTORY_OPTIONS}
        return compat.create_model(
            self.name,
            device,
            siglip_start=self.siglip_start,
            jit=self.torchscript,
            aug_cfg=dict(self.aug_cfg),
            **options,
        )

    def tokenizer(self) -> Callable:
        """Return the model's tokenizer."""
        return open_clip.get_tokenizer(self.name, cache_dir=self.cache_dir, context_length=self.force_context_length)


def write_model_config(config: ModelConfig, folder: Path) -> None:
    """Write the configuration from which stock OpenCLIP builds this model, flags included, into the run's folder."""
    content = compat.architecture(config.name, config.cache_dir)
    assert content is not None, "the model was built from it"
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


def loading_line(config: ModelConfig, model: Any, folder: Path, checkpoint: Path) -> str:
    """Return the line that loads a checkpoint of the run after ``import open_clip``, without this package.

    Args:
        config: the model's settings.
        model: the model, unwrapped.
        folder: the run's folder.
        checkpoint: the file.
    """
    arguments = {"pretrained": str(checkpoint), **compat.changed_preprocessing(model)}
    lines = [f"open_clip.add_model_config({str(folder / MODEL_CONFIG)!r})"]
    if sized := compat.is_timm(model) and config.force_image_size is not None:
        # OpenCLIP would load the weights before it gives the tower this size.
        arguments |= {"pretrained": None, "pretrained_text": False, "force_image_size": config.force_image_size}
    given = "".join(f", {name}={value!r}" for name, value in arguments.items())
    lines.append(f"model, _, preprocess = open_clip.create_model_and_transforms({config.file_name!r}{given})")
    if sized:
        lines.append(f"open_clip.load_checkpoint(model, {str(checkpoint)!r})")
    return "; ".join(lines)


@dataclass(frozen=True)
class BuiltModel:
    """What training and evaluation need of a model; OpenCLIP's models have no common typed base."""

    model: Any
    images: ImagePipeline
    preprocess_val: Callable
    tokenizer: Callable
    device: torch.device


def build_model(config: ModelConfig, device: torch.device, seed: int) -> BuiltModel:
    """Build the model from the same random numbers on all ranks; afterwards each rank draws its own."""
    _seed(seed)
    try:
        model, preprocess_train, preprocess_val = config.create(device)
    except TypeError as error:  # timm's towers that take no such argument
        if config.force_patch_dropout is None or "patch_drop" not in str(error):
            raise
        raise UsageError(
            f"--force-patch-dropout {config.force_patch_dropout}: the image tower of {config.name} has no patches to drop. "
            "Leave it out"
        ) from error
    except (RuntimeError, AssertionError, pickle.UnpicklingError) as error:
        if not config.pretrained or not os.path.isfile(config.pretrained):
            raise
        raise UsageError(
            f"--pretrained {config.pretrained} is no checkpoint of --model {config.name}: {one_line(error)}"
        ) from error
    _seed(seed + distributed.rank())
    if config.trace is not None:
        model = open_clip.trace_model(model, batch_size=config.trace, device=device)
    if config.force_patch_dropout and not compat.drops_patches(model) and distributed.is_master():
        logging.warning(f"Without effect on --model {config.name}: --force-patch-dropout {config.force_patch_dropout}.")
    _lock(model, config)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    images = image_pipeline(preprocess_train, config.image_backend)
    return BuiltModel(model, images, preprocess_val, config.tokenizer(), device)


def _lock(model: Any, config: ModelConfig) -> None:
    """Freeze the towers that the flags name; raise UsageError if OpenCLIP cannot, or if nothing of one would be frozen."""
    groups, layers = config.lock_image_unlocked_groups, config.lock_text_unlocked_layers
    trainable = _trainable(model)
    if config.lock_image:
        asked = f"--lock-image-unlocked-groups {groups}" if groups else "--lock-image"
        with _refused(f"{asked} is not possible for this model"):
            model.visual.lock(unlocked_groups=groups, freeze_bn_stats=config.lock_image_freeze_bn_stats)
        if _trainable(model) == trainable:
            raise UsageError(
                f"{asked} leaves nothing of the image tower locked. Give fewer groups, or leave out --lock-image"
            )
        trainable = _trainable(model)
    if config.lock_text:
        asked = f"--lock-text-unlocked-layers {layers}" if layers else "--lock-text"
        with _refused(f"{asked} is not possible for this model"):
            compat.lock_text_tower(model, layers, config.lock_text_freeze_layer_norm)
        if _trainable(model) == trainable:
            raise UsageError(
                f"{asked} leaves nothing of the text tower locked. Give fewer layers, or leave out --lock-text"
            )


@contextlib.contextmanager
def _refused(reason: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # OpenCLIP and timm raise what their code happens to meet
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{reason} ({type(error).__name__}: {one_line(error)})") from error


def _trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class LossConfig:
    """The loss and its options.

    Attributes:
        name: ``--loss``.
        options: for ``create_loss``; of a training all that the loss has.
        given: the options that the user gave, whose values beat those of a pretrained model.
        without_effect: flags that the user gave for other losses.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    without_effect: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether the user asked for a part by name."""
        return any(self.options[part] is not None for part in self.given & {"normalizer", "temperature_scheme"})


def for_training(config: LossConfig, steps: int, pretrained: bool = False) -> LossConfig:
    """Return the loss with the defaults of a training, as :func:`registry.training_defaults`, for options that nobody gave."""
    given = {name: config.options[name] for name in config.given}
    options = registry.training_defaults(config.name, given, steps, pretrained)
    of_run = {name for name in options.keys() & config.options.keys() if registry.OPTIONS[name].openclip_flag}
    return replace(config, options=options | {name: config.options[name] for name in of_run} | given)


def build_loss(
    config: LossConfig, model_name: str, model: nn.Module, num_samples: int, device: torch.device
) -> ContrastiveLoss:
    """Create the loss for a model and a data set.

    Raises:
        UsageError: the model trains something that the loss would ignore.
        ValueError: options that do not fit.
    """
    if compat.is_captioner(model) and (config.name != compat.OPENCLIP_LOSSES[0] or config.has_parts):
        parts = " with another temperature scheme" if config.has_parts else ""
        raise UsageError(
            f"{model_name} trains a captioner, too, which --loss {config.name}{parts} would ignore; use --loss openclip"
        )
    if config.without_effect and distributed.is_master():
        logging.warning(f"Without effect on --loss {config.name}: {', '.join(config.without_effect)}.")
    width = compat.embedding_dim(model_name, model)
    loss = registry.create_loss(config.name, embed_dim=width, num_samples=num_samples, **config.options)
    return loss.to(device)


def load_pretrained_heads(loss: ContrastiveLoss, pretrained: str) -> None:
    """Start the modules that the loss trains with the model from the checkpoint that the model starts from."""
    heads: Any = read_heads(pretrained)
    own: Any = loss.model_head()
    if heads is None:
        return
    if own is None:
        logging.warning(f"{pretrained} holds heads of the kind {heads.kind!r}, which this loss leaves out.")
    elif (own.kind, own.config) != (heads.kind, heads.config):
        raise UsageError(
            f"{pretrained} holds heads {heads.kind} {heads.config}, this run's are {own.kind} {own.config}: give the same "
            "options, or start from another model"
        )
    else:
        own.load_state_dict(heads.state_dict())


def prepare_for(loss: ContrastiveLoss, model: nn.Module, set_logit_scale: bool) -> None:
    """Set the temperature's start value, if it is asked for, and freeze what the loss does not train.

    DistributedDataParallel fails on a parameter that never receives a gradient.
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
    if loss.trains_captions_only and compat.is_captioner(model):
        for parameter in compat.unused_by_captions(model):
            parameter.requires_grad_(False)
    if loss.views > 1:  # no image passes through anything else
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith("visual."))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
