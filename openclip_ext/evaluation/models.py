"""Open the model to evaluate: any OpenCLIP model with any checkpoint, with or without projection heads, or Hugging Face's."""

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.finding import checkpoint_file
from openclip_ext.cli.command_line import without_warnings
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.cli.options import nearest
from openclip_ext.evaluation.encoder import Encoder, ImageTextModel
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.losses.heads import read_heads, with_heads
from openclip_ext.model_configs import add_model_configs

logger = get_logger(__name__)

# Options of open_clip.create_model_and_transforms that an evaluation takes from the checkpoint's training run.
MODEL_OPTIONS = (
    "force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length",
    *(f"image_{name}" for name in compat.PREPROCESSING),
)  # fmt: skip
_DATA_FLAGS = (
    "image_key", "caption_key", "csv_separator", "csv_img_key", "csv_caption_key", "caption_template", "max_image_pixels",
)  # fmt: skip
TRANSFORMERS = "transformers:"  # prefix of a folder or a name on the hub of Hugging Face's ``transformers``
_WITH_WEIGHTS = ("hf-hub:", "local-dir:", TRANSFORMERS)  # prefixes of names that include weights


@dataclass(frozen=True)
class OpenedModel:
    """A model in evaluation mode, with its transform and tokenizer."""

    model: ImageTextModel
    transform: Callable[[Any], Tensor]  # PIL image -> ``(3, H, W)``
    tokenizer: Callable[[list[str]], Tensor]  # texts -> ``(B, context_length)`` int64
    name: str
    checkpoint: str  # path or pretrained tag of the weights
    config: dict[str, Any]  # architecture and preprocessing, because both affect the scores

    @functools.cached_property
    def weights_sha256(self) -> str:
        """Digest of all parameters and buffers."""
        return weights_digest(self.model)

    @property
    def origin(self) -> dict[str, str]:
        """Name, checkpoint and digest of the weights, for reports."""
        return {"model": self.name, "checkpoint": self.checkpoint, "weights": self.weights_sha256}

    def encoder(self, device: str | torch.device = "cpu", **options: Any) -> Encoder:
        """Move the model to a device; return its encoder. ``options``: further arguments of `Encoder`."""
        device = torch.device(device)
        return Encoder(self.model.to(device), self.transform, self.tokenizer, device, **options)


def open_model(
    ref: str | Path | None,
    model: str | None = None,
    model_config: str | Path | None = None,
    precision: str = "fp32",
    heads: bool = True,
    **options: Any,
) -> OpenedModel:
    """Open a model with its weights, in evaluation mode, on the CPU.

    Args:
        ref: A run folder (its newest good checkpoint), a checkpoint file, a pretrained tag of ``model``, a folder of
            OpenCLIP or of Hugging Face's ``transformers`` (such as CLIPModel), or a ``hf-hub:``, ``local-dir:`` or
            ``transformers:`` name. None is only valid if ``model`` is such a name.
        model: OpenCLIP's name of the model. None means the model of the run that wrote the checkpoint.
        model_config: JSON file of a model that OpenCLIP does not contain. The file's name is the model's name.
        precision: A value of OpenCLIP's ``--precision``. The weights have half precision for ``pure_*`` and ``fp16``.
        heads: Whether to add the projection heads in the checkpoint if evaluations use them.
        **options: Arguments of ``open_clip.create_model_and_transforms`` (``force_quick_gelu``, ...). Options that are not
            None replace those of the run that wrote the checkpoint.

    Raise UsageError if the model, the checkpoint or the kind of its projection heads is unknown, or if the checkpoint file is
    unreadable, corrupt or from another model.
    """
    ref, name = _resolve(ref, model)
    if name is None:
        found = "the model is unknown" if ref is None or Path(ref).exists() else "not found"
        raise UsageError(
            f"{ref}: {found}: expected a run folder LOGS/NAME, a folder of an exported model, or --model and --checkpoint"
        )
    if name.startswith(TRANSFORMERS):
        return _open_transformers(name, ref)
    add_model_configs()
    if model_config is not None:
        if not Path(model_config).is_file():
            raise UsageError(f"--model-config {model_config} not found: expected the JSON of an OpenCLIP model.")
        open_clip.add_model_config(Path(model_config))
    source = _source(name, ref)
    is_file = source is not None and Path(source).is_file()
    if source is not None and is_file:
        source = str(checkpoint_file(Path(source)))
    version, run_options = _version(source) if is_file else None, options_of_run(source)
    options = run_options | {key: value for key, value in options.items() if value is not None}
    # Two models of the same name may differ in architecture, so the result contains the model's configuration and options.
    config = {"options": options, **_architecture(name)}
    trained = model_of_run(source) or name
    if is_file and trained.replace("/", "-") != name.replace("/", "-") and distributed.is_rank0():
        logger.warning(f"{source} was trained with --model {trained} and is evaluated with --model {name}.")
    built, transform, tokenizer = _create(name, source, is_file, bool(run_options), options, precision)
    config["preprocess"] = copy.deepcopy(built.visual.preprocess_cfg)
    built = with_heads(built, read_heads(source or "") if heads else None)
    if is_file and _version(source) != version:  # weights, heads and label could be of two epochs
        raise UsageError(f"training replaced {source} while it was read: run the same command again")
    return OpenedModel(built.eval(), transform, tokenizer, name, str(source or name), config)


def _resolve(ref: str | Path | None, model: str | None) -> tuple[str | None, str | None]:
    """Return the checkpoint (a file or a tag; None if the model includes its weights) and the model's name, if known."""
    text = None if ref is None else str(ref)
    if text is None or text.startswith(_WITH_WEIGHTS):
        return None, text or model
    path = Path(text)
    if path.is_dir() and model is None:
        if (path / "open_clip_config.json").is_file():
            return None, f"local-dir:{path}"
        if _is_transformers(path):
            return None, f"{TRANSFORMERS}{path}"
        # If training goes on, each process could find another newest checkpoint.
        return str(distributed.on_rank0(lambda: checkpoint_file(path))), read_config(path)["flags"]["model"]
    return text, model or model_of_run(text)


def _is_transformers(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return "model_type" in json.loads((folder / "config.json").read_text())
    return False


def _create(
    name: str, source: str | None, is_file: bool, is_of_run: bool, options: dict[str, Any], precision: str
) -> tuple[Any, Callable[[Any], Tensor], Callable[[list[str]], Tensor]]:
    """Return the model with its weights, its transform and its tokenizer."""
    file = source if is_file else None
    if source is None:
        file = compat.hub_weights(name, options.get("cache_dir"))
    if file is not None and compat.has_logit_bias(Path(file)):
        # OpenCLIP's configurations lack the bias of the sigmoid loss, so strict loading would reject the checkpoint.
        options = {"init_logit_bias": 0.0, **options}
    # In two cases, the file is loaded after OpenCLIP has created the model. OpenCLIP ignores a file for hf-hub: and local-dir:
    # names, and it resizes a timm tower after loading, although a run's checkpoint already has the run's sizes.
    is_late = is_file and (name.startswith(_WITH_WEIGHTS) or is_of_run)
    tag = None if is_file else source
    weights: dict[str, Any] = {"pretrained_text": False} if is_late else {"pretrained": source}
    try:
        with compat.needing_hub(f"its tokenizer {compat.tokenizer_name(name)}", name, tag):
            tokenizer = open_clip.get_tokenizer(name, context_length=options.get("force_context_length"))
        with (
            without_warnings() if is_late else contextlib.nullcontext(),
            compat.needing_hub("its file of weights or of the configuration", name, tag),
        ):
            model, _, transform = open_clip.create_model_and_transforms(
                name, device="cpu", precision=precision, output_dict=True, **weights, **options
            )
        if is_late:
            open_clip.load_checkpoint(model, source)
    except UsageError:
        raise
    except Exception as error:
        what = f"{name} with {source or 'its own weights'}"
        reason = " ".join(str(error).split())[:400]
        hint = "check that --model is the model of these weights"
        raise UsageError(f"{what} cannot be loaded; {hint} ({type(error).__name__}: {reason})") from error
    return model, transform, tokenizer


def _architecture(name: str) -> dict[str, Any]:
    """Return OpenCLIP's configuration of a model; an empty dictionary if a folder or the hub does not have it."""
    if name.startswith(_WITH_WEIGHTS):
        # The hub client raises many types of errors. Loading the model explains them.
        with contextlib.suppress(Exception):
            return {"model": compat.architecture(name, None)}
        return {}
    config = open_clip.get_model_config(name.replace("/", "-"))
    if config is None:
        hint = nearest(name, open_clip.list_models())
        raise UsageError(f"there is no OpenCLIP model {name!r}{hint} (--model-config FILE adds one)")
    return {"model": config}


def _source(name: str, checkpoint: str | None) -> str | None:
    """Return the checkpoint as OpenCLIP's argument ``pretrained``; raise UsageError if it is missing or unknown."""
    if checkpoint is not None and Path(checkpoint).is_file():
        return checkpoint
    if name.startswith(_WITH_WEIGHTS):
        if checkpoint is not None:
            raise UsageError(
                f"{name} has its own weights, and {checkpoint} is not a file: remove --checkpoint {checkpoint}"
            )
        return None
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    known = f"the pretrained tags of {name}: {', '.join(tags) or 'none'}"
    if checkpoint is None:
        raise UsageError(f"--checkpoint is missing: expected a file, or a pretrained tag ({known}).")
    if checkpoint in tags:
        return checkpoint
    raise UsageError(f"There is no checkpoint {checkpoint}: neither a file nor a pretrained tag ({known}).")


def _version(checkpoint: str | None) -> tuple[int, int]:
    """Return numbers that change if a checkpoint file is replaced."""
    status = Path(checkpoint or "").stat()
    return status.st_ino, status.st_mtime_ns


def config_of_run(source: str | Path | None) -> dict[str, Any]:
    """Return the :func:`read_config` of a checkpoint's run folder; empty if the file is not in a run folder."""
    if source is None or not Path(source).is_file():  # a pretrained tag has no run, also in a run folder
        return {}
    # A checkpoint may be a link to a run's file, and the folder checkpoints/ of a run may be a link to another disk.
    folders = [path.parent.parent for path in (Path(source).absolute(), Path(source).resolve())]
    run = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    return {} if run is None else read_config(run)


def flags_of_run(source: str | Path | None) -> dict[str, Any]:
    """Return the flags of the run that wrote a checkpoint; empty if the file is not in a run folder."""
    return config_of_run(source).get("flags", {})


def flags_of_ref(ref: str | Path | None) -> dict[str, Any]:
    """Return the flags of a run folder, or of the run that wrote a checkpoint; empty if there is no run."""
    folder = Path(ref or "")
    return read_config(folder)["flags"] if (folder / "checkpoints").is_dir() else flags_of_run(ref)


def data_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's flags by which an evaluation reads data as training would."""
    return {name: flags[name] for name in _DATA_FLAGS if flags.get(name) is not None}


def model_of_run(checkpoint: str | Path | None) -> str | None:
    """Return the ``--model`` of the run that wrote a checkpoint file; None if the run is unknown."""
    return flags_of_run(checkpoint).get("model")


def options_of_run(source: str | None) -> dict[str, Any]:
    """Return the `MODEL_OPTIONS` of the run that wrote a checkpoint."""
    flags = {name: value for name, value in flags_of_run(source).items() if name in MODEL_OPTIONS}
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


# --- Hugging Face's transformers --------------------------------------------------------------------------------------


class DualEncoder(nn.Module):
    """The two towers of a ``transformers`` model such as CLIP or SigLIP, with the methods of OpenCLIP's models."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def visual(self) -> nn.Module:
        return self.model.vision_model

    @property
    def logit_scale(self) -> Tensor:
        return self.model.logit_scale

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Return the unit embeddings of both towers, and the logit scale."""
        features = {"image_features": self.encode_image(image), "text_features": self.encode_text(text)}
        unit = {name: F.normalize(value.float(), dim=-1) for name, value in features.items()}
        return {**unit, "logit_scale": self.logit_scale.exp()}

    def encode_image(self, images: Tensor) -> Tensor:
        """Return the embeddings ``(B, d)`` of images ``(B, 3, H, W)``."""
        return _pooled(self.model.get_image_features(pixel_values=images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``(B, d)`` of the output ``(B, 2, L)`` of :func:`_tokenize`."""
        ids, mask = tokens.unbind(dim=1)
        return _pooled(self.model.get_text_features(input_ids=ids, attention_mask=mask))


def _pooled(features: Any) -> Tensor:
    """Return the embeddings as a tensor. transformers 5 wraps them in an output object."""
    return features if isinstance(features, Tensor) else features.pooler_output


def _transform(image: Any, processor: Any) -> Tensor:
    """Turn a Pillow image into ``(3, H, W)`` with a Hugging Face image processor."""
    return processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def _tokenize(texts: list[str], tokenizer: Any, length: int) -> Tensor:
    """Return the token ids and attention masks ``(B, 2, L)`` int64 of a Hugging Face tokenizer.

    A tokenizer that returns no mask belongs to a model that was trained without a mask, such as SigLIP. The mask is then 1.
    """
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = found["input_ids"]
    return torch.stack([ids, found.get("attention_mask", torch.ones_like(ids))], dim=1)


def _open_transformers(name: str, checkpoint: str | None) -> OpenedModel:
    """Open a model with its image processor and tokenizer; raise UsageError if it is no dual encoder or a file is missing."""
    if checkpoint is not None:
        raise UsageError(f"--pretrained {checkpoint}: --model {name} includes its weights. Fix: omit --pretrained")
    try:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    except ImportError as error:
        raise UsageError(f"--model {name} needs transformers ({error}). Fix: pip install transformers") from error
    path = name.removeprefix(TRANSFORMERS)
    try:
        model, processor, tokenizer = (
            kind.from_pretrained(path) for kind in (AutoModel, AutoImageProcessor, AutoTokenizer)
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    needed = ("get_image_features", "get_text_features", "logit_scale")
    if missing := [attribute for attribute in needed if not hasattr(model, attribute)]:
        raise UsageError(
            f"--model {name} is a {type(model).__name__} without {', '.join(missing)}: expected a model with an image and "
            "a text tower, such as CLIPModel or SiglipModel"
        )
    config = {"model": json.loads(model.config.to_json_string()), "preprocess": json.loads(processor.to_json_string())}
    length = min(tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
    transform = functools.partial(_transform, processor=processor)
    tokenize = functools.partial(_tokenize, tokenizer=tokenizer, length=length)
    return OpenedModel(DualEncoder(model.eval()), transform, tokenize, name, path, config)
