"""The help of the training program: ``--help`` is short, ``--loss NAME --help`` is one loss's, ``--help-all`` is all."""

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from openclip_ext.cli.options import option_as_words
from openclip_ext.losses.options import HARD_SHARE, OPTIONS, SUMMARIES
from openclip_ext.training.parser import build_parser, run_options

_WIDTH = 100
_USAGE = "openclip-ext train --loss NAME --train-data SHARDS --model NAME [FLAG ...]"
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


def print_help(argv: list[str]) -> None:
    """Print what a command line asks for."""
    chosen = chosen_loss(argv)
    if "--help-all" in argv:
        parser = build_parser()
        parser.usage = _USAGE
        parser.print_help()
    elif chosen in SUMMARIES or ":" in (chosen or ""):
        print(f"The flags of --loss {chosen}, with their defaults:\n\n{_described(str(chosen))}\n\n{_MORE}")
    else:
        print(_short())


def chosen_loss(argv: list[str]) -> str | None:
    """Return the value of ``--loss``, without looking at anything else."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--loss", nargs="?")
    return parser.parse_known_args(argv)[0].loss


def _short() -> str:
    """Return an example, the flags that everybody needs, a line about each loss, and the names of all other flags."""
    parts = [f"usage: {_USAGE}", _EXAMPLE, "Flags that everybody needs:\n" + _in_columns(_EVERYDAY)]
    losses = {loss: summary.partition(". ")[0].rstrip(".") for loss, summary in SUMMARIES.items()}
    parts.append("Losses:\n" + _in_columns(losses))
    parts.append("Further flags of ours, for the loss:\n" + _wrapped(_flags_of_losses()))
    parts += [
        f"For {title}:\n{_wrapped(option.flag for option in options)}" for title, options in run_options().items()
    ]
    parts.append("Flags of OpenCLIP, with the meaning they have there:\n" + _wrapped(build_parser().flags))
    return "\n\n".join([*parts, _MORE])


def _in_columns(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in rows.items())


def _flags_of_losses() -> Iterator[str]:
    yield from ("--loss-option NAME=VALUE", "--recipe", HARD_SHARE.flag)
    yield from (option.flag for option in OPTIONS.values() if not (option.openclip_flag or option.ablation))


def _described(loss: str) -> str:
    """Return the options of a loss that OpenCLIP does not have, each with its default as one would give it."""
    from openclip_ext.losses import registry  # imports torch

    defaults = registry.training_defaults(registry.find_method(loss).name, {})
    lines = []
    for option in sorted(OPTIONS.values(), key=lambda option: option.ablation):
        if option.name not in defaults or option.openclip_flag:
            continue
        meaning = option.help + (f" [{option.symbol}]" if option.symbol else "")
        meaning += f"; one of {', '.join(option.choices)}" if option.choices else ""
        lines.append("  " + option_as_words(option, defaults[option.name])[0].replace("=", " ", 1))
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) or "  none"


def _wrapped(words: Iterable[str]) -> str:
    """Return flags, each with its value, in lines that break between two of them."""
    glued = " ".join(word.replace(" ", "\0") for word in words)
    options: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return textwrap.fill(glued, _WIDTH, **options).replace("\0", " ") or "  none"
