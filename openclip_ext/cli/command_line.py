"""Code shared by all command lines: exit statuses, argument types and progress bars."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from tqdm import tqdm

from openclip_ext.cli.errors import check_words
from openclip_ext.cli.messages import echo, mask_logs, until_pipe_breaks


class Parser(argparse.ArgumentParser):
    """A parser whose errors have one line: argparse would print a long usage text before the message."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with status 2."""
        echo(f"error: {message}; {self.prog} --help lists the flags", sys.stderr)
        raise SystemExit(2)


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program, and exit with the status that it returns (None means 0).

    On a ValueError or OSError, print its message and exit with status 2. On Ctrl-C, exit with 130.
    """
    if logging.lastResort is not None:  # the handler of warnings in a program that configures no logging
        mask_logs([logging.lastResort])
    try:
        with until_pipe_breaks():
            check_words(sys.argv[1:])
            status = main(sys.argv[1:])
    except (ValueError, OSError) as error:
        echo(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from error
    raise SystemExit(status)


def progress_bar(items: Iterable[Any] | None = None, **arguments: Any) -> tqdm:
    """Return a tqdm progress bar. Update it only every 30 seconds in a log file, because each update adds a line there."""
    return tqdm(items, mininterval=0.1 if sys.stderr.isatty() else 30, **arguments)


def device(name: str) -> str:
    """Return ``name``. Raise ArgumentTypeError if PyTorch has no such device, or if this machine does not have this GPU."""
    import torch  # imported late, because some commands do not need it

    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name}: expected cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{name}: PyTorch finds {count} GPUs on this machine; use cpu")
    return name


def count(text: str) -> int:
    """Parse a positive whole number, such as 1000 or 1e9."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if value >= 1 and value.is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(f"{text}: expected a positive whole number")


def count_or_zero(text: str) -> int:
    """Parse 0 or a positive whole number."""
    return 0 if text == "0" else count(text)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress log messages up to level WARNING, such as OpenCLIP's warning about a model without weights."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
