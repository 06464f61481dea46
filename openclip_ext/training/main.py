"""Train CLIP: ``torchrun --nproc-per-node N -m openclip_ext.training.main --loss NAME ...``.

The command line is parsed before PyTorch and OpenCLIP are imported, so mistakes are reported before this slow import.
"""

import gc
import multiprocessing
import os
import signal
import sys

from openclip_ext import __version__
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo, until_pipe_breaks
from openclip_ext.training.flags import parse


def main(argv: list[str]) -> None:
    """Run a command line: train, or only evaluate if there is no training data.

    Raise UsageError for a wrong command line, data or checkpoint. Raise SystemExit after ``--help``, SIGTERM or SIGINT.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A process that multiprocessing has started only imports the main program. The run that started it says why.
        raise SystemExit(1)
    if isinstance(argv, str):
        raise UsageError("main takes a list of words: expected main(shlex.split(...)), found a text")
    config = parse(argv)
    from openclip_ext.training.run import run

    run(config)


def cli() -> None:
    """Run the command line in ``sys.argv``."""
    number = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
    is_first = number == "1" or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        with until_pipe_breaks():
            config = parse(sys.argv[1:])
    except ValueError as error:
        if is_first:
            echo(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
    # Without a handler, SIGUSR1 would kill the process.
    signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1: nothing to save yet", file=sys.stderr))
    if "torch" not in sys.modules and is_first:
        print(f"openclip_ext {__version__}: importing PyTorch and OpenCLIP ...", file=sys.stderr, flush=True)
    # Skip garbage collection during imports, because it would take a fifth of the startup time and free nothing.
    gc.disable()
    try:
        import numpy  # noqa: F401  # otherwise torch imports it, and loses a Ctrl-C during this import

        from openclip_ext.training.run import program

        gc.freeze()
        gc.enable()
        program(config)
    except KeyboardInterrupt:  # Ctrl-C before training, for example during the import, or a second Ctrl-C
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    cli()
