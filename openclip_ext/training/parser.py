"""Our own flags. Nothing heavy is imported here, so that ``--help`` answers at once.

The flags of a run come from its configurations (``openclip_ext/cli/options.py``), the flags of the losses from their options.
"""

import argparse
from collections.abc import Callable, Collection
from typing import Any

from openclip_ext.cli.options import Option, OptionError, nearest
from openclip_ext.losses.options import HARD_SHARE, rho_of
from openclip_ext.training import recipes
from openclip_ext.training.flag_table import FlagTable


def build_parser(table: FlagTable) -> argparse.ArgumentParser:
    """Return the parser of the flags that OpenCLIP does not have."""
    parser = argparse.ArgumentParser(
        prog="openclip-ext train",
        add_help=False,
        allow_abbrev=False,
        description="Train CLIP with the losses of openclip_ext. All training flags of OpenCLIP work, too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_loss_flags(parser.add_argument_group("loss"), table)
    for title, options in table.run_options.items():
        group = parser.add_argument_group(title)
        for option in options:
            add_flag(group, option, default=option.default)
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"the papers' settings for the chosen loss on: {', '.join(recipes.names())}; flags given explicitly win",
    )
    return parser


def add_loss_flags(group: argparse._ArgumentGroup, table: FlagTable, hidden: Collection[str] = ()) -> None:
    """Add ``--loss`` and the options of all losses; ``hidden`` ones are parsed, and not in the help.

    An option that is not given leaves no trace, so that None can be a value.
    """
    options = {option.name: option for option in table.options if not option.openclip_flag}
    names = f"one of: {', '.join(table.defaults)}, or my.module:METHOD (default: openclip)"
    group.add_argument("--loss", default=None, help=argparse.SUPPRESS if "loss" in hidden else names)
    group.add_argument(
        "--loss-option",
        metavar="NAME=VALUE",
        action=_SetOption,
        options=options,
        default=argparse.SUPPRESS,
        help="an option of the loss by its name; openclip-ext losses LOSS lists them",
    )
    for option in (*options.values(), HARD_SHARE):
        is_share = option is HARD_SHARE
        name = "rho" if is_share else option.name
        more: dict[str, Any] = {"help": argparse.SUPPRESS} if name in hidden or option.ablation else {}
        if is_share:
            more["type"] = lambda text: rho_of(_parser_of(HARD_SHARE)(text))
        add_flag(group, option, default=argparse.SUPPRESS, dest=name, **more)


class _SetOption(argparse.Action):
    """``NAME=VALUE`` does what the option's own flag would."""

    def __init__(self, options: dict[str, Option], **settings: Any) -> None:
        super().__init__(**settings)
        self.options = options

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name, _, value = values.partition("=")
        option = self.options.get(name.replace("-", "_"))
        if option is None or not value:
            wrong = f"no loss has {name!r}{nearest(name, self.options)}" if option is None else "expected NAME=VALUE"
            raise argparse.ArgumentError(self, f"{values}: {wrong}; openclip-ext losses LOSS lists the names")
        try:
            setattr(namespace, option.name, option.parse(value))
        except OptionError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def add_flag(group: argparse._ActionsContainer, option: Option, default: Any, **more: Any) -> None:
    """Add the flag of an option to a parser or a group; ``more`` are arguments of ``add_argument`` that win."""
    text = option.help + (f" [{option.symbol}]" if option.symbol else "")
    if option.type is bool:
        # One that is off by default needs no opposite.
        action: Any = "store_true" if default is False else argparse.BooleanOptionalAction
        group.add_argument(
            option.flag, **{"default": default, "action": action, "help": text.replace("%", "%%"), **more}
        )
        return
    if default not in (None, argparse.SUPPRESS):
        text += f" (default: {default})"
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.type.__name__.upper()
    reads = {"type": _parser_of(option), "metavar": metavar, "help": text.replace("%", "%%")}
    group.add_argument(option.flag, default=default, **{**reads, **more})


def _parser_of(option: Option) -> Callable[[str], Any]:
    def parse_value(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            # argparse names the flag.
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option.name}=")) from error

    return parse_value
