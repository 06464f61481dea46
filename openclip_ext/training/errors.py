"""Errors of the training program that a user can mend."""

import difflib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from openclip_ext import distributed

T = TypeVar("T")


class UsageError(ValueError):
    """A wrong command line, or data or a checkpoint that does not fit it; the message says what to do."""


def on_master(action: Callable[[], T]) -> T:
    """Return on all ranks what an action gives on the master; its UsageError is raised on all of them, so that none waits.

    Raises:
        UsageError: the master's.
    """
    outcome: tuple[Any, str | None] = (None, None)
    if distributed.is_master():
        try:
            outcome = (action(), None)
        except UsageError as error:
            outcome = (None, str(error))
    result, failure = distributed.broadcast_object(outcome)
    if failure is not None:
        raise UsageError(failure)
    return result


def nearest(word: str, known: Collection[str]) -> str:
    """Return ``; did you mean ...?``, or nothing."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""
