"""The flags that OpenCLIP does not have. Nothing heavy is imported here, so that ``--help`` answers at once.

The flags of the losses are generated from their options, see ``losses/table.py``.
"""

import argparse
from collections.abc import Callable, Collection
from typing import Any

from openclip_ext.losses.options import HARD_SHARE, Option, rho_of
from openclip_ext.losses.table import LossTable
from openclip_ext.training import recipes


def build_parser(losses: LossTable) -> argparse.ArgumentParser:
    """The parser of the flags that OpenCLIP does not have."""
    parser = argparse.ArgumentParser(
        prog="openclip-ext train",
        add_help=False,
        allow_abbrev=False,
        description="Train CLIP with the losses of openclip_ext. All training flags of OpenCLIP work, too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_loss_flags(parser.add_argument_group("loss"), losses)
    _add_data_flags(parser.add_argument_group("data"))
    _add_run_flags(parser.add_argument_group("run"))
    return parser


def add_loss_flags(group: argparse._ArgumentGroup, losses: LossTable, hidden: Collection[str] = ()) -> None:
    """``--loss`` and the options of all losses; ``hidden`` ones are parsed, and not in the help."""
    names = f"one of: {', '.join(losses.defaults)} (default: openclip)"
    group.add_argument("--loss", default=None, help=argparse.SUPPRESS if "loss" in hidden else names)
    arguments = {option: _argument(option) for option in losses.options if not option.openclip_flag}
    arguments[HARD_SHARE] = _argument(HARD_SHARE) | {"type": lambda text: rho_of(_parser_of(HARD_SHARE)(text))}
    for option, argument in arguments.items():
        name = "rho" if option is HARD_SHARE else option.name
        group.add_argument(
            option.flag,
            dest=name,
            default=argparse.SUPPRESS,
            **argument | ({"help": argparse.SUPPRESS} if name in hidden else {}),
        )


def _argument(option: Option) -> dict[str, Any]:
    """How argparse reads an option; one that is not given leaves no trace, so that None can be a value."""
    help_text = (option.help + (f" [{option.symbol}]" if option.symbol else "")).replace("%", "%%")
    if option.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.type.__name__.upper()
    return {"type": _parser_of(option), "metavar": metavar, "help": help_text}


def _parser_of(option: Option) -> Callable[[str], Any]:
    def parse_value(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_value


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--manifest",
        default=None,
        help="manifest of the training shards; it may leave samples out (default: found next to them, or made)",
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
        "--image-backend",
        choices=("pil", "torchvision"),
        default="pil",
        help="what decodes, crops and resizes training images; pil: OpenCLIP's pixels, bit for bit; torchvision: in a third "
        "of the time, pixels differ by a rounding (default: %(default)s)",
    )
    group.add_argument(
        "--max-bad-fraction",
        type=float,
        default=0.05,
        help="stop when more than this part of the data set is unusable (default: %(default)s)",
    )
    group.add_argument(
        "--draw-captions",
        action="store_true",
        help="draw one of a sample's captions in each epoch: of all that --caption-key names, and of lists in json",
    )
    group.add_argument(
        "--caption-aware-flip",
        action="store_true",
        help="mirror half of the images, with 'left' and 'right' exchanged in their captions",
    )


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        default=None,
        metavar="NAME",
        help=f"the papers' settings for the chosen loss on: {', '.join(recipes.names())}; flags given explicitly win",
    )
    group.add_argument(
        "--lookahead-steps",
        type=int,
        default=None,
        help="steps between two of LookAhead, for --opt timm/lookahead_NAME (CLIP-Lite: 5; default: timm's 6)",
    )
    for tower in ("image", "text"):
        group.add_argument(
            f"--lr-{tower}",
            type=float,
            default=None,
            metavar="LR",
            help=f"learning rate of the {tower} tower (default: --lr)",
        )
        group.add_argument(
            f"--{tower}-layer-decay",
            type=float,
            default=1.0,
            metavar="DECAY",
            help=f"learning rate of each layer of the {tower} tower over that of the next one; its head has the full rate",
        )
    group.add_argument(
        "--model-ema-decay",
        type=float,
        default=None,
        metavar="DECAY",
        help="keep an average of the weights, such as 0.9999: it is evaluated, and what a checkpoint gives to others",
    )
    group.add_argument(
        "--keep-best",
        default=None,
        metavar="METRIC",
        help="keep the model with the best value of a metric of results.jsonl as best.pt (of losses and ranks: the least)",
    )
    group.add_argument(
        "--save-every-steps", type=int, default=0, help="also save a checkpoint every N optimizer steps (0: never)"
    )
    group.add_argument(
        "--rank-patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end the run when a rank has given no sign of life for so long, and say which (default: 600)",
    )
    group.add_argument(
        "--max-skipped-steps",
        type=int,
        default=50,
        metavar="N",
        help="stop after so many steps in a row whose gradients are not finite; such a step changes nothing (default: 50)",
    )
    group.add_argument(
        "--fsdp",
        action="store_true",
        help="spread parameters, gradients and optimizer state over the processes (FSDP2) instead of replicating them (DDP)",
    )
    group.add_argument(
        "--fsdp-no-reshard-after-forward",
        action="store_true",
        help="with --fsdp: keep the gathered parameters from forward to backward; less communication, more memory",
    )
    group.add_argument(
        "--eval-suite", choices=["quick", "full"], default=None, help="DataComp tasks to run during training"
    )
    group.add_argument("--eval-data-dir", default=None, help="folder with the evaluation data sets")
    group.add_argument(
        "--eval-frequency", type=int, default=1, help="run the suite every N epochs and at the end (default: 1)"
    )
