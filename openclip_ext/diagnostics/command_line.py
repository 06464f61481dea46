"""Shared by the diagnostics' command lines."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator


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


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence OpenCLIP's messages about a model that is built without weights."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
