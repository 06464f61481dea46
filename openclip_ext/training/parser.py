"""The parser of a training's command line: OpenCLIP's flags and ours together. Nothing heavy is imported here.

The flags of a run come from its configurations (``openclip_ext/cli/options.py``), the flags of the losses from their options.
"""

import argparse
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import Option, OptionError, nearest, own_options
from openclip_ext.losses.options import HARD_SHARE, OPTIONS, SUMMARIES, rho_of
from openclip_ext.training import recipes
from openclip_ext.training.config import FLAG_GROUPS


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a wrong command line, and knows the flags that were added to it directly."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.flags: list[str] = []
        super().__init__(*args, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, and note its flags."""
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError: the usage that argparse would print before the message is a page long."""
        raise UsageError(message)


def build_parser() -> Parser:
    """Return the parser of all flags: first OpenCLIP's (:attr:`Parser.flags`), then ours, in groups."""
    parser = compat.openclip_parser(Parser)
    parser.prog = "openclip-ext train"
    parser.set_defaults(device=None)  # whether it was given makes a difference
    add_loss_flags(parser.add_argument_group("loss"))
    for title, options in run_options().items():
        group = parser.add_argument_group(title)
        for option in options:
            if option.flag not in parser.flags:  # --cache-dir, which OpenCLIP has for models
                add_flag(group, option, default=option.default)
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"the papers' settings for the chosen loss on: {', '.join(recipes.names())}; flags given explicitly win",
    )
    return parser


def run_options() -> dict[str, list[Option]]:
    """Return the flags of a run that OpenCLIP does not have, by their headings in the help."""
    return {title: own_options(configs) for title, configs in FLAG_GROUPS.items()}


def own_flags() -> list[str]:
    """Return the flags that OpenCLIP does not have, without the opposites of those that are on or off."""
    of_run = [option.flag for options in run_options().values() for option in options]
    of_losses = [option.flag for option in OPTIONS.values() if not (option.openclip_flag or option.ablation)]
    return ["--loss", "--recipe", "--loss-option", HARD_SHARE.flag, *of_losses, *of_run]


def add_loss_flags(group: argparse._ArgumentGroup, hidden: Collection[str] = ()) -> None:
    """Add ``--loss`` and the options of all losses; ``hidden`` ones are parsed, and not in the help.

    An option that is not given leaves no trace, so that None can be a value.
    """
    options = {option.name: option for option in OPTIONS.values() if not option.openclip_flag}
    names = f"one of: {', '.join(SUMMARIES)}, or my.module:METHOD (default: openclip)"
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
        if option.ablation:
            continue
        more: dict[str, Any] = {"help": argparse.SUPPRESS} if option.name in hidden else {}
        if option is HARD_SHARE:
            more = {"type": lambda text: rho_of(_parser_of(HARD_SHARE)(text)), "dest": _dest(OPTIONS["rho"])}
        add_flag(group, option, default=argparse.SUPPRESS, **{"dest": _dest(option), **more})


def take_loss_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options of losses that were given out of parsed arguments, and return them by name."""
    own = [option for option in OPTIONS.values() if not option.openclip_flag]
    return {option.name: arguments.pop(_dest(option)) for option in own if _dest(option) in arguments}


def _dest(option: Option) -> str:
    """Return an option's name among the parsed arguments, where ``eps`` is Adam's."""
    return option.flag.removeprefix("--").replace("-", "_")


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
            setattr(namespace, _dest(option), option.parse(value))
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
