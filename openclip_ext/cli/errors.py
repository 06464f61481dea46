"""Errors of the training program that a user can mend."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from openclip_ext import distributed

T = TypeVar("T")


class UsageError(ValueError):
    """A wrong command line, or data or a checkpoint that does not fit it; the message says what to do."""


def one_line(error: Exception) -> str:
    """Return the first of what ``torch.load`` or ``load_state_dict`` finds wrong, without the names of all weights."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain types, and was not opened: expected a checkpoint"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200]


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
