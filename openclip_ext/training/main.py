"""Train CLIP: ``torchrun --nproc-per-node N -m openclip_ext.training.main --loss NAME ...``.

PyTorch and OpenCLIP take seconds to import. ``--help`` and a command line with nothing to do go without them, and a training
says that it waits for them.
"""

import signal
import sys

from openclip_ext import __version__
from openclip_ext.cli.messages import until_pipe_breaks
from openclip_ext.training.help import (
    NOTHING_TO_DO,
    asks_for_help,
    gives_work,
    is_first_process,
    known_flags,
    print_help,
)
from openclip_ext.training.slips import refuse_slips


def main(argv: list[str]) -> None:
    """Run a training (or, without training data, an evaluation) command line, with OpenCLIP's flags and ours.

    Raises:
        UsageError: a wrong command line, or data or a checkpoint that does not fit it.
        SystemExit: after ``--help``, argparse's errors, and a run that SIGTERM or SIGINT has stopped.
    """
    from openclip_ext.training.run import run

    run(argv)


def cli() -> None:
    """Run the process's own command line."""
    if asks_for_help(sys.argv[1:]):
        with until_pipe_breaks():
            print_help(sys.argv[1:])
        return
    try:
        refuse_slips(sys.argv[1:], known_flags())
        if not gives_work(sys.argv[1:]):
            raise ValueError(NOTHING_TO_DO)
    except ValueError as error:
        if is_first_process():
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    # Without a handler it would end the process.
    signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1: nothing to save yet", file=sys.stderr))
    if "torch" not in sys.modules and is_first_process():
        print(f"openclip_ext {__version__}: importing PyTorch and OpenCLIP ...", file=sys.stderr, flush=True)
    from openclip_ext.training.run import program

    program(sys.argv[1:])


if __name__ == "__main__":
    cli()
