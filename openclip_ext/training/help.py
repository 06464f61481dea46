"""The help of the training program: ``--help`` is short, ``--loss NAME --help`` is one loss's, ``--help-all`` is all.

Nothing heavy is imported here, so that it answers at once.
"""

import argparse
import contextlib
import io
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from openclip_ext import compat
from openclip_ext.options import Option
from openclip_ext.training import flag_table
from openclip_ext.training.flag_table import FlagTable
from openclip_ext.training.parser import build_parser

_WIDTH = 100
_USAGE = "openclip-ext train --loss NAME --train-data SHARDS --model NAME [FLAG ...]"
_WORK = ("--train-data", "--dataset-type", "--val-data", "--imagenet-val", "--imagenet-v2", "--eval-suite")
NOTHING_TO_DO = "nothing to do: give --train-data to train, or --val-data, --imagenet-val or --eval-suite to evaluate"
_MORE = "--loss NAME --help describes the flags of a loss, --help-all describes all flags, OpenCLIP's included."


def asks_for_help(argv: list[str]) -> bool:
    """Return whether a command line wants to know the flags only."""
    return any(argument in ("-h", "--help", "--help-all") for argument in argv)


def gives_work(argv: list[str]) -> bool:
    """Return whether a command line names, or may have cut short, a flag that says what to train on or to evaluate."""
    names = {argument.partition("=")[0] for argument in argv if argument.startswith("--") and argument != "--"}
    return any(flag.startswith(name) for flag in _WORK for name in names)


def print_help(argv: list[str]) -> None:
    """Print what a command line asks for."""
    table, chosen = flag_table.from_file(), chosen_loss(argv)
    if chosen is not None and ":" in chosen:
        from openclip_ext.losses import registry

        chosen = registry.find_method(chosen).name
        table = flag_table.of_training()
    if "--help-all" in argv:
        parser = build_parser(replace(table, options=tuple(_with_told_defaults(table))))
        parser.usage = _USAGE
        parser.print_help()
        print("\nFlags of OpenCLIP, with the meaning they have there:\n", flush=True)
        compat.print_openclip_help()
    elif chosen in table.defaults:
        print(f"The flags of --loss {chosen}, with their defaults:\n\n{_described(table, chosen)}\n\n{_MORE}")
    else:
        print(_short(table))


def chosen_loss(argv: list[str]) -> str | None:
    """Return the value of ``--loss``, without looking at anything else."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--loss", nargs="?")
    return parser.parse_known_args(argv)[0].loss


def _short(table: FlagTable) -> str:
    """Return each loss with its flags and their defaults, and the names of all other flags."""
    parts = [f"usage: {_USAGE}", "Losses, and the flags that each takes, with their defaults:"]
    flags_of: dict[str, list[str]] = {}
    for loss in table.defaults:
        flags_of.setdefault(_wrapped(flag for flag, _ in _flags_of(table, loss)), []).append(loss)
    parts += [f"{', '.join(names)}\n{flags}" for flags, names in flags_of.items()]
    ours = [option.flag for options in table.run_options.values() for option in options]
    parts.append("Further flags of ours:\n" + _wrapped([*ours, "--recipe"]))
    parts.append("Flags of OpenCLIP, with the meaning they have there:\n" + _wrapped(openclip_flags()))
    return "\n\n".join([*parts, _MORE])


def _described(table: FlagTable, loss: str) -> str:
    lines = []
    for flag, option in _flags_of(table, loss):
        meaning = option.help + (f" [{option.symbol}]" if option.symbol else "")
        meaning += f"; one of {', '.join(option.choices)}" if option.choices else ""
        lines += [f"  {flag}", *textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines) or "  none"


def _flags_of(table: FlagTable, loss: str) -> Iterator[tuple[str, Option]]:
    """Return the options of a loss that OpenCLIP does not have, each with its default as one would give it."""
    for option in table.options:
        if option.name not in table.defaults[loss] or option.openclip_flag:
            continue
        value = table.defaults[loss][option.name]
        if option.type is bool:
            yield option.flag if value else f"--no-{option.flag[2:]}", option
        else:
            yield f"{option.flag} {_text(value)}", option


def _with_told_defaults(table: FlagTable) -> Iterator[Option]:
    """Return the losses' options with a help that says which losses have which default."""
    for option in table.options:
        losses_of: dict[str, list[str]] = {}
        for loss, defaults in table.defaults.items():
            if option.name in defaults:
                losses_of.setdefault(_text(defaults[option.name]), []).append(loss)
        told = "; ".join(f"{value} with {', '.join(losses)}" for value, losses in losses_of.items())
        plain = option.help.replace("(default: the loss's own)", "").rstrip()
        yield replace(option, help=f"{plain} (default: {told})") if told else option


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def openclip_flags() -> list[str]:
    """Return the names of OpenCLIP's flags, from its own help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        compat.print_openclip_help()
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.getvalue(), flags=re.MULTILINE)


def _wrapped(words: Iterable[str]) -> str:
    """Return flags, each with its value, in lines that break between two of them."""
    glued = " ".join(word.replace(" ", "\0") for word in words)
    options: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return textwrap.fill(glued, _WIDTH, **options).replace("\0", " ") or "  none"
