"""OpenCLIP's own training script with our losses: ``openclip_ext.register()``. Page: ``docs/coming-from-openclip.md``."""

import argparse
import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from openclip_ext import compat
from openclip_ext.cli.options import OptionError, with_flags
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS
from openclip_ext.training import flags
from openclip_ext.training.parser import Parser, add_loss_flags, take_loss_options

_USE_OURS = "Train with: python -m openclip_ext.training.main"
# Options of a loss that learns the model's temperature which only our training program heeds.
_MODELS_TEMPERATURE = ("temperature", "temperature_min", "temperature_max", "lr_tau")


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
    compat.extend_script(
        create_loss=_extended_create_loss, parse_args=_extended_parse_args, train_one_epoch=_announced_epoch
    )


def _extended_parse_args(original: Callable) -> Callable:
    """Return OpenCLIP's parser with ``--loss`` and its options; it would take it for a short ``--loss-dist-impl``."""

    @functools.wraps(original)
    def parse_args(argv: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        add_loss_flags(parser.add_argument_group("losses of openclip_ext"))
        if any(argument in ("-h", "--help") for argument in argv):
            parser.print_help()
        ours, rest = parser.parse_known_args(argv)
        try:
            flags.refuse_contradictions(argv)
            flags.refuse_shortened(rest, compat.openclip_parser(Parser).flags)
        except ValueError as error:
            parser.error(str(error))
        args = original(rest)
        args.loss, args.loss_options = ours.loss, take_loss_options(vars(ours))
        try:
            flags.reconcile_siglip(args)
            registry.check_options(args.loss, **args.loss_options)
        except OptionError as error:
            parser.error(with_flags(str(error), OPTIONS))
        except ValueError as error:
            parser.error(str(error))
        return args

    return parse_args


def _announced_epoch(original: Callable) -> Callable:
    """Return OpenCLIP's epoch, announced to the loss."""

    @functools.wraps(original)
    def train_one_epoch(model: Any, data: Any, loss: Any, epoch: int, *others: Any, **options: Any) -> Any:
        if hasattr(loss, "start_epoch"):
            loss.start_epoch(epoch)
        return original(model, data, loss, epoch, *others, **options)

    return train_one_epoch


def _extended_create_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def create_loss(args: argparse.Namespace) -> nn.Module:
        name = getattr(args, "loss", None)
        if name is None:
            return original(args)
        options = _loss_options(name, args)
        if name in compat.OPENCLIP_LOSSES and all(OPTIONS[option].openclip_flag for option in options):
            # The name decides, and not only the flag --siglip.
            return original(argparse.Namespace(**{**vars(args), "siglip": name == "siglip"}))
        asked, accum_freq = registry.check_options(name, **options), getattr(args, "accum_freq", 1)
        refused = {
            f"--loss {name} does not distill; leave out --distill-model, or use --loss openclip": (
                getattr(args, "distill", False)
            ),
            f"--loss {name} needs every sample's index, which OpenCLIP's loop does not pass. {_USE_OURS}": asked.needs_index,
            f"--loss {name} keeps state that one optimizer step may update only once; OpenCLIP's loop calls the loss "
            f"{accum_freq} times with --accum-freq {accum_freq}: leave it out. {_USE_OURS}": accum_freq > 1,
            "--equal-captions needs to know which captions are equal, which OpenCLIP's loop does not tell. "
            f"{_USE_OURS}": asked.needs_positives,
            f"--loss {name} trains modules of its own with the model, and OpenCLIP's optimizer has the model's parameters "
            f"only. {_USE_OURS}": asked.model_head() is not None,
        }
        for reason, is_wrong in refused.items():
            if is_wrong:
                raise ValueError(reason)
        given = ", ".join(OPTIONS[option].flag for option in _MODELS_TEMPERATURE if option in options)
        if asked.learns_logit_scale and given:
            logging.warning(
                f"{given}: no effect on --loss {name} in OpenCLIP's loop, which has its own start, bounds and learning rate "
                f"of the temperature. {_USE_OURS}"
            )
        return registry.create_loss(name, embed_dim=compat.embedding_dim(args.model), **options)

    return create_loss


def _loss_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of loss ``name`` that ``args`` sets, under the names of their flags (Adam's ``eps`` is not ours)."""
    given = getattr(args, "loss_options", {})

    def value_of(option: str) -> Any:
        return given.get(option, getattr(args, OPTIONS[option].flag.removeprefix("--").replace("-", "_"), None))

    parts = {part: value_of(part) for part in flags.PARTS}
    used = [*parts, *registry.options_used_by(name, **parts)]
    # None is a value where the user gave it; as an attribute of args it means that nothing was given.
    return {option: value_of(option) for option in used if option in given or value_of(option) is not None}
