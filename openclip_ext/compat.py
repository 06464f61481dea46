"""All code that uses undocumented parts of OpenCLIP, and some code that uses undocumented parts of torch.

OpenCLIP's library ``open_clip`` has a public interface, but its training script ``open_clip_train`` has none. A new OpenCLIP
release should require changes only in this file. ``check_version`` checks that the installed release is supported. torch and
OpenCLIP are imported inside functions, because the imports are slow and ``--help`` does not need them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext.cli.messages import get_logger

logger = get_logger(__name__)

if TYPE_CHECKING:
    import torch
    from torch import nn

OPENCLIP_LOWEST = (3, 3)
OPENCLIP_BELOW = (4, 0)

# Names of OpenCLIP's own losses in --loss. The first one is the default.
OPENCLIP_LOSSES = ("openclip", "siglip")
# Initial values of the model's parameters with --siglip (from open_clip_train/main.py).
SIGLIP_START = {"init_logit_scale": 2.302585092994046, "init_logit_bias": -10}
# SigLipLoss's functions that send features to a neighbor rank. The bidirectional function sends two tensors.
SIGLIP_EXCHANGES = (
    "open_clip.loss.neighbour_exchange_with_grad",
    "open_clip.loss.neighbour_exchange_bidir_with_grad",
)


def check_version() -> None:
    """Raise ImportError if the installed version of OpenCLIP is outside ``>=3.3,<4``."""
    from open_clip import __version__

    parts = tuple(int(part) for part in __version__.split(".")[:2])
    if not OPENCLIP_LOWEST <= parts < OPENCLIP_BELOW:
        raise ImportError(
            f"openclip_ext works with open_clip_torch >=3.3,<4, found {__version__}. "
            'Install a version in that range: pip install "open_clip_torch>=3.3,<4"'
        )


# --- command line ----------------------------------------------------------------------------------------------------


def openclip_parser(kind: type[argparse.ArgumentParser]) -> Any:
    """Return a parser of class ``kind`` with OpenCLIP's training flags, without importing ``open_clip``.

    OpenCLIP's ``parse_args`` both creates the parser and parses arguments. This function calls it with an empty command line
    and captures the parser that it creates.
    """
    from open_clip_train import params

    made: list[argparse.ArgumentParser] = []

    def make(*args: Any, **options: Any) -> argparse.ArgumentParser:
        made.append(kind(*args, **options))
        return made[0]

    script: Any = params
    script.argparse = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": make})
    try:
        inspect.unwrap(params.parse_args)([])  # the original function, because register() wraps it to add our flags
    finally:
        script.argparse = argparse
    return made[0]


def set_openclip_defaults(args: argparse.Namespace) -> None:
    """Set optimizer flags that are None to OpenCLIP's defaults for the model. timm's optimizers have no such defaults."""
    from open_clip_train.params import get_default_params

    if "timm" not in args.opt:
        for name, value in get_default_params(args.model).items():
            if getattr(args, name) is None:
                setattr(args, name, value)


# --- set-up: device, logging, seeds ----------------------------------------------------------------------------------


def init_device(args: argparse.Namespace) -> torch.device:
    """Initialize ``torch.distributed`` under torchrun or SLURM, set ``args.rank`` and related flags, and return the device.

    The device also becomes PyTorch's current device. With ``--device cuda:1``, OpenCLIP alone would leave ``cuda:0`` as the
    current device. The returned device always has an index, which OpenCLIP omits in a single process.
    """
    import torch
    from open_clip_train.distributed import init_distributed_device

    device = init_distributed_device(args)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def set_backends() -> None:
    """Allow TF32 matrix products and the fastest convolutions on NVIDIA GPUs, like OpenCLIP's training script."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = False


def setup_logging(log_path: str | None, level: int) -> None:
    """Log to the terminal and to ``log_path``, in OpenCLIP's format."""
    from open_clip_train.logger import setup_logging as setup

    from openclip_ext.cli.messages import mask_logs

    others = [*logging.root.handlers]
    setup(log_path, level)
    mask_logs(handler for handler in logging.root.handlers if handler not in others)
    # OpenCLIP sets every logger to the run's level, but messages of other libraries below level WARNING do not help users.
    for name in logging.root.manager.loggerDict:
        if name.split(".")[0] in ("torch", "datasets", "dill", "filelock", "fsspec"):
            logging.getLogger(name).setLevel(logging.WARNING)


def autocast_context(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that creates OpenCLIP's autocast context for ``--precision``."""
    from open_clip_train.precision import get_autocast

    return get_autocast(precision, device_type=device.type)


# --- model -----------------------------------------------------------------------------------------------------------


def check_augmentation(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if ``--aug-cfg`` has fields that OpenCLIP does not support."""
    from open_clip.transform import AugmentationCfg

    try:
        AugmentationCfg(**settings)
    except TypeError as error:
        raise ValueError(f"--aug-cfg: {str(error).partition(' ')[2]}") from error


def create_model(
    name: str, device: torch.device, *, pretrained: str | None, precision: str, siglip_start: bool, **options: Any
) -> tuple[Any, Callable, Callable]:
    """Build the model and its transforms as ``open_clip_train.main`` does.

    Args:
        name: Value of ``--model``.
        device: Device of the model.
        pretrained: Tag or file of the initial weights. None means random weights.
        precision: Value of ``--precision``.
        siglip_start: Whether to use SigLIP's initial ``logit_scale`` and ``logit_bias``.
        options: Other arguments of ``open_clip.create_model_and_transforms``.

    Returns:
        The model (``output_dict=True``), the training transform and the evaluation transform.
    """
    import open_clip
    import torch

    if siglip_start:
        options |= SIGLIP_START
    # OpenCLIP does not load weights with a bias into a model without one.
    weights = pretrained or hub_weights(name, options.get("cache_dir"))
    leaves_out_bias = (
        not siglip_start
        and weights is not None
        and has_logit_bias(Path(weights))
        and (architecture(name, options.get("cache_dir")) or {}).get("init_logit_bias") is None
    )
    if leaves_out_bias:
        options["init_logit_bias"] = 0.0
    built = open_clip.create_model_and_transforms(
        name, pretrained, precision=precision, device=device, output_dict=True, **options
    )
    if leaves_out_bias:
        built[0].logit_bias = None
        logger.info(f"The logit_bias in {weights} is left out. Only --loss siglip uses it.")
    decoder = getattr(built[0], "text_decoder", None)
    if decoder is not None and weights is None:
        # OpenCLIP 3.3 has an initialization with this formula, but never calls it.
        torch.nn.init.normal_(decoder.text_projection, std=decoder.width**-0.5)
        logger.info("text_decoder.text_projection is initialized here, because OpenCLIP leaves it uninitialized")
    return built


def has_logit_bias(path: Path) -> bool:
    """Return whether a file has weights with the bias of the sigmoid loss. False if its format cannot be read here."""
    if not path.is_file():  # such as a tag, without importing torch
        return False
    import torch
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = {*file.keys()}
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            names = {*content.get("state_dict", content)}
    except Exception:  # such as old formats and scripted models; OpenCLIP loads or rejects them later
        return False
    return not names.isdisjoint({"logit_bias", "module.logit_bias"})


def architecture(name: str, cache_dir: str | None) -> dict[str, Any] | None:
    """Return a model's configuration in the format of OpenCLIP's JSON files, or None if OpenCLIP does not have the model."""
    from open_clip import factory

    schema, identifier = factory.parse_model_name(name)
    if schema == "hf-hub":
        return factory._get_hf_config(identifier, cache_dir=cache_dir)["model_cfg"]
    return factory.get_model_config(name if schema else name.replace("/", "-"))


def hub_weights(name: str, cache_dir: str | None) -> str | None:
    """Return the file of initial weights of a ``local-dir:`` or ``hf-hub:`` model; None for other models or on an error."""
    from open_clip import factory

    schema, identifier = factory.parse_model_name(name)
    if schema == "local-dir":
        return factory._find_checkpoint_in_dir(Path(identifier))
    if schema == "hf-hub":
        try:
            return factory.download_pretrained_from_hf(identifier, cache_dir=cache_dir)
        except Exception:  # the hub client raises many types of errors, and OpenCLIP also ignores all of them
            return None
    return None


@contextlib.contextmanager
def needing_hub(what: str, name: str, tag: str | None) -> Iterator[None]:
    """Raise UsageError if a file of the Hugging Face hub is neither in the cache nor downloadable. Pass other errors on.

    Args:
        what: The part of the model that the ``with`` block loads, such as ``its tokenizer``.
        name, tag: The model and its pretrained tag, if any.
    """
    from openclip_ext.cli.errors import UsageError

    try:
        yield
    except Exception as error:  # OSError of transformers, RuntimeError of OpenCLIP
        cause: BaseException | None = error
        while cause is not None and type(cause).__module__ != "huggingface_hub.errors":
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise UsageError(
            f"--model {name}: {what} is not in the cache, and the download failed ({type(cause).__name__}). Where there is a "
            f"network, run {fetching_command(name, tag)}"
        ) from error


def tokenizer_name(name: str) -> str:
    """Return the name of a model's tokenizer on the Hugging Face hub; empty if OpenCLIP contains the tokenizer."""
    import open_clip

    if ":" in name:
        return name.removeprefix("hf-hub:") if name.startswith("hf-hub:") else ""
    config = open_clip.get_model_config(name.replace("/", "-")) or {}
    return config.get("text_cfg", {}).get("hf_tokenizer_name") or ""


def fetching_command(name: str, tag: str | None) -> str:
    """Return a command that downloads a model's weights and tokenizer into the cache."""
    model = f"{name!r}, {tag!r}" if tag else f"{name!r}"
    return f'python -c "from open_clip import *; create_model({model}); get_tokenizer({name!r})"'


# Names in OpenCLIP's preprocessing configurations. The names of its flags and arguments start with ``image_``.
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


def changed_preprocessing(model: Any) -> dict[str, Any]:
    """Return the model's non-default preprocessing settings, as arguments of ``create_model_and_transforms``."""
    from dataclasses import asdict

    from open_clip.transform import PreprocessCfg

    def settings(config: Mapping[str, Any]) -> dict[str, Any]:
        # Some configurations have tuples, others lists.
        return {
            f"image_{name}": list(config[name]) if name in ("mean", "std") else config[name] for name in PREPROCESSING
        }

    default = settings(asdict(PreprocessCfg()))
    return {name: value for name, value in settings(model.visual.preprocess_cfg).items() if value != default[name]}


def converts_to_rgb(step: Any) -> bool:
    """Return whether a step of OpenCLIP's image transform only converts the image to RGB."""
    from open_clip.transform import MaybeConvertMode

    return isinstance(step, MaybeConvertMode)


def lock_text_tower(model: Any, unlocked_layers: int, freeze_layer_norm: bool) -> None:
    """Freeze the text tower of a model, which may be a captioner (CoCa). OpenCLIP's function does not support captioners.

    Raises:
        UsageError: ``freeze_layer_norm`` is False, but the tower is not from Hugging Face.
    """
    from open_clip.hf_model import HFTextEncoder

    from openclip_ext.cli.errors import UsageError

    if not freeze_layer_norm and not isinstance(getattr(model, "text", None), HFTextEncoder):
        raise UsageError("--lock-text needs --lock-text-freeze-layer-norm for this model")
    lock = model.text.lock if is_captioner(model) else model.lock_text_tower
    lock(unlocked_layers, freeze_layer_norm)


def is_timm(model: Any) -> bool:
    """Return whether the image tower is from timm."""
    from open_clip.timm_model import TimmModel

    return isinstance(model.visual, TimmModel)


def is_captioner(model: nn.Module) -> bool:
    """Return whether the model has a text decoder (CoCa). Only ``CoCaLoss`` trains the decoder."""
    return hasattr(model, "text_decoder")


def unused_by_captions(model: Any) -> list[nn.Parameter]:
    """Return a captioner's trainable parameters that have no effect on its captions."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = model.visual.image_size
    image = parameters[0].new_zeros(1, 3, *(size if isinstance(size, tuple) else (size, size)))
    was_training = model.training
    captions = model.eval()(image, torch.ones(1, 4, dtype=torch.int64, device=image.device))["logits"]
    model.train(was_training)
    gradients = torch.autograd.grad(captions.float().sum(), parameters, allow_unused=True)
    return [parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is None]


def embedding_dim(model_name: str, model: nn.Module | None = None) -> int:
    """Return a model's embedding dimension, from ``model`` if possible, else from the configuration of ``model_name``.

    ``model`` is preferred, because OpenCLIP would have to download the configuration of a hub model.

    Raises:
        ValueError: Neither the model nor the configuration has an embedding dimension.
    """
    import open_clip
    import torch

    projection = getattr(model, "text_projection", None)
    if isinstance(projection, torch.Tensor):
        return int(projection.shape[1])
    for tower in (getattr(model, "text", None), getattr(model, "visual", None)):
        width = getattr(tower, "output_dim", None)
        if isinstance(width, int):
            return width
    config = open_clip.get_model_config(model_name)
    if config is None:
        raise ValueError(f"unknown embedding dimension of model {model_name!r}. Use a model of open_clip.list_models()")
    return int(config["embed_dim"])


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of DistributedDataParallel and ``torch.compile``."""
    from torch import nn

    while True:
        if uncompiled(model) is not model:
            model = uncompiled(model)
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


# --- undocumented parts of torch, tested with versions 2.6 to 2.15 ---------------------------------------------------------


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the original model from the result of ``torch.compile``; other models are returned unchanged."""
    return getattr(model, "_orig_mod", model)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return a model's BatchNorm layers of all types (1d, 2d, 3d, synchronized)."""
    from torch import nn

    return [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def map_tensors(function: Callable[[torch.Tensor], Any], nested: Any) -> Any:
    """Apply a function to all tensors in nested lists, tuples and dictionaries."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, nested)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a tensor on the device can make the optimizer skip its step, without a host-device sync."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@functools.cache  # asked in each update of a fit
def has_fused_adagrad(device: torch.device) -> bool:
    """Return whether this torch has the fused kernel of Adagrad for a device. Earlier versions have it only for CPUs."""
    import torch

    key = device.type.upper()
    return key in ("CPU", "CUDA") and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adagrad_", key)


# --- schedules -------------------------------------------------------------------------------------------------------


def create_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    warmup: int,
    steps: int,
    cooldown: tuple[int | None, float, float],
) -> Callable[[int], float]:
    """Return OpenCLIP's learning rate schedule: a function that sets the learning rate of every group for a given step.

    Args:
        name: ``cosine``, ``const`` or ``const-cooldown``.
        optimizer: The optimizer whose learning rates are set.
        lr: Learning rate after the warm-up.
        warmup: Number of steps of the linear warm-up.
        steps: Number of optimizer steps of the full run.
        cooldown: Number of steps, power and final learning rate of the last phase of ``const-cooldown``.
    """
    from open_clip_train import scheduler

    if name == "const-cooldown":
        return scheduler.const_lr_cooldown(optimizer, lr, warmup, steps, *cooldown)
    schedule = {"cosine": scheduler.cosine_lr, "const": scheduler.const_lr}[name]
    return schedule(optimizer, lr, warmup, steps)


# --- files -----------------------------------------------------------------------------------------------------------


def remote_sync(local: str, remote: str, protocol: str) -> bool:
    """Copy the run folder to its remote location once; return whether the copy succeeded."""
    from open_clip_train.file_utils import remote_sync as sync

    return sync(local, remote, protocol)


def start_remote_sync(every_seconds: int, local: str, remote: str, protocol: str) -> Any:
    """Start and return OpenCLIP's background process, which copies the run folder every ``every_seconds`` seconds."""
    from open_clip_train.file_utils import start_sync_process

    process = start_sync_process(every_seconds, local, remote, protocol)
    process.start()
    return process


# --- the training script ---------------------------------------------------------------------------------------------


def extend_script(
    *,
    create_loss: Callable[[Callable], Callable],
    parse_args: Callable[[Callable], Callable],
    train_one_epoch: Callable[[Callable], Callable],
) -> None:
    """Replace three functions of OpenCLIP's training script in all modules that import them. A second call has no effect.

    Args:
        create_loss, parse_args, train_one_epoch: Each receives OpenCLIP's function of the same name and returns the
            replacement, which must use ``functools.wraps``.
    """
    import open_clip
    import open_clip.factory
    import open_clip_train.params
    import open_clip_train.train

    check_version()
    # If open_clip_train.main is already imported, it has its own references to the functions.
    script = sys.modules.get("open_clip_train.main")
    _replace("create_loss", create_loss, open_clip, open_clip.factory, script)
    _replace("parse_args", parse_args, open_clip_train.params, script)
    _replace("train_one_epoch", train_one_epoch, open_clip_train.train, script)


def _replace(name: str, extended: Callable[[Callable], Callable], *modules: Any) -> None:
    """Replace a function in all modules. If the first module already has a replacement, use that replacement."""
    function = getattr(modules[0], name)
    if not hasattr(function, "__wrapped__"):
        function = extended(function)
    for module in filter(None, modules):
        setattr(module, name, function)
