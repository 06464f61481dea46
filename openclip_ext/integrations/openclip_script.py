"""Use this package's losses in OpenCLIP's training script. See ``docs/coming-from-openclip.md``."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from openclip_ext import compat
from openclip_ext.cli.messages import get_logger
from openclip_ext.cli.options import OptionError, with_flags
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS, PARTS
from openclip_ext.training import flags
from openclip_ext.training.parser import Parser, add_loss_flags, import_losses, take_loss_options

logger = get_logger(__name__)

_USE_OURS = "Train with: python -m openclip_ext.training.main"
# Options of losses that train the model's temperature. Only this package's training program uses these options.
_IGNORED_BY_OPENCLIP = ("temperature", "temperature_min", "temperature_max", "lr_tau")


def register() -> None:
    """Add this package's losses to OpenCLIP's training script. Call it before ``open_clip_train.main.main(argv)``.

    The script then accepts ``--loss`` and the options of losses, and ``open_clip.create_loss(args)`` creates the loss
    ``args.loss``. The loss's options are read from the dictionary ``args.loss_options``, and from attributes of ``args``
    with the names of the flags (``loss_eps`` for ``--loss-eps``). A second call of ``register`` has no effect.

    ``create_loss`` raises ``ValueError`` for losses that OpenCLIP's loop cannot train: losses that need the index or equal
    captions, losses that train their own modules, and, with ``accum_freq > 1``, all losses of this package. Train these losses
    with ``python -m openclip_ext.training.main``.
    """
    compat.extend_script(
        create_loss=_extended_create_loss, parse_args=_extended_parse_args, train_one_epoch=_announced_epoch
    )


def _extended_parse_args(original: Callable) -> Callable:
    """Return a ``parse_args`` that also accepts ``--loss`` and the options of losses.

    OpenCLIP's own parser would read ``--loss`` as an abbreviation of ``--loss-dist-impl``.
    """

    @functools.wraps(original)
    def parse_args(argv: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        try:
            import_losses(argv)
            known = compat.openclip_parser(Parser)
            # This raises an error if an option of an own loss has the name of one of OpenCLIP's flags.
            add_loss_flags(known.add_argument_group())
            add_loss_flags(parser.add_argument_group("losses of openclip_ext"))
            if any(argument in ("-h", "--help") for argument in argv):
                parser.print_help()
            ours, rest = parser.parse_known_args(argv)
            flags.refuse_shortened(rest, known.flags)
            args = original(rest)
            args.loss, args.loss_options = ours.loss, take_loss_options(vars(ours))
            flags.reconcile_siglip(args)
            registry.check_options(args.loss, **args.loss_options)
        except ValueError as error:
            parser.error(with_flags(str(error), OPTIONS) if isinstance(error, OptionError) else str(error))
        return args

    return parse_args


def _announced_epoch(original: Callable) -> Callable:
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
        if name in compat.OPENCLIP_LOSSES and all(
            option in OPTIONS and OPTIONS[option].openclip_flag for option in options
        ):
            # --loss selects OpenCLIP's loss, whether or not --siglip is given.
            return original(argparse.Namespace(**{**vars(args), "siglip": name == "siglip"}))
        asked, accum_freq = registry.check_options(name, **options), getattr(args, "accum_freq", 1)
        if getattr(args, "distill", False):
            raise ValueError(f"--loss {name} does not support --distill-model: remove the flag, or use --loss openclip")
        if not asked.trains_captions and "coca" in args.model.lower():  # like OpenCLIP's create_loss
            raise ValueError(
                f"--loss {name} would not train the captions of {args.model}: use --loss openclip "
                "without --normalizer and --temperature-scheme"
            )
        refused = {
            f"--loss {name} needs every sample's index": asked.needs_index,
            f"--loss {name} needs one call per step with --accum-freq {accum_freq}": accum_freq > 1,
            "--equal-captions needs labels of equal captions": asked.needs_positives,
            f"--loss {name} adds a projection to the model": asked.model_head() is not None,
        }
        for reason, is_wrong in refused.items():
            if is_wrong:
                raise ValueError(f"{reason}, which OpenCLIP's loop does not support. {_USE_OURS}")
        given = ", ".join(OPTIONS[option].flag for option in _IGNORED_BY_OPENCLIP if option in options)
        if asked.learns_logit_scale and given:
            logger.warning(f"{given}: no effect on --loss {name} in OpenCLIP's loop. {_USE_OURS}")
        steps = args.epochs * ((args.train_num_samples or 0) // (args.batch_size * args.world_size))
        loss = registry.create_loss(name, embed_dim=compat.embedding_dim(args.model), steps=steps, **options)
        if not loss.learns_logit_scale:
            loss.register_forward_hook(_with_zero_gradient, with_kwargs=True)
        return loss

    return create_loss


def _with_zero_gradient(loss: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], terms: Any) -> Any:
    """Add a gradient of 0 with respect to ``logit_scale``, which OpenCLIP's script trains, to the loss's terms.

    DistributedDataParallel fails if a trainable parameter has no gradient.
    """
    if isinstance(terms, dict) and "logit_scale" in inputs:
        terms["contrastive_loss"] = terms["contrastive_loss"] + 0 * inputs["logit_scale"]
    return terms


def _loss_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the loss options in ``args``, whose attributes have the flags' names, because ``args.eps`` is Adam's option."""
    given = getattr(args, "loss_options", {})
    flags_of = {option.name: option.flag.removeprefix("--").replace("-", "_") for option in OPTIONS.values()}
    # None in an attribute of ``args`` means that the option was not given. None in ``args.loss_options`` is a given value.
    found = {option: getattr(args, flag) for option, flag in flags_of.items() if getattr(args, flag, None) is not None}
    parts = {part: (found | given).get(part) for part in (*PARTS, "views")}
    used = {*parts, *registry.options_used_by(name, **parts)}
    return {option: value for option, value in found.items() if option in used} | given
