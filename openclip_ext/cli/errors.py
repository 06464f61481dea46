"""Errors that a user can fix."""

import pickle


class UsageError(ValueError):
    """A wrong command line, or data or a checkpoint that does not match it; the message contains the fix."""


def one_line(error: Exception) -> str:
    """Return the first problem that ``torch.load`` or ``load_state_dict`` reports, without the names of all weights."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is corrupt, or holds more than tensors and plain types, and was not opened: expected a checkpoint"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200]
