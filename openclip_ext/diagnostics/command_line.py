"""What the diagnostics' command lines share."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm


def run(main: Callable[[list[str]], None]) -> None:
    """Run a program: a user's mistake is a message and exit status 2, not a traceback; Ctrl-C is status 130.

    Args:
        main: takes the arguments; its ValueErrors and OSErrors are the user's mistakes.
    """
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from error


def progress_bar(items: Iterable[Any] | None = None, **arguments: Any) -> tqdm:
    """Return tqdm's bar; it is rarely updated if the output is a log file, where each update is a line."""
    return tqdm(items, mininterval=0.1 if sys.stderr.isatty() else 30, **arguments)


def device(name: str) -> str:
    """Read an argument: a device that this machine has."""
    try:
        is_cuda = torch.device(name).type == "cuda"
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from error
    if is_cuda and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{name}: PyTorch finds no GPU here")
    return name


def count(text: str) -> int:
    """Read an argument: a positive whole number; 1e9 is one, too."""
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a positive whole number")
    return int(value)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence OpenCLIP's messages about a model that is built without weights."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
