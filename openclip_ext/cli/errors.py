"""Errors that a user can fix."""

import pickle


class UsageError(ValueError):
    """An error that a user can fix, such as a wrong flag or wrong data. The message contains the fix."""


def one_line(error: Exception) -> str:
    """Shorten an error message of ``torch.load`` or ``load_state_dict``, because the full message may list all weights."""
    if isinstance(error, pickle.UnpicklingError):
        return "expected only tensors and plain types, found other objects (the file may be corrupt)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200]
