"""The help of the training program: ``--help`` is short, ``--loss NAME --help`` is one loss's, ``--help-all`` is all.

Nothing heavy is imported here, so that it answers at once.
"""

import argparse
import contextlib
import functools
import io
import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from openclip_ext import compat
from openclip_ext.cli.options import Option, option_as_words
from openclip_ext.training import flag_table
from openclip_ext.training.flag_table import FlagTable
from openclip_ext.training.parser import build_parser

_WIDTH = 100
_USAGE = "openclip-ext train --loss NAME --train-data SHARDS --model NAME [FLAG ...]"
_WORK = ("--train-data", "--dataset-type", "--val-data", "--imagenet-val", "--imagenet-v2", "--eval-suite")
NOTHING_TO_DO = "nothing to do: give --train-data to train, or --val-data, --imagenet-val or --eval-suite to evaluate"
_EXAMPLE = """\
  openclip-ext train --loss queueclip --train-data 'shards/{00000..00331}.tar' --model ViT-B-32 \\
      --batch-size 128 --epochs 32 --lr 5e-4 --warmup 2000 --name first"""
_EVERYDAY = {
    "--loss NAME": "the loss, one of those below (default: openclip)",
    "--train-data SHARDS": "tar files, such as 'data/{00000..00331}.tar', or a CSV file",
    "--model NAME": "OpenCLIP's name of the model (default: RN50)",
    "--batch-size N": "samples on each GPU in a step (default: 64)",
    "--epochs N": "passes over the data (default: 32)",
    "--lr RATE": "learning rate after the warm-up (default: 5e-4)",
    "--warmup STEPS": "steps in which the learning rate rises (default: 10000)",
    "--precision KIND": "amp, amp_bf16, or fp32 on a CPU (default: amp)",
    "--name NAME": "the run writes into LOGS/NAME (--logs LOGS, default: ./logs)",
    "--resume latest": "continue from the newest checkpoint of this name",
}
_MORE = (
    "openclip-ext losses NAME describes a loss. --loss NAME --help describes its flags, --help-all describes all flags."
)


def asks_for_help(argv: list[str]) -> bool:
    """Return whether a command line wants to know the flags only."""
    return any(argument in ("-h", "--help", "--help-all") for argument in argv)


def is_first_process() -> bool:
    """Return whether this is process 0 of torchrun's or SLURM's."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


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
        print(f"\nFlags of OpenCLIP, with the meaning they have there:\n{_openclip_help()}", end="")
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
    """Return an example, the flags that everybody needs, a line about each loss, and the names of all other flags."""
    parts = [f"usage: {_USAGE}", _EXAMPLE, "Flags that everybody needs:\n" + _in_columns(_EVERYDAY)]
    parts.append("Losses:\n" + _in_columns(_about_losses(table)))
    parts.append("Further flags of ours, for the loss:\n" + _wrapped(_flags_of_losses(table)))
    parts += [
        f"For {title}:\n{_wrapped(option.flag for option in options)}" for title, options in table.run_options.items()
    ]
    parts.append("Flags of OpenCLIP, with the meaning they have there:\n" + _wrapped(openclip_flags()))
    return "\n\n".join([*parts, _MORE])


def _about_losses(table: FlagTable) -> dict[str, str]:
    """Return a line about each loss; of those with one summary it says the temperature, too."""
    lines = dict(table.summaries)
    for loss, defaults in table.defaults.items():
        if list(table.summaries.values()).count(lines[loss]) > 1 and "temperature_scheme" in defaults:
            lines[loss] += f"; temperature {defaults['temperature_scheme']}"
    return lines


def _in_columns(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in rows.items())


def _flags_of_losses(table: FlagTable) -> Iterator[str]:
    yield from ("--loss-option NAME=VALUE", "--recipe", "--hard-share")
    yield from (option.flag for option in table.options if not (option.openclip_flag or option.ablation))


def _described(table: FlagTable, loss: str) -> str:
    """Return the options of a loss that OpenCLIP does not have, each with its default as one would give it."""
    lines = []
    for option in sorted(table.options, key=lambda option: option.ablation):
        if option.name not in table.defaults[loss] or option.openclip_flag:
            continue
        meaning = option.help + (f" [{option.symbol}]" if option.symbol else "")
        meaning += f"; one of {', '.join(option.choices)}" if option.choices else ""
        lines.append("  " + option_as_words(option.name, table.defaults[loss][option.name])[0].replace("=", " ", 1))
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) or "  none"


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


def known_flags() -> set[str]:
    """Return OpenCLIP's flags and ours, without the opposites of those that are on or off."""
    table = flag_table.from_file()
    ours = [*table.options, *itertools.chain(*table.run_options.values())]
    return {"--loss", "--recipe", "--hard-share", "--loss-option", *(option.flag for option in ours), *openclip_flags()}


def openclip_flags() -> list[str]:
    """Return the names of OpenCLIP's flags, from its own help."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", _openclip_help(), flags=re.MULTILINE)


@functools.cache
def _openclip_help() -> str:
    """Return what OpenCLIP says of its flags, without the usage, which names another program."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        compat.print_openclip_help()
    return shown.getvalue().partition("options:\n")[2]


def _wrapped(words: Iterable[str]) -> str:
    """Return flags, each with its value, in lines that break between two of them."""
    glued = " ".join(word.replace(" ", "\0") for word in words)
    options: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return textwrap.fill(glued, _WIDTH, **options).replace("\0", " ") or "  none"
