"""The help of the training program: ``--help`` is short, ``--loss NAME --help`` is one loss's, ``--help-all`` is all.

Nothing heavy is imported here, so that it answers at once.
"""

import argparse
import contextlib
import io
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from openclip_ext import compat
from openclip_ext.losses import table
from openclip_ext.losses.options import Option
from openclip_ext.losses.table import LossTable
from openclip_ext.training.parser import build_parser

_WIDTH = 100
_USAGE = "openclip-ext train --loss NAME --train-data SHARDS --model NAME [FLAG ...]"
_MORE = "--loss NAME --help describes the flags of a loss, --help-all describes all flags, OpenCLIP's included."


def asks_for_help(argv: list[str]) -> bool:
    """Whether a command line wants to know the flags only."""
    return any(argument in ("-h", "--help", "--help-all") for argument in argv)


def print_help(argv: list[str]) -> None:
    """What a command line that asks for help asks for."""
    losses = table.from_file()
    chosen = chosen_loss(argv)
    if chosen is not None and ":" in chosen:
        losses, chosen = table.with_method(chosen)
    if "--help-all" in argv:
        parser = build_parser(losses)
        parser.usage = _USAGE
        _tell_defaults(parser, losses)
        parser.print_help()
        print("\nFlags of OpenCLIP, with the meaning they have there:\n", flush=True)
        compat.print_openclip_help()
    elif chosen in losses.defaults:
        only = LossTable(losses.options, {chosen: losses.defaults[chosen]})
        print(f"The flags of --loss {chosen}, with their defaults:\n\n{_described(only, chosen)}\n\n{_MORE}")
    else:
        print(_short(losses))


def chosen_loss(argv: list[str]) -> str | None:
    """Return the value of ``--loss``, without looking at anything else."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--loss", nargs="?")
    return parser.parse_known_args(argv)[0].loss


def _short(losses: LossTable) -> str:
    """Each loss with the flags that it uses and their defaults; the names of all other flags."""
    parts = [f"usage: {_USAGE}", "Losses, and the flags that each takes, with their defaults:"]
    flags_of: dict[str, list[str]] = {}
    for loss, defaults in losses.defaults.items():
        flags = _wrapped(_with_default(option, defaults[option.name]) for option in _own(losses, defaults))
        flags_of.setdefault(flags, []).append(loss)
    parts += [f"{', '.join(names)}\n{flags}" for flags, names in flags_of.items()]
    ours = (f"{action.option_strings[0]}" for action in build_parser(LossTable((), losses.defaults))._actions[1:])
    parts.append("Further flags of ours:\n" + _wrapped(ours))
    parts.append("Flags of OpenCLIP, with the meaning they have there:\n" + _wrapped(openclip_flags()))
    return "\n\n".join([*parts, _MORE])


def _described(losses: LossTable, loss: str) -> str:
    lines = []
    for option in _own(losses, losses.defaults[loss]):
        lines.append(f"  {_with_default(option, losses.defaults[loss][option.name])}")
        meaning = option.help + (f" [{option.symbol}]" if option.symbol else "")
        meaning += f"; one of {', '.join(option.choices)}" if option.choices else ""
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) or "  none"


def _own(losses: LossTable, defaults: dict[str, Any]) -> list[Option]:
    """The options that a loss uses and that OpenCLIP does not have."""
    return [option for option in losses.options if option.name in defaults and not option.openclip_flag]


def _with_default(option: Option, value: Any) -> str:
    """As one would give it on the command line."""
    if option.type is bool:
        return option.flag if value else f"--no-{option.flag[2:]}"
    return f"{option.flag} {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _tell_defaults(parser: argparse.ArgumentParser, losses: LossTable) -> None:
    """Add to the help of each option of a loss its default, and which losses have another."""
    for option in losses.options:
        users = {loss: _text(values[option.name]) for loss, values in losses.defaults.items() if option.name in values}
        action = next((found for found in parser._actions if found.dest == option.name), None)
        if action is None or option.openclip_flag or not users:
            continue
        by_value: dict[str, list[str]] = {}
        for loss, value in users.items():
            by_value.setdefault(value, []).append(loss)
        told = "; ".join(f"{value} with {', '.join(names)}" for value, names in by_value.items())
        action.help = f"{action.help} (default: {told})".replace("(default: the loss's own) ", "")


def openclip_flags() -> list[str]:
    """Names of OpenCLIP's flags, from its own help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        compat.print_openclip_help()
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.getvalue(), flags=re.MULTILINE)


def _wrapped(words: Iterable[str]) -> str:
    """Flags, each with its value, in lines that break between two of them."""
    glued = " ".join(word.replace(" ", "\0") for word in words)
    options: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return textwrap.fill(glued, _WIDTH, **options).replace("\0", " ") or "  none"
