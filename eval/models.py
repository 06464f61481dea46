"""Loading the model to evaluate: any OpenCLIP model, any checkpoint that OpenCLIP reads, and ours with extra heads."""

import copy
import difflib
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from openclip_ext.heads import HEADS_KEY, HeadsError, build_heads, with_heads
from openclip_ext.model_configs import add_model_configs

# Options of open_clip.create_model_and_transforms, for checkpoints that were trained with them.
MODEL_OPTIONS = (
    "force_quick_gelu",
    "force_custom_text",
    "force_image_size",
    "force_context_length",
    "image_mean",
    "image_std",
    "image_interpolation",
    "image_resize_mode",
)


class ModelError(ValueError):
    """A model or checkpoint that cannot be loaded. The message says what was found and what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what encoding needs.

    Attributes:
        model: on its device; has ``encode_image`` and ``encode_text``.
        preprocess: PIL image -> ``(3, H, W)``.
        tokenizer: list of texts -> ``(B, context_length)`` int64.
        name: OpenCLIP's name of the model.
        checkpoint: the path or pretrained tag it came from.
        config: what else decides the numbers: architecture and preprocessing.
        weights_sha256: digest of all parameters and buffers.
    """

    model: nn.Module
    preprocess: Callable[[Any], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    name: str
    checkpoint: str
    config: dict[str, Any]
    weights_sha256: str


def load_model(
    name: str,
    checkpoint: str | Path | None,
    device: str | torch.device = "cpu",
    model_config: str | Path | None = None,
    **options: Any,
) -> LoadedModel:
    """Load an OpenCLIP model with its weights, ready to evaluate.

    Args:
        name: OpenCLIP's model name; ``hf-hub:`` and ``local-dir:`` names bring their own weights.
        checkpoint: a file, or a pretrained tag of the model; None only with ``hf-hub:`` and ``local-dir:`` names.
        device: where the model goes.
        model_config: JSON of a model that OpenCLIP does not ship; its file name is the model's name.
        **options: passed to ``open_clip.create_model_and_transforms`` where not None (``force_quick_gelu``, ...).

    Raises:
        ModelError: no such model or checkpoint, an unreadable file, or a checkpoint of another model.
    """
    _register_configs(model_config)
    options = {key: value for key, value in options.items() if value is not None}
    config = _config(name, options)
    source = _source(name, checkpoint)
    heads = None
    if source is not None and Path(source).is_file():
        _warn_of_forgotten_options(source, options)
        state_dict, heads = _peek(Path(source))
        if "logit_bias" in state_dict or "module.logit_bias" in state_dict:
            # Trained with the sigmoid loss: stock configurations have no bias, which strict loading would refuse.
            options.setdefault("init_logit_bias", 0.0)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=source, device="cpu", **options)
        tokenizer = open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))
    except Exception as error:
        raise ModelError(_why_not(name, source, error)) from error
    config["preprocess"] = copy.deepcopy(model.visual.preprocess_cfg)
    if heads is not None:
        try:
            model = with_heads(model, build_heads(heads, source))
        except HeadsError as error:
            raise ModelError(str(error)) from error
    model.eval()
    digest = weights_digest(model)
    return LoadedModel(model.to(device), preprocess, tokenizer, name, str(source or name), config, digest)


def _register_configs(model_config: str | Path | None) -> None:
    add_model_configs()
    if model_config is None:
        return
    path = Path(model_config)
    if not path.is_file():
        raise ModelError(f"There is no model configuration {path}: --model-config takes the path of an OpenCLIP JSON.")
    open_clip.add_model_config(path)


def _config(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the architecture is built from, to tell runs of one name apart."""
    if name.startswith(("hf-hub:", "local-dir:")):
        return {"options": options}
    config = open_clip.get_model_config(name.replace("/", "-"))
    if config is None:
        close = difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.4)
        raise ModelError(
            f"There is no OpenCLIP model {name!r}"
            + (f": did you mean {', '.join(close)}?" if close else ".")
            + " open_clip.list_models() lists all; --model-config FILE adds one."
        )
    return {"model": config, "options": options}


def _source(name: str, checkpoint: str | Path | None) -> str | None:
    """The checkpoint as ``pretrained`` takes it."""
    if name.startswith(("hf-hub:", "local-dir:")):
        if checkpoint is not None:
            raise ModelError(f"{name} brings its own weights: leave out --checkpoint {checkpoint}.")
        return None
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    known = f"{name} has the pretrained tags {', '.join(tags)}" if tags else f"{name} has no pretrained tags"
    if checkpoint is None:
        raise ModelError(f"--checkpoint is missing: a file, or a pretrained tag ({known}).")
    if Path(checkpoint).is_file() or str(checkpoint) in tags:
        return str(checkpoint)
    if Path(checkpoint).is_dir():
        found = sorted(path.name for path in Path(checkpoint).rglob("*.pt"))[:5]
        raise ModelError(
            f"{checkpoint} is a folder, expected a checkpoint file; it has {', '.join(found) or 'no .pt'}."
        )
    raise ModelError(f"There is no checkpoint {checkpoint}: neither a file nor a pretrained tag; {known}.")


def _peek(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A checkpoint's state dictionary and heads, without reading the tensors where the format allows."""
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        return {}, None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        # An old or scripted file: create_model reads it, or says why not.
        return {}, None
    if not isinstance(content, dict):
        return {}, None
    return content.get("state_dict", content), content.get(HEADS_KEY)


def _why_not(name: str, source: str | None, error: Exception) -> str:
    """A short message for whatever creating the model raised."""
    reason = " ".join(str(error).split())
    reason = reason if len(reason) <= 400 else reason[:400] + " ..."
    if "state_dict" in reason or isinstance(error, KeyError | AssertionError | AttributeError):
        hint = f"it is not a checkpoint of {name}; was it trained with another --model?"
        trained = _trained_model(source)
        if trained is not None and trained != name:
            hint = f"its run was trained with --model {trained}, not {name}."
        return f"{source} does not fit {name}: {hint} ({reason})"
    return f"{name} with {source or 'its own weights'} cannot be loaded ({type(error).__name__}: {reason})"


def _trained_model(source: str | None) -> str | None:
    """The model that the run folder of a checkpoint names."""
    return _run_parameters(source).get("model")


def _run_parameters(source: str | None) -> dict[str, str]:
    """OpenCLIP's ``params.txt`` of the run folder that a checkpoint lies in; empty where there is none."""
    path = Path(source or "").parent.parent / "params.txt"
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def _warn_of_forgotten_options(source: str, options: dict[str, Any]) -> None:
    """Without an option that the run was trained with, the numbers would be another model's, and nothing would fail."""
    parameters = _run_parameters(source)
    for name in MODEL_OPTIONS:
        value = parameters.get(name, "None")
        if value not in ("None", "False") and name not in options:
            logging.warning(
                f"The run of {source} was trained with {name}: {value}, which is not given here: "
                f"expected --{name.replace('_', '-')}, or the numbers are those of another model."
            )


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def config_digest(config: dict[str, Any]) -> str:
    """Short digest of anything JSON takes."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
