"""Everything openclip_ext needs from inside OpenCLIP, in one file.

``open_clip`` has a public interface, ``open_clip_train`` has none: it is the training script that comes with the
package. All use of it, and of what ``open_clip`` does not document, goes through here, so that a new OpenCLIP release
is a change of one file. ``check_version`` names what was tried. torch and OpenCLIP are imported where they are used, since
``--help`` needs neither.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

OPENCLIP_LOWEST = (3, 3)
OPENCLIP_BELOW = (4, 0)

# The names of OpenCLIP's own losses on our command line; the first is the default there and here.
OPENCLIP_LOSSES = ("openclip", "siglip")
# Where --siglip starts the model's parameters (open_clip_train/main.py).
SIGLIP_START = {"init_logit_scale": 2.302585092994046, "init_logit_bias": -10}
# How SigLipLoss sends features to a neighbor; the bidirectional one takes and gives two tensors.
SIGLIP_EXCHANGES = (
    "open_clip.loss.neighbour_exchange_with_grad",
    "open_clip.loss.neighbour_exchange_bidir_with_grad",
)
_PARTS = ("normalizer", "temperature_scheme", "views")
# Options of a loss that learns the model's temperature which only our training program heeds.
_MODELS_TEMPERATURE = ("temperature", "temperature_min", "temperature_max", "lr_tau")


def check_version() -> str:
    """Return OpenCLIP's version, or say which ones this package was built for.

    Raises:
        ImportError: the installed OpenCLIP is outside ``>=3.3,<4``.
    """
    from open_clip import __version__

    parts = tuple(int(part) for part in __version__.split(".")[:2])
    if not OPENCLIP_LOWEST <= parts < OPENCLIP_BELOW:
        raise ImportError(
            f"openclip_ext works with open_clip_torch >=3.3,<4, found {__version__}. "
            'Install a version in that range: pip install "open_clip_torch>=3.3,<4"'
        )
    return __version__


# --- command line ----------------------------------------------------------------------------------------------------


def parse_openclip_args(argv: list[str]) -> argparse.Namespace:
    """Parse OpenCLIP's own training flags; exits with its message on an unknown one."""
    check_version()
    return _openclip_parser()(argv)


def print_openclip_help() -> None:
    """Print OpenCLIP's own training flags; the version is not checked, since ``open_clip`` takes seconds to import."""
    with contextlib.suppress(SystemExit):
        _openclip_parser()(["--help"])


def _openclip_parser() -> Callable[[list[str]], argparse.Namespace]:
    from open_clip_train.params import parse_args

    return inspect.unwrap(parse_args)  # not register()'s, which knows our flags, too


# --- set-up: device, logging, seeds ----------------------------------------------------------------------------------


def init_device(args: argparse.Namespace) -> torch.device:
    """Start ``torch.distributed`` where torchrun or SLURM asks for it; sets ``args.rank`` and others."""
    from open_clip_train.distributed import init_distributed_device

    return init_distributed_device(args)


def set_backends() -> None:
    """OpenCLIP's settings for NVIDIA GPUs: products in TF32, convolutions by what is fastest."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = False


def setup_logging(log_path: str | None, level: int) -> None:
    """OpenCLIP's log format, on the terminal and into ``log_path``."""
    from open_clip_train.logger import setup_logging as setup

    setup(log_path, level)
    # OpenCLIP sets every logger to the run's level; those inside torch have nothing to say to users below a warning.
    for name in logging.root.manager.loggerDict:
        if name.split(".")[0] == "torch":
            logging.getLogger(name).setLevel(logging.WARNING)


def autocast_context(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """OpenCLIP's meaning of ``--precision`` for autocast."""
    from open_clip_train.precision import get_autocast

    return get_autocast(precision, device_type=device.type)


# --- model -----------------------------------------------------------------------------------------------------------


def create_model(
    name: str, device: torch.device, *, pretrained: str | None, precision: str, siglip_start: bool, **options: Any
) -> tuple[Any, Callable, Callable]:
    """Build the model and its transforms as ``open_clip_train.main`` does.

    Args:
        name: ``--model``.
        device: where to.
        pretrained: tag or file, or None.
        precision: ``--precision``.
        siglip_start: start ``logit_scale`` and ``logit_bias`` where SigLIP does.
        options: further arguments of ``open_clip.create_model_and_transforms``.

    Returns:
        The model (``output_dict=True``), the training transform and the evaluation transform.
    """
    import open_clip

    if siglip_start:
        options |= SIGLIP_START
    return open_clip.create_model_and_transforms(
        name, pretrained, precision=precision, device=device, output_dict=True, **options
    )


def converts_to_rgb(step: Any) -> bool:
    """Whether a step of OpenCLIP's transforms only brings an image to RGB."""
    from open_clip.transform import MaybeConvertMode

    return isinstance(step, MaybeConvertMode)


def is_captioner(model: nn.Module) -> bool:
    """Whether the model has a text decoder (CoCa), which only ``CoCaLoss`` trains."""
    return hasattr(model, "text_decoder")


def embedding_dim(model_name: str, model: nn.Module | None = None) -> int:
    """Width of the joint embedding space: the model's own, or without one, its configuration's.

    The model is asked first, since OpenCLIP fetches the configuration of a hub model from the network.

    Raises:
        ValueError: neither tells.
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
        raise ValueError(f"cannot tell the embedding width of model {model_name!r}; known: open_clip.list_models()")
    return int(config["embed_dim"])


def replace_linear_layers(model: nn.Module, layer_name: str, device: torch.device) -> nn.Module:
    """``--use-bnb-linear``: int8 linear layers from bitsandbytes (an experimental feature of OpenCLIP)."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError("--use-bnb-linear needs the packages bitsandbytes and triton: pip install them") from error
    from open_clip.utils import replace_linear

    replace_linear(model, getattr(bitsandbytes.nn.triton_based_modules, layer_name))
    return model.to(device)


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, out of DistributedDataParallel and ``torch.compile``."""
    from torch import nn

    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


# --- schedules -------------------------------------------------------------------------------------------------------


def create_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    warmup: int,
    steps: int,
    cooldown_steps: int | None,
    cooldown_power: float,
    cooldown_end: float,
) -> Callable[[int], float]:
    """OpenCLIP's learning-rate schedules: a function of the optimizer step that sets every group's rate.

    Args:
        name: ``cosine``, ``const`` or ``const-cooldown``.
        optimizer: whose rates are set.
        lr: the rate after the warm-up.
        warmup: steps of linear warm-up.
        steps: optimizer steps of the whole run.
        cooldown_steps, cooldown_power, cooldown_end: the end of ``const-cooldown``.
    """
    from open_clip_train import scheduler

    if name == "cosine":
        return scheduler.cosine_lr(optimizer, lr, warmup, steps)
    if name == "const":
        return scheduler.const_lr(optimizer, lr, warmup, steps)
    return scheduler.const_lr_cooldown(optimizer, lr, warmup, steps, cooldown_steps, cooldown_power, cooldown_end)


# --- files -----------------------------------------------------------------------------------------------------------


def remote_sync(local: str, remote: str, protocol: str) -> bool:
    """Copy the run folder to its remote place once; whether it worked."""
    from open_clip_train.file_utils import remote_sync as sync

    return sync(local, remote, protocol)


def start_remote_sync(every_seconds: int, local: str, remote: str, protocol: str) -> Any:
    """Start OpenCLIP's background process that copies the run folder again and again."""
    from open_clip_train.file_utils import start_sync_process

    process = start_sync_process(every_seconds, local, remote, protocol)
    process.start()
    return process


# --- register --------------------------------------------------------------------------------------------------------


def register() -> None:
    """Let OpenCLIP's own training script train our losses: ``open_clip_train.main`` then knows ``--loss`` and its options.

    Call it before ``open_clip_train.main.main(argv)``. ``open_clip.create_loss(args)`` then builds ours when ``args.loss``
    names one, and OpenCLIP's otherwise. Options are read from ``args.loss_options``, a dictionary that the parser fills, and
    from attributes of ``args`` named like the flags (``loss_eps`` for ``--loss-eps``). The loss is told each epoch. Calling
    ``register`` again changes nothing.

    OpenCLIP's loop hands a loss no index, calls it once per micro-batch, and trains and saves the model alone. The built
    function therefore raises ``ValueError`` for a loss that needs the index, for one with trained modules of its own, and
    for ``accum_freq > 1`` with a loss that keeps state; train those with ``python -m openclip_ext.training.main``.
    """
    import open_clip
    import open_clip.factory
    import open_clip_train.params
    import open_clip_train.train

    check_version()
    # open_clip_train.main binds the functions by name when it is imported.
    script = sys.modules.get("open_clip_train.main")
    _replace("create_loss", _extended_create_loss, open_clip, open_clip.factory, script)
    _replace("parse_args", _extended_parse_args, open_clip_train.params, script)
    _replace("train_one_epoch", _announced_epoch, open_clip_train.train, script)


def _replace(name: str, extended: Callable[[Callable], Callable], *modules: Any) -> None:
    """Bind an extended function in all modules, unless the first has one already."""
    function = getattr(modules[0], name)
    if not hasattr(function, "__wrapped__"):
        function = extended(function)
    for module in filter(None, modules):
        setattr(module, name, function)


def _extended_parse_args(original: Callable) -> Callable:
    """OpenCLIP's parser with ``--loss`` and its options, which it would take for an abbreviation of ``--loss-dist-impl``."""

    @functools.wraps(original)
    def parse_args(argv: list[str]) -> argparse.Namespace:
        from openclip_ext.losses import table
        from openclip_ext.training import flags
        from openclip_ext.training.parser import add_loss_flags

        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        add_loss_flags(parser.add_argument_group("losses of openclip_ext"), table.from_registry())
        if any(argument in ("-h", "--help") for argument in argv):
            parser.print_help()
        ours, rest = parser.parse_known_args(argv)
        args = original(rest)
        args.loss_options = vars(ours)
        args.loss = args.loss_options.pop("loss")
        try:
            flags.reconcile_siglip(args)
            flags.check_loss_flags(flags.LossChoice(args.loss, args.loss_options))
        except ValueError as error:
            parser.error(str(error))
        return args

    return parse_args


def _announced_epoch(original: Callable) -> Callable:
    """OpenCLIP's epoch, announced to the loss."""

    @functools.wraps(original)
    def train_one_epoch(model: Any, data: Any, loss: Any, epoch: int, *others: Any, **options: Any) -> Any:
        if hasattr(loss, "start_epoch"):
            loss.start_epoch(epoch)
        return original(model, data, loss, epoch, *others, **options)

    return train_one_epoch


def _extended_create_loss(original: Callable) -> Callable:
    from openclip_ext.losses import registry

    @functools.wraps(original)
    def create_loss(args: argparse.Namespace) -> nn.Module:
        name = getattr(args, "loss", None)
        if name is None:
            return original(args)
        options = _loss_options(name, args)
        if name in OPENCLIP_LOSSES and all(registry.OPTIONS[option].openclip_flag for option in options):
            # The name decides, and not only the flag --siglip.
            return original(argparse.Namespace(**{**vars(args), "siglip": name == "siglip"}))
        if getattr(args, "distill", False):
            raise ValueError(f"--loss {name} does not distill; leave out --distill-model, or use --loss openclip")
        parts = {part: options.get(part) for part in _PARTS}
        if "num_samples" in registry.requirements_of(name, **parts):
            raise ValueError(
                f"--loss {name} needs every sample's index, which OpenCLIP's loop does not pass. "
                "Train it with: python -m openclip_ext.training.main"
            )
        if getattr(args, "accum_freq", 1) > 1:
            raise ValueError(
                f"--loss {name} keeps state that one optimizer step may update only once; OpenCLIP's loop "
                f"calls the loss {args.accum_freq} times with --accum-freq {args.accum_freq}. "
                "Use --accum-freq 1 or python -m openclip_ext.training.main"
            )
        loss = registry.create_loss(name, embed_dim=embedding_dim(args.model), **options)
        if loss.needs_positives:
            raise ValueError(
                "--equal-captions needs to know which captions are equal, which OpenCLIP's loop does not tell. "
                "Train with: python -m openclip_ext.training.main"
            )
        if loss.model_head() is not None:
            raise ValueError(
                f"--loss {name} trains modules of its own with the model, and OpenCLIP's optimizer has the model's parameters "
                "only. Train it with: python -m openclip_ext.training.main"
            )
        _warn_of_temperature_options(loss, name, options)
        return loss

    return create_loss


def _warn_of_temperature_options(loss: Any, name: str, options: dict[str, Any]) -> None:
    """OpenCLIP's loop keeps its own start, bounds and learning rate of the model's temperature."""
    given = ", ".join("--" + option.replace("_", "-") for option in _MODELS_TEMPERATURE if option in options)
    if loss.learns_logit_scale and given:
        logging.warning(
            f"{given}: no effect on --loss {name} in OpenCLIP's loop, which has its own start, bounds and learning rate of "
            "the temperature. For them use: python -m openclip_ext.training.main"
        )


def _loss_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The options of loss ``name`` that ``args`` sets, under the names of their flags (Adam's ``eps`` is not ours)."""
    from openclip_ext.losses import registry
    from openclip_ext.losses.registry import OPTIONS

    given = getattr(args, "loss_options", {})

    def value_of(option: str) -> Any:
        return given.get(option, getattr(args, OPTIONS[option].flag.removeprefix("--").replace("-", "_"), None))

    parts = {part: value_of(part) for part in _PARTS}
    used = [*parts, *registry.options_used_by(name, **parts)]
    # None is a value where the user gave it; as an attribute of args it means that nothing was given.
    return {option: value_of(option) for option in used if option in given or value_of(option) is not None}
