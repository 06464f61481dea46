"""The command line: OpenCLIP's training flags, and ours.

Ours are parsed first and without abbreviations (OpenCLIP's parser would take ``--loss`` for ``--loss-dist-impl``); all
that is left goes to OpenCLIP's own parser.
"""

import argparse
import contextlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from openclip_ext import compat
from openclip_ext.losses import registry, table
from openclip_ext.losses.options import OptionError
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.training import recipes
from openclip_ext.training.errors import UsageError
from openclip_ext.training.help import asks_for_help, chosen_loss, openclip_flags, print_help
from openclip_ext.training.parser import build_parser

T = TypeVar("T")
PARTS = ("normalizer", "temperature_scheme", "views")


@dataclass(frozen=True)
class LossChoice:
    """What the command line says about the loss: its name and the options given explicitly."""

    name: str
    options: dict[str, Any]


def parse(argv: list[str]) -> tuple[argparse.Namespace, LossChoice]:
    """Parse a training command line.

    Args:
        argv: the arguments after the program's name.

    Returns:
        OpenCLIP's and our run flags in one namespace, and the choice of the loss.

    Raises:
        UsageError: flags that nobody knows or that contradict each other, or a flag that the chosen loss does not use.
        SystemExit: ``--help``.
    """
    if argv[:1] == ["--"]:
        # From ``torchrun ... -m openclip_ext.training.main -- --logs DIR``: without it torchrun refuses ``--logs``.
        argv = argv[1:]
    if asks_for_help(argv):
        print_help(argv)
        raise SystemExit(0)
    _import_own_loss(argv)
    parser = build_parser(table.from_registry())
    refuse_contradictions(argv)
    ours, rest = _without_usage(lambda: parser.parse_known_args(argv))
    if ours.recipe is not None:
        # In front of the user's flags, of which argparse takes the last.
        ours, rest = parser.parse_known_args([*_recipe_argv(ours, rest), *argv])
    refuse_shortened(rest, parser)
    args = _without_usage(lambda: compat.parse_openclip_args(rest))
    given = vars(ours)
    loss_options = {name: given.pop(name) for name in OPTIONS if name in given}
    vars(args).update(given)
    reconcile_siglip(args)
    choice = LossChoice(args.loss, loss_options)
    check_loss_flags(choice)
    _check_run_flags(args)
    return args, choice


def _import_own_loss(argv: list[str]) -> None:
    """Import the loss of ``--loss my.module:METHOD``, whose options are flags then."""
    name = chosen_loss(argv)
    if name is not None and ":" in name:
        try:
            registry.find_method(name)
        except OptionError as error:
            raise UsageError(error.with_flags()) from error


def _without_usage(parse: Callable[[], T]) -> T:
    """What argparse finds wrong as an error: the usage that it prints before is a page long."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse()
    except SystemExit:
        message = printed.getvalue().rpartition(" error: ")[2].strip()
        raise UsageError(f"{message}; --help lists the flags") from None


def refuse_shortened(argv: Sequence[str], ours: argparse.ArgumentParser) -> None:
    """OpenCLIP's parser completes flags: it would take ``--los neuclip`` for ``--loss-dist-impl neuclip``, silently."""
    theirs = openclip_flags()
    for flag in (word.partition("=")[0] for word in argv if len(word) > 2 and word.startswith("--")):
        meant = [other for other in ours._option_string_actions if other.startswith(flag)]
        if meant and flag not in theirs:
            raise UsageError(
                f"{flag} is none of OpenCLIP's flags and the beginning of {', '.join(meant)}: write it out"
            )


def refuse_contradictions(argv: Sequence[str]) -> None:
    """Of two flags for the same option argparse takes the last."""
    if {"--rho", "--hard-share"} <= {word.partition("=")[0] for word in argv}:
        raise UsageError("--rho and --hard-share say the same: give one of them")


def reconcile_siglip(args: argparse.Namespace) -> None:
    """``--siglip`` and ``--loss siglip`` say the same."""
    if args.loss is None:
        args.loss = "siglip" if args.siglip else compat.OPENCLIP_LOSSES[0]
    elif args.siglip and args.loss != "siglip":
        raise UsageError(f"--siglip and --loss {args.loss} contradict each other; give one of them")
    args.siglip = args.loss == "siglip"


def check_loss_flags(choice: LossChoice) -> None:
    """Raise UsageError for an unknown loss, and for options that it does not take."""
    try:
        registry.check_options(choice.name, **choice.options)
    except OptionError as error:
        raise UsageError(error.with_flags()) from error


def _recipe_argv(ours: argparse.Namespace, rest: list[str]) -> list[str]:
    """The recipe's flags for the loss that the command line names."""
    loss = ours.loss or ("siglip" if "--siglip" in rest else "openclip")
    try:
        recipe = recipes.get(ours.recipe, loss)
        # A part given explicitly brings other options: the recipe's for the part it replaces mean nothing then.
        used = registry.options_used_by(loss, **{part: getattr(ours, part, None) for part in PARTS})
    except ValueError as error:
        raise UsageError(str(error)) from error
    if getattr(ours, "views", 1) > 1:
        raise UsageError(
            f"recipe {ours.recipe} is for images with texts, and --views {ours.views} contrasts images alone: the papers at "
            "hand have no settings for that; leave out --recipe, or --views"
        )
    options = {name: value for name, value in recipe.loss_options.items() if name in used}
    return replace(recipe, loss_options=options).argv()


def _parts(choice: LossChoice) -> dict[str, Any]:
    return {part: choice.options.get(part) for part in PARTS}


def _options_used(choice: LossChoice) -> dict[str, Any]:
    try:
        return registry.options_used_by(choice.name, **_parts(choice))
    except ValueError as error:
        raise UsageError(str(error)) from error


# Of numbers: the least. None is not checked.
_AT_LEAST = {
    "accum_freq": 1,
    "lookahead_steps": 1,
    "max_skipped_steps": 1,
    "log_every_n_steps": 1,
    "warmup": 0,
    "wd": 0,
    "momentum": 0,
    "epochs_cooldown": 0,
}
_POSITIVE = ("rank_patience", "grad_clip_norm")
_BELOW_ONE = ("beta1", "beta2")
# What a flag is of no use without.
_NEEDS = {
    "eval_suite": "eval_data_dir",
    "eval_data_dir": "eval_suite",
    "fsdp_no_reshard_after_forward": "fsdp",
    "train_data_upsampling_factors": "dataset_resampled",
    "lock_image_unlocked_groups": "lock_image",
    "lock_image_freeze_bn_stats": "lock_image",
    "lock_text_unlocked_layers": "lock_text",
    "lock_text_freeze_layer_norm": "lock_text",
}
# What is of no use without --logs.
_WRITES = ("save_every_steps", "save_most_recent", "delete_previous_checkpoint", "copy_codebase", "remote_sync")


def _check_run_flags(args: argparse.Namespace) -> None:
    _check_support(args)
    _check_numbers(args)
    for name, needed in _NEEDS.items():
        if getattr(args, name) and not getattr(args, needed):
            raise UsageError(f"{_flag(name)} needs {_flag(needed)}")
    written = [_flag(name) for name in _WRITES if getattr(args, name)]
    if written and str(args.logs).lower() == "none":
        raise UsageError(f"{written[0]} needs a folder, and --logs none has none")
    if args.image_backend != "pil" and not args.train_data:
        raise UsageError(f"--image-backend {args.image_backend} is about the files of --train-data, and there are none")
    if args.dataset_type == "synthetic" and args.val_data:
        raise UsageError(f"--dataset-type synthetic reads no files, not those of --val-data {args.val_data} either")
    if args.resume == "latest" and args.name is None:
        raise UsageError("--resume latest needs --name: without it every start makes a new run folder")
    if args.epochs_cooldown is not None and args.lr_scheduler != "const-cooldown":
        raise UsageError("--epochs-cooldown needs --lr-scheduler const-cooldown")
    if args.model_ema_decay is not None and args.fsdp:
        raise UsageError("--model-ema-decay averages whole weights, which --fsdp does not keep; give one of them")
    if args.fsdp and args.ddp_static_graph:
        raise UsageError("--ddp-static-graph is for DistributedDataParallel, which --fsdp replaces; give one of them")


def _check_support(args: argparse.Namespace) -> None:
    if args.horovod:
        raise UsageError("--horovod is not supported; start with torchrun instead")
    if args.distill_model is not None or args.distill_pretrained is not None:
        raise UsageError("distillation (--distill-model) is not supported; use open_clip_train.main for it")


def _check_numbers(args: argparse.Namespace) -> None:
    if args.epochs < 1:
        raise UsageError(f"--epochs is {args.epochs}, must be at least 1; to evaluate only, leave out --train-data")
    if args.lr is None:
        raise UsageError(f"--opt {args.opt} needs --lr: OpenCLIP has a default for its own AdamW only")
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name, least in _AT_LEAST.items():
        if name in given and not least <= given[name] < math.inf:
            raise UsageError(f"{_flag(name)} is {given[name]:g}, must be at least {least}")
    for name in _POSITIVE:
        if name in given and not given[name] > 0:
            raise UsageError(f"{_flag(name)} is {given[name]:g}, must be positive")
    for name in _BELOW_ONE:
        if name in given and not 0 <= given[name] < 1:
            raise UsageError(f"{_flag(name)} is {given[name]:g}, must be at least 0 and below 1")
    if args.epochs_cooldown is not None and args.epochs_cooldown > args.epochs:
        raise UsageError(f"--epochs-cooldown is {args.epochs_cooldown}, more than --epochs {args.epochs}")
    for tower in ("image", "text"):
        lr, decay = getattr(args, f"lr_{tower}"), getattr(args, f"{tower}_layer_decay")
        if lr is not None and not lr > 0:
            raise UsageError(
                f"--lr-{tower} is {lr:g}, must be positive; to train no part of this tower use --lock-{tower}"
            )
        if not 0 < decay <= 1:
            raise UsageError(f"--{tower}-layer-decay is {decay:g}, must be above 0 and at most 1")
    if args.model_ema_decay is not None and not 0 < args.model_ema_decay < 1:
        raise UsageError(f"--model-ema-decay is {args.model_ema_decay:g}, must lie between 0 and 1, such as 0.9999")
    if not 0.0 <= args.max_bad_fraction <= 1.0:
        raise UsageError(f"--max-bad-fraction is {args.max_bad_fraction}, must lie between 0 and 1")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flags_without_effect(args: argparse.Namespace, choice: LossChoice) -> tuple[str, ...]:
    """OpenCLIP's flags for its own losses that were given and that the chosen loss does not use."""
    unused = [
        option for option in OPTIONS.values() if option.openclip_flag and option.name not in _options_used(choice)
    ]
    # ``seed`` and ``epochs`` are the run's as well.
    ours = (option for option in unused if option.name not in ("seed", "epochs"))
    return tuple(sorted(option.flag for option in ours if getattr(args, option.name) != option.default))


def views(choice: LossChoice) -> int:
    """How many augmented views of each image the loss compares; 1 where it compares images with texts."""
    return {"views": 1, **_options_used(choice), **choice.options}["views"]


def loss_options(args: argparse.Namespace, choice: LossChoice) -> dict[str, Any]:
    """Options for ``create_loss``: those given, and the run's where OpenCLIP has the flag (``seed``, ...)."""
    shared = {name: getattr(args, name) for name in _options_used(choice) if OPTIONS[name].openclip_flag}
    return {**shared, **choice.options}
