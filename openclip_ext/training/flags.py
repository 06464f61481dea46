"""The command line: OpenCLIP's training flags, and ours.

Ours are parsed first and without abbreviations (OpenCLIP's parser would take ``--loss`` for ``--loss-dist-impl``); all
that is left goes to OpenCLIP's own parser. The flags of the losses are generated from ``losses/options.py``, the one
place where an option is described.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from openclip_ext import compat
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS, Option
from openclip_ext.training.errors import UsageError

# Options that OpenCLIP's command line has already: the run's value is the loss's value.
SHARED_WITH_OPENCLIP = ("epochs", "seed")

PARTS = ("normalizer", "temperature_scheme")


@dataclass(frozen=True)
class LossChoice:
    """What the command line says about the loss: its name and the options given explicitly."""

    name: str
    options: dict[str, Any]


def flag(option: str) -> str:
    """The command-line flag of a loss option. ``eps`` is ``--loss-eps``: OpenCLIP's ``--eps`` is Adam's."""
    return "--loss-eps" if option == "eps" else "--" + option.replace("_", "-")


def parse(argv: list[str]) -> tuple[argparse.Namespace, LossChoice]:
    """Parse a training command line.

    Args:
        argv: the arguments after the program's name.

    Returns:
        OpenCLIP's and our run flags in one namespace, and the choice of the loss.

    Raises:
        UsageError: flags that contradict each other, or a flag that the chosen loss does not use.
        SystemExit: ``--help``, and what argparse itself refuses.
    """
    parser = build_parser()
    if any(argument in ("-h", "--help") for argument in argv):
        _print_help(parser)
        raise SystemExit(0)
    ours, rest = parser.parse_known_args(argv)
    args = compat.parse_openclip_args(rest)
    loss_options = {name: getattr(ours, name) for name in [*OPTIONS, *PARTS] if getattr(ours, name, None) is not None}
    for name, value in vars(ours).items():
        if name not in OPTIONS and name not in PARTS:
            setattr(args, name, value)
    _reconcile_siglip(args)
    choice = LossChoice(args.loss, loss_options)
    _check_loss_flags(choice)
    _check_run_flags(args)
    return args, choice


def build_parser() -> argparse.ArgumentParser:
    """The parser of the flags that OpenCLIP does not have."""
    parser = argparse.ArgumentParser(
        prog="openclip_ext.training.main",
        add_help=False,
        allow_abbrev=False,
        description="Train CLIP with the losses of openclip_ext. All training flags of OpenCLIP work, too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_loss_flags(parser.add_argument_group("loss"))
    _add_data_flags(parser.add_argument_group("data"))
    _add_run_flags(parser.add_argument_group("run"))
    return parser


def _add_loss_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--loss", default=None, help=f"one of: {', '.join(registry.list_losses())} (default: openclip)")
    group.add_argument("--normalizer", choices=registry.list_normalizers(), help="estimator, instead of the preset's")
    group.add_argument(
        "--temperature-scheme", choices=registry.list_temperature_schemes(), help="temperature, instead of the preset's"
    )
    for option in OPTIONS.values():
        if option.name in (*SHARED_WITH_OPENCLIP, *PARTS):
            continue
        group.add_argument(flag(option.name), dest=option.name, default=None, **_argument_type(option))


def _argument_type(option: Option) -> dict[str, Any]:
    symbol = f" ({option.symbol})" if option.symbol else ""
    settings: dict[str, Any] = {"help": (option.help + symbol).replace("%", "%%")}
    if option.type is bool:
        settings["action"] = argparse.BooleanOptionalAction
        return settings
    settings["type"] = _none_or(option.type) if option.optional else option.type
    if option.choices:
        settings["choices"] = list(option.choices)
    else:
        settings["metavar"] = option.type.__name__.upper()
    return settings


def _none_or(convert: type) -> Any:
    """Let ``none``/``never`` on the command line switch an optional number off."""

    def parse_value(text: str) -> Any:
        return NEVER if text.lower() in ("none", "never") else convert(text)

    parse_value.__name__ = convert.__name__
    return parse_value


class _Never:
    """Stands for an explicit ``none``: argparse's own None means 'not given'."""

    def __repr__(self) -> str:
        return "none"


NEVER = _Never()


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--manifest", default=None, help="manifest of the training shards (default: found next to them, or made)"
    )
    group.add_argument(
        "--image-key", default="jpg;png;jpeg;webp", help="extensions of the images in the shards (default: %(default)s)"
    )
    group.add_argument(
        "--caption-key",
        default="txt",
        help="extension of the captions, or json:FIELD for a field of the metadata (default: %(default)s)",
    )
    group.add_argument(
        "--max-bad-fraction",
        type=float,
        default=0.05,
        help="stop when more than this part of the data set is unusable (default: %(default)s)",
    )


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save-every-steps", type=int, default=0, help="also save a checkpoint every N optimizer steps (0: never)"
    )
    group.add_argument(
        "--eval-suite", choices=["quick", "full"], default=None, help="DataComp tasks to run during training"
    )
    group.add_argument("--eval-data-dir", default=None, help="folder with the evaluation data sets")
    group.add_argument(
        "--eval-frequency", type=int, default=1, help="run the suite every N epochs and at the end (default: 1)"
    )


def _print_help(parser: argparse.ArgumentParser) -> None:
    parser.print_help()
    print("\nFlags of OpenCLIP, with the meaning they have there:\n")
    compat.parse_openclip_args(["--help"])


def _reconcile_siglip(args: argparse.Namespace) -> None:
    """``--siglip`` and ``--loss siglip`` say the same."""
    if args.loss is None:
        args.loss = "siglip" if args.siglip else "openclip"
    elif args.siglip and args.loss != "siglip":
        raise UsageError(f"--siglip and --loss {args.loss} contradict each other; give one of them")
    args.siglip = args.loss == "siglip"


def _check_loss_flags(choice: LossChoice) -> None:
    parts = {part: choice.options.get(part) for part in PARTS}
    used = registry.options_used_by(choice.name, **parts)
    for option in choice.options:
        if option not in used and option not in PARTS:
            takes = (
                ", ".join(sorted(flag(name) for name in used if name not in SHARED_WITH_OPENCLIP)) or "no flags of ours"
            )
            raise UsageError(f"{flag(option)} is not used by --loss {choice.name}, which takes: {takes}")


def _check_run_flags(args: argparse.Namespace) -> None:
    if args.horovod:
        raise UsageError("--horovod is not supported; start with torchrun instead")
    if args.distill_model is not None or args.distill_pretrained is not None:
        raise UsageError("distillation (--distill-model) is not supported; use open_clip_train.main for it")
    if args.resume == "latest" and args.name is None:
        raise UsageError("--resume latest needs --name: without it every start makes a new run folder")
    if args.accum_freq < 1:
        raise UsageError(f"--accum-freq is {args.accum_freq}, must be at least 1")
    if args.eval_suite is not None and args.eval_data_dir is None:
        raise UsageError("--eval-suite needs --eval-data-dir")
    if args.train_data_upsampling_factors is not None and not args.dataset_resampled:
        raise UsageError("--train-data-upsampling-factors needs --dataset-resampled")
    if not 0.0 <= args.max_bad_fraction <= 1.0:
        raise UsageError(f"--max-bad-fraction is {args.max_bad_fraction}, must lie between 0 and 1")


def loss_options(args: argparse.Namespace, choice: LossChoice) -> dict[str, Any]:
    """Options for ``create_loss``: those given, and the run's ``epochs`` and ``seed`` where the loss uses them."""
    options = {name: None if value is NEVER else value for name, value in choice.options.items()}
    used = registry.options_used_by(choice.name, **{part: options.get(part) for part in PARTS})
    for name in SHARED_WITH_OPENCLIP:
        if name in used:
            options[name] = getattr(args, name)
    return options
