"""Load the model to evaluate: any OpenCLIP model with any checkpoint, with or without projection heads."""

import contextlib
import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors import safe_open
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.finding import checkpoint_file
from openclip_ext.cli.command_line import without_warnings
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.cli.options import nearest
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.losses.heads import read_heads, with_heads
from openclip_ext.model_configs import add_model_configs

logger = get_logger(__name__)

# Options of open_clip.create_model_and_transforms that an evaluation takes from the checkpoint's training run.
MODEL_OPTIONS = (
    "force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length",
    *(f"image_{name}" for name in compat.PREPROCESSING),
)  # fmt: skip


# A module with the interface of OpenCLIP's models: ``visual``, ``encode_image`` (maps images ``(B, 3, H, W)`` to ``(B, d)``)
# and ``encode_text`` (maps tokens ``(B, context_length)`` int64 to ``(B, d)``).
ImageTextModel = Any


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with its transform and tokenizer."""

    model: ImageTextModel
    preprocess: Callable[[Any], Tensor]  # PIL image -> ``(3, H, W)``
    tokenizer: Callable[[list[str]], Tensor]  # texts -> ``(B, context_length)`` int64
    name: str
    checkpoint: str  # path or pretrained tag of the weights
    config: dict[str, Any]  # architecture and preprocessing, because both affect the scores
    weights_sha256: str  # digest of all parameters and buffers

    @property
    def origin(self) -> dict[str, str]:
        """Name, checkpoint and digest of the weights, for reports."""
        return {"model": self.name, "checkpoint": self.checkpoint, "weights": self.weights_sha256}


def load_model(
    name: str,
    checkpoint: str | Path | None,
    device: str | torch.device = "cpu",
    model_config: str | Path | None = None,
    **options: Any,
) -> LoadedModel:
    """Load an OpenCLIP model with its weights, in evaluation mode.

    Args:
        name: OpenCLIP's model name. ``hf-hub:`` and ``local-dir:`` names include weights.
        checkpoint: A file, or a pretrained tag of the model. None is only valid for ``hf-hub:`` and ``local-dir:`` names.
        model_config: JSON file of a model that OpenCLIP does not contain. The file's name is the model's name.
        **options: Arguments of ``open_clip.create_model_and_transforms`` (``force_quick_gelu``, ...). Options that are not
            None replace those of the run that wrote the checkpoint.

    Raise UsageError if the model, the checkpoint or the kind of its projection heads is unknown, or if the checkpoint file is
    unreadable, corrupt or from another model.
    """
    add_model_configs()
    if model_config is not None:
        if not Path(model_config).is_file():
            raise UsageError(f"--model-config {model_config} not found: expected the JSON of an OpenCLIP model.")
        open_clip.add_model_config(Path(model_config))
    source = _source(name, checkpoint)
    is_file = source is not None and Path(source).is_file()
    if source is not None and is_file:
        source = str(checkpoint_file(Path(source)))
    version, run_options = _version(source) if is_file else None, options_of_run(source)
    options = run_options | {key: value for key, value in options.items() if value is not None}
    # Two models of the same name may differ in architecture, so the result contains the model's configuration and options.
    config = {"options": options, **_architecture(name)}
    trained = model_of_run(source) or name
    if is_file and trained.replace("/", "-") != name.replace("/", "-") and distributed.is_master():
        logger.warning(f"{source} was trained with --model {trained} and is evaluated with --model {name}.")
    if source is not None and is_file and _weight_names(Path(source)) & {"logit_bias", "module.logit_bias"}:
        # OpenCLIP's configurations lack the bias of the sigmoid loss, so strict loading would reject the checkpoint.
        options.setdefault("init_logit_bias", 0.0)
    # In two cases, the file is loaded after OpenCLIP has created the model. OpenCLIP ignores a file for hf-hub: and local-dir:
    # names, and it resizes a timm tower after loading, although a run's checkpoint already has the run's sizes.
    is_late = is_file and (_is_folder(name) or bool(run_options))
    tag = None if is_file else source
    source_options: dict[str, Any] = {"pretrained_text": False} if is_late else {"pretrained": source}
    try:
        with compat.needing_hub(f"its tokenizer {compat.tokenizer_name(name)}", name, tag):
            tokenizer = open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))
        with (
            without_warnings() if is_late else contextlib.nullcontext(),
            compat.needing_hub("its file of weights or of the configuration", name, tag),
        ):
            model, _, preprocess = open_clip.create_model_and_transforms(
                name, device="cpu", **source_options, **options
            )
        if is_late:
            open_clip.load_checkpoint(model, source)
    except UsageError:
        raise
    except Exception as error:
        what = f"{name} with {source or 'its own weights'}"
        reason = " ".join(str(error).split())[:400]
        hint = "is it from another --model?"
        raise UsageError(f"{what} cannot be loaded: {hint} ({type(error).__name__}: {reason})") from error
    config["preprocess"] = copy.deepcopy(model.visual.preprocess_cfg)
    model = with_heads(model, read_heads(source or ""))
    digest = weights_digest(model)
    if is_file and _version(source) != version:  # weights, heads and label could be of two epochs
        raise UsageError(f"training replaced {source} while it was read: run the same command again")
    return LoadedModel(model.eval().to(device), preprocess, tokenizer, name, str(source or name), config, digest)


def _architecture(name: str) -> dict[str, Any]:
    """Return OpenCLIP's configuration of a model; an empty dictionary for ``hf-hub:`` and ``local-dir:`` names."""
    if _is_folder(name):
        return {}
    config = open_clip.get_model_config(name.replace("/", "-"))
    if config is None:
        hint = nearest(name, open_clip.list_models())
        raise UsageError(f"there is no OpenCLIP model {name!r}{hint} (--model-config FILE adds one)")
    return {"model": config}


def _is_folder(name: str) -> bool:
    return name.startswith(("hf-hub:", "local-dir:"))


def _source(name: str, checkpoint: str | Path | None) -> str | None:
    """Return the checkpoint as OpenCLIP's argument ``pretrained``; raise UsageError if it is missing or unknown."""
    if checkpoint is not None and Path(checkpoint).is_file():
        return str(checkpoint)
    if _is_folder(name):
        if checkpoint is not None:
            raise UsageError(f"{name} has its own weights: remove --checkpoint {checkpoint}, which is not a file.")
        return None
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    known = f"the pretrained tags of {name}: {', '.join(tags) or 'none'}"
    if checkpoint is None:
        raise UsageError(f"--checkpoint is missing: expected a file, or a pretrained tag ({known}).")
    if str(checkpoint) in tags:
        return str(checkpoint)
    raise UsageError(f"There is no checkpoint {checkpoint}: neither a file nor a pretrained tag ({known}).")


def _version(checkpoint: str | None) -> tuple[int, int]:
    """Return numbers that change if a checkpoint file is replaced."""
    status = Path(checkpoint or "").stat()
    return status.st_ino, status.st_mtime_ns


def _weight_names(path: Path) -> set[str]:
    """Return the names of a checkpoint's weights; an empty set if the file's format cannot be read here."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {*file.keys()}
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {*content.get("state_dict", content)}
    except Exception:  # such as old formats and scripted models; OpenCLIP loads or rejects the file later
        return set()


def _flags_of_run(source: str | Path | None) -> dict[str, Any]:
    """Return the flags in the ``config.json`` of a checkpoint's run folder; empty if the file is not in a run folder."""
    if source is None or not Path(source).is_file():  # a pretrained tag has no run, also in a run folder
        return {}
    # A checkpoint may be a link to a run's file, and the folder checkpoints/ of a run may be a link to another disk.
    folders = [path.parent.parent for path in (Path(source).absolute(), Path(source).resolve())]
    run = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    return {} if run is None else read_config(run)["flags"]


def model_of_run(checkpoint: str | Path | None) -> str | None:
    """Return the ``--model`` of the run that wrote a checkpoint file; None if the run is unknown."""
    return _flags_of_run(checkpoint).get("model")


def options_of_run(source: str | None) -> dict[str, Any]:
    """Return the `MODEL_OPTIONS` of the run that wrote a checkpoint."""
    flags = {name: value for name, value in _flags_of_run(source).items() if name in MODEL_OPTIONS}
    # OpenCLIP's parser returns a single image size as [224].
    plain = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in flags.items()}
    return {name: value for name, value in plain.items() if value not in (None, False)}


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
