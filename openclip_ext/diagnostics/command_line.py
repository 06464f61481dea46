"""Shared by the diagnostics' command lines."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

import torch


def run(main: Callable[[list[str]], None]) -> None:
    """Run a program: a user's mistake is a message and exit status 2, not a traceback.

    Args:
        main: takes the arguments; its ValueErrors are the user's mistakes.
    """
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of :func:`openclip_ext.diagnostics.finished_run.load_run`."""
    parser.add_argument("run", metavar="RUN_FOLDER", help="LOGS/NAME, as training wrote it")
    parser.add_argument(
        "--checkpoint", default="latest", help="name of a file in its checkpoints/, or latest (default: %(default)s)"
    )
    parser.add_argument(
        "--train-data", default=None, help="the training data, where they are no longer where they were"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=None, help="processes that read images (default: the run's)")
    parser.add_argument(
        "--batch-size", type=int, default=None, help="images embedded at a time (default: the run's --batch-size)"
    )


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence OpenCLIP's messages about a model that is built without weights."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
