"""Train CLIP: ``torchrun --nproc-per-node N -m openclip_ext.training.main --loss NAME ...``.

PyTorch and OpenCLIP take seconds to import: the command line is read before, so that a mistake in it is told at once.
"""

import os
import signal
import sys

from openclip_ext import __version__
from openclip_ext.cli.messages import say, until_pipe_breaks
from openclip_ext.training.flags import parse


def main(argv: list[str]) -> None:
    """Run a training (or, without training data, an evaluation) command line, with OpenCLIP's flags and ours.

    Raises:
        UsageError: a wrong command line, or data or a checkpoint that does not fit it.
        SystemExit: after ``--help``, and a run that SIGTERM or SIGINT has stopped.
    """
    config = parse(argv)
    from openclip_ext.training.run import run

    run(config)


def cli() -> None:
    """Run the process's own command line."""
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"  # of torchrun's, or SLURM's
    try:
        with until_pipe_breaks():
            config = parse(sys.argv[1:])
    except ValueError as error:
        if is_first:
            say(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
    # Without a handler it would end the process.
    signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1: nothing to save yet", file=sys.stderr))
    if "torch" not in sys.modules and is_first:
        print(f"openclip_ext {__version__}: importing PyTorch and OpenCLIP ...", file=sys.stderr, flush=True)
    from openclip_ext.training.run import program

    program(config)


if __name__ == "__main__":
    cli()
