"""The console program: ``openclip-ext COMMAND ...`` runs ``python -m MODULE ...``.

Only the given command's module is imported, so ``openclip-ext --help`` is fast.
"""

import importlib
import runpy
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from openclip_ext import __version__
from openclip_ext.cli import words
from openclip_ext.cli.messages import until_pipe_breaks
from openclip_ext.cli.options import nearest


class Command(NamedTuple):
    """A command: the module that ``python -m`` runs, and the summary in ``--help``."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("openclip_ext.training.main", "train CLIP; accepts OpenCLIP's flags and additional flags"),
    "doctor": Command("openclip_ext.diagnostics.doctor", "check the flags of a training run before it is submitted"),
    "losses": Command("openclip_ext.diagnostics.losses", "list the losses, or describe a loss: parts, cost, options"),
    "manifest": Command("openclip_ext.data.manifest", "count the samples in each shard, to give each sample an index"),
    "shards": Command("openclip_ext.data.shards.write", "write shards from a CSV file, a table or class folders"),
    "plan": Command("openclip_ext.diagnostics.plan", "predict the memory and communication of a training run"),
    "compare": Command("openclip_ext.compare", "find the best loss for your data"),
    "estimation-error": Command(
        "openclip_ext.diagnostics.estimation_error", "compare a run's log-normalizers with exact values"
    ),
    "inspect": Command("openclip_ext.diagnostics.inspect", "find duplicates, mismatched pairs and false negatives"),
    "embed": Command("openclip_ext.evaluation.embed", "write a model's embeddings of a data set, for --reference"),
    "search": Command("openclip_ext.evaluation.search", "find the images that fit a text or an image, in embeddings"),
    "export": Command("openclip_ext.export", "convert a checkpoint to a folder that OpenCLIP and transformers load"),
    "download": Command("openclip_ext.evaluation.download", "download DataComp's evaluation sets, and check them"),
    "evaluate": Command("openclip_ext.evaluation.datacomp", "evaluate a model on your data, or on DataComp's tasks"),
    "report": Command("openclip_ext.evaluation.report", "compare runs in tables and charts"),
}

_HELP = """\
usage: openclip-ext [--help] [--version] [--completion] COMMAND ...

commands (for details: openclip-ext COMMAND --help):
{commands}

eval "$(openclip-ext --completion)" turns on completion of commands, flags and losses in bash, and in zsh with bashcompinit."""
_COMPLETION = """\
_openclip_ext() {{
  local words="{commands}"
  if ((COMP_CWORD > 1)); then words=$(openclip-ext "${{COMP_WORDS[1]}}" --help | grep -oE -e '--[a-z][a-z0-9-]+' | sort -u); fi
  if [[ "${{COMP_WORDS[COMP_CWORD - 1]}}" == @(--loss|losses) ]]; then words="{losses}"; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _openclip_ext openclip-ext"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv``. None (default) means the arguments of this process.

    Raises:
        SystemExit: With the command's exit status, 2 for an unknown command, or 130 after Ctrl-C.
    """
    try:
        with until_pipe_breaks():
            _run(*((sys.argv[1:] if argv is None else argv) or ["--help"]))
    except KeyboardInterrupt:  # Ctrl-C, for example while a command imports its libraries
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


def _run(name: str, *rest: str) -> None:
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)))
    elif name == "--version":
        print(f"openclip-ext {__version__}")
    elif name == "--completion":
        losses = importlib.import_module("openclip_ext.losses.options").SUMMARIES
        print(_COMPLETION.format(commands=" ".join(COMMANDS), losses=" ".join(losses)))
    elif name in COMMANDS:
        sys.argv[1:] = rest
        # If an earlier call in this process has imported the module, runpy prints a warning.
        warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
        if name != "train":  # training.main does the same after it has parsed the command line
            import numpy  # noqa: F401  # otherwise torch imports it, and loses a Ctrl-C during this import
        runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)
    else:
        commands = f"expected one of {', '.join(COMMANDS)}"
        hint = f"; here: openclip-ext {words.COMMANDS[name]}" if name in words.COMMANDS else nearest(name, COMMANDS)
        print(f"openclip-ext: unknown command {name!r}: {commands}{hint}", file=sys.stderr)
        raise SystemExit(2)
