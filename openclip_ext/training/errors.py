"""Errors of the training program that a user can mend."""


class UsageError(ValueError):
    """A wrong command line, or data or a checkpoint that does not fit it; the message says what to do."""
