"""Errors of the training program that a user can mend."""

import pickle


class UsageError(ValueError):
    """A wrong command line, or data or a checkpoint that does not fit it; the message says what to do."""


def one_line(error: Exception) -> str:
    """Return the first of what ``torch.load`` or ``load_state_dict`` finds wrong, without the names of all weights."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain types, and was not opened: expected a checkpoint"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200]
