"""Errors that a user can fix, and checks of the words of a command line."""

import contextlib
import itertools
import os
import pickle
import re
from collections.abc import Sequence

from openclip_ext.cli.words import may_be_empty


class UsageError(ValueError):
    """An error that a user can fix, such as a wrong flag or wrong data. The message contains the fix."""


def one_line(error: Exception) -> str:
    """Shorten an error message of ``torch.load`` or ``load_state_dict``, because the full message may list all weights."""
    # PyTorch's other errors about weights_only advise a setting that runs code of the file.
    if isinstance(error, pickle.UnpicklingError | LookupError) or "weights_only" in str(error):
        return "expected only tensors and plain types, found other objects (the file may be corrupt)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200]


def check_encoding(words: Sequence[str]) -> None:
    """Raise UsageError for an argument or path that is not UTF-8. Logs, checkpoints and reports could not contain it."""
    for word in words:
        if not word.isprintable() and (found := word.encode(errors="backslashreplace").decode()) != word:
            with contextlib.suppress(UnicodeError):
                found = os.fsencode(word).decode("utf-8")
                raise UsageError(f"{found!r} needs a UTF-8 locale: export LC_ALL=C.UTF-8")
            raise UsageError(f"{found!r} is not UTF-8, which all output files need: rename the file or folder")


def check_words(argv: Sequence[str]) -> None:
    """Raise UsageError for a word of a command line that is not UTF-8, or that has an empty value."""
    check_encoding(argv)
    for before, word in itertools.pairwise(["", *argv]):
        is_empty = not word or re.fullmatch("--[a-z0-9-]+=", word)
        if is_empty and not may_be_empty(before if not word else word[:-1]):
            given, what = (word or before), "the flag"
            if not given.startswith("-"):
                given, what = f"the argument after {before!r}", "it"
            raise UsageError(f"{given}: the value is empty: remove {what}, or set the shell variable that it contains")
