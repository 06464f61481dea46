"""Build a run's model, in the same way as OpenCLIP, and the run's loss."""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.cli.command_line import without_warnings
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import prepare_for
from openclip_ext.data.images import ImagePipeline, image_pipeline
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.files.writing import write_text
from openclip_ext.losses import registry
from openclip_ext.losses.heads import stored_heads
from openclip_ext.losses.options import OPTIONS
from openclip_ext.training.config import LossConfig, ModelConfig
from openclip_ext.training.lora import add_adapters

logger = get_logger(__name__)

# Subfolder of a run folder with the configuration of the model.
MODEL_CONFIG = "model_config"
# Largest number of samples for which a loss on the meta device has state.
META_SAMPLES = 64


def write_model_config(config: ModelConfig, folder: Path) -> None:
    """Write the model's configuration, with the run's flags applied, to the run folder. Stock OpenCLIP can read it."""
    content = compat.architecture(config.name, config.cache_dir)
    assert content is not None, "the model was built from this configuration"
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
    text = json.dumps(content, indent=4) + "\n"
    write_text(folder / MODEL_CONFIG / f"{config.file_name}.json", text)


def loading_line(config: ModelConfig, model: Any, folder: Path, checkpoint: Path) -> str:
    """Return Python code that loads a run's checkpoint in stock OpenCLIP, after ``import open_clip``."""
    arguments = {"pretrained": str(checkpoint), **compat.changed_preprocessing(model)}
    lines = [f"open_clip.add_model_config({str(folder / MODEL_CONFIG)!r})"]
    if sized := compat.is_timm(model) and config.force_image_size is not None:
        # Load the weights in a separate call, because OpenCLIP would otherwise load them before it resizes the tower.
        arguments |= {"pretrained": None, "pretrained_text": False, "force_image_size": config.force_image_size}
    given = "".join(f", {name}={value!r}" for name, value in arguments.items())
    lines.append(f"model, _, preprocess = open_clip.create_model_and_transforms({config.file_name!r}{given})")
    if sized:
        lines.append(f"open_clip.load_checkpoint(model, {str(checkpoint)!r})")
    return "; ".join(lines)


@dataclass(frozen=True)
class BuiltModel:
    """A model, its transforms and its tokenizer. The model has type Any, because OpenCLIP's models have no common class."""

    model: Any
    images: ImagePipeline
    preprocess_val: Callable
    tokenizer: Callable
    device: torch.device
    padding: int | None  # the token that fills texts up to the context length; None if texts have no fixed length


def build_model(config: ModelConfig, device: torch.device, seed: int) -> BuiltModel:
    """Build the model with the same seed on all ranks. Afterwards, set a different seed on each rank.

    On the meta device, the model has neither values nor a tokenizer, so nothing is downloaded.
    """
    tag = config.pretrained if config.pretrained and not os.path.isfile(config.pretrained) else None
    has_values = device.type != "meta"
    with compat.needing_hub(f"its tokenizer {compat.tokenizer_name(config.name)}", config.name, tag):
        tokenizer: Any = config.tokenizer() if has_values else None
    _seed(seed)
    # OpenCLIP warns about a model without weights.
    quiet = contextlib.nullcontext() if has_values else without_warnings()
    try:
        with quiet, compat.needing_hub("its file of weights or of the configuration", config.name, tag):
            model, preprocess_train, preprocess_val = config.create(device)
    except TypeError as error:  # some timm towers have no argument for --force-patch-dropout
        if config.force_patch_dropout is None or "patch_drop" not in str(error):
            raise
        raise UsageError(f"--force-patch-dropout: {config.name} has no patches. Remove the flag") from error
    except Exception as error:  # torch.load raises many types of errors for a file that is not a checkpoint
        if tag or not config.pretrained or isinstance(error, UsageError):
            raise
        name, reason = config.name, one_line(error) or "the file is empty or truncated"
        raise UsageError(f"--pretrained {config.pretrained} is not a checkpoint of --model {name}: {reason}") from error
    if 0 in getattr(model.visual, "grid_size", ()):
        raise UsageError(
            f"--force-image-size: the images are smaller than a patch of {config.name}. Give a larger size"
        )
    groups, layers = config.lock_image_unlocked_groups, config.lock_text_unlocked_layers
    if config.lock_image:
        flag = f"--lock-image-unlocked-groups {groups}" if groups else "--lock-image"
        with _locking(model, flag, "image"):
            model.visual.lock(unlocked_groups=groups)
    if config.lock_text:
        flag = f"--lock-text-unlocked-layers {layers}" if layers else "--lock-text"
        with _locking(model, flag, "text"):
            compat.lock_text_tower(model, layers, config.lock_text_freeze_layer_norm)
    if config.lora.rank is not None:
        add_adapters(model, config.lora, config.weights)
    if distributed.is_rank0() and (config.lock_image or config.lock_text or config.lora.rank is not None):
        logger.info("Frozen layers stay in evaluation mode: no update of BatchNorm statistics, no dropout.")
    _seed(seed + distributed.rank())
    if config.trace is not None:
        model = open_clip.trace_model(model, batch_size=config.trace, device=device)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    images = image_pipeline(preprocess_train, config.image_backend)
    padding = int(tokenizer([""])[0, -1]) if has_values else None  # an empty text ends with it
    return BuiltModel(model, images, preprocess_val, tokenizer, device, padding)


@contextlib.contextmanager
def _locking(model: nn.Module, flag: str, tower: str) -> Iterator[None]:
    """Raise UsageError with ``flag`` in the message if OpenCLIP fails to lock a tower, or locks no parameter."""

    def trainable() -> int:
        return sum(parameter.requires_grad for parameter in model.parameters())

    before = trainable()
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # OpenCLIP and timm raise many types of errors
        raise UsageError(f"{flag} is not possible for this model ({one_line(error) or repr(error)})") from error
    if trainable() == before:
        raise UsageError(
            f"{flag} leaves nothing of the {tower} tower locked. Lower the number, or remove --lock-{tower}"
        )


def loss_options(
    config: LossConfig, steps: int, pretrained: bool, reference: EmbeddingStore | None = None
) -> dict[str, Any]:
    """Return all options of the loss, with :func:`registry.run_defaults` for options that were not given.

    With a ``reference``, the default ``reference_temperature`` is the reference model's own temperature.
    """
    options = registry.run_defaults(config.name, config.given, steps, pretrained)
    if reference is not None and "steer" in config.given:
        options["reference_temperature"] = reference.temperature
    of_run = {name for name in options.keys() & config.options.keys() if OPTIONS[name].openclip_flag}
    return options | {name: config.options[name] for name in of_run} | dict(config.given)


def build_loss(
    config: LossConfig,
    model_name: str,
    model: nn.Module,
    num_samples: int,
    device: torch.device,
    reference: EmbeddingStore | None = None,
    options: Mapping[str, Any] | None = None,
) -> ContrastiveLoss:
    """Create the loss for a model and a data set, with ``options`` (default: those of ``config``).

    On the meta device, the loss has state for up to :data:`META_SAMPLES` samples, because state is allocated on the CPU first.
    Raise UsageError if the loss would ignore an output of the model.
    """
    if config.without_effect and distributed.is_rank0():
        logger.warning(f"Flags without effect on --loss {config.name}: {', '.join(config.without_effect)}.")
    width = compat.embedding_dim(model_name, model)
    options = dict(config.options if options is None else options)
    if reference is not None and "steer" in config.given:
        options["reference_dim"] = reference.width
    if device.type == "meta":
        num_samples = min(num_samples, META_SAMPLES)
    loss = registry.create_loss(config.name, embed_dim=width, num_samples=num_samples, **options)
    loss.given = frozenset(config.given)
    if compat.is_captioner(model) and not loss.trains_captions:
        raise UsageError(
            f"--loss {config.name} would not train the captions of {model_name}: use --loss openclip "
            "without --normalizer and --temperature-scheme"
        )
    _check_head(config.name, loss.model_head())
    return loss.to(device)


def _check_head(loss: str, head: nn.Module | None) -> None:
    """Raise UsageError if checkpoints cannot store or load the head of a user's own loss."""
    if head is None:
        return
    name = type(head).__name__
    missing = [attribute for attribute in ("kind", "config", "evaluated") if not hasattr(head, attribute)]
    if missing:
        raise UsageError(
            f"--loss {loss}: {name}, the class of model_head(), has no attribute {', '.join(missing)}. Add it"
        )
    if type(head) not in registry.head_classes():
        raise UsageError(
            f"--loss {loss}: expected {name}, the class of model_head(), as head= of the METHOD. Add head={name}"
        )


def initialize(model: nn.Module, loss: ContrastiveLoss, weights: str | None, is_fresh: bool = True) -> None:
    """Set the initial temperature and projection heads of a new run, and freeze what the loss does not train.

    Args:
        weights: Tag or file of pretrained weights, or None. If the loss trains the temperature, the pretrained temperature is
            kept, unless the user gave an initial temperature.
        is_fresh: Whether the run is new. In a resumed run, the checkpoint later sets the temperature and the heads.
    """
    if is_fresh and weights:
        _load_pretrained_heads(loss, weights)
    prepare_for(loss, model, is_trained=bool(weights))


def _load_pretrained_heads(loss: ContrastiveLoss, pretrained: str) -> None:
    heads = stored_heads(pretrained)
    own: Any = loss.model_head()
    if heads is None:
        return
    kind, config = heads["kind"], heads["config"]
    if own is None:
        logger.warning(f"{pretrained} has projection heads {kind!r}, which this loss does not use.")
    elif (own.kind, own.config) != (kind, config):
        raise UsageError(
            f"{pretrained} has projection heads {kind} {config}, this run has {own.kind} {own.config}: give the "
            "loss options of this checkpoint, or a different --pretrained"
        )
    else:
        own.load_state_dict(heads["state_dict"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
