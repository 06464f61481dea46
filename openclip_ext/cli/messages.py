"""Mask secrets in messages and stored settings, and escape control characters in messages."""

import contextlib
import logging
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

MASK = "***"

_WORD = (
    r"(?:token(?!i|s\b)|signature|secret|passw(?:or)?d|pwd|credential|(?:api|access|private)[-_]?key|auth(?!or)|jwt)"
)
_HEADER = r"\b(?:(?:proxy-)?authorization|x-[\w-]*(?:token|key)|private-token|cookie)"
_VALUE = r"""(?:'[^']*'|"[^"]*"|[^\s&#;|<>'"]+)"""
# Each pattern has two parts: the text before a secret, and the secret.
_SECRETS = [
    re.compile(f"(?i)({before}){secret}")
    for before, secret in (
        # Matches https://USER:PASSWORD@host and https://TOKEN@host, but not abfs://container@account.
        (r"\b(?:https?|ftps?)://", r"[^\s/'\"]+(?=@)"),
        (r"\b[a-z][\w+.-]*://", r"[^\s/'\":@]*:[^\s/'\"]*(?=@)"),
        # Matches ?X-Amz-Signature=..., AWS_SECRET_ACCESS_KEY=... and --password=..., but not s3://b/token=1/... or ?key=0.tar.
        (rf"(?<![\w/.%-])(?:[\w.%-]*?{_WORD}[\w.%-]*|sig)=|[?&]key=(?![^\s&]*\.tar)", _VALUE),
        # Matches arguments of curl: --oauth2-bearer ..., --http-password ..., -u USER:PASSWORD, -H 'Authorization: Bearer ...'
        (rf"(?<!\S)--(?:[\w-]*?{_WORD}[\w-]*|oauth2-bearer)\s+", _VALUE),
        (r"(?<!\S)(?:-u\s*|--(?:proxy-)?user[\s=]+)", r"(?:'[^']*:[^']*'|\"[^\"]*:[^\"]*\"|[^\s:'\"]+:[^\s'\"]*)"),
        (rf"{_HEADER}\s*:\s*(?:(?:bearer|basic|token)\s)?", r"[^\s'\"]+"),
    )
]  # fmt: skip
# Control characters except tabs and line ends, marks that change the text direction, and bytes that are not UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def without_secrets(value: Any) -> Any:
    """Mask passwords and tokens in a text with a URL or a ``pipe:`` command, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {name: without_secrets(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets, value))
    return _masked(value) if isinstance(value, str) and ("://" in value or "pipe:" in value) else value


def _masked(text: str) -> str:
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def for_people(text: str) -> str:
    """Return a text with secrets masked and control characters escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _masked(text))


@contextlib.contextmanager
def until_pipe_breaks() -> Iterator[None]:
    """Exit without an error message if the reader of standard output, such as ``head``, closes the pipe."""
    try:
        yield
        if sys.stdout is not None:  # it is None if the user has closed it (>&-)
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):
            raise  # standard output is still open, so another pipe broke
        # Python flushes standard output again at exit. The null device replaces standard output, so that this flush succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def echo(text: str, file: TextIO | None = None) -> None:
    """Print the result of :func:`for_people` to ``file``. None (default) means standard output."""
    print(for_people(text), file=file or sys.stdout, flush=True)


class LogFilter(logging.Filter):
    """A logging filter that masks secrets and escapes control characters."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = for_people(record.getMessage()), None
        if record.exc_info:
            record.exc_text = for_people(logging.Formatter().formatException(record.exc_info))
        return True


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package. Its messages are masked in the logs of every program."""
    logger = logging.getLogger(name)
    _mask(logger)
    return logger


def mask_logs(handlers: Iterable[logging.Handler]) -> None:
    """Mask the messages of all loggers, also those of libraries, in the handlers of our own programs."""
    for handler in handlers:
        _mask(handler)


def _mask(place: logging.Filterer) -> None:
    if not any(isinstance(one, LogFilter) for one in place.filters):  # a process may run several commands
        place.addFilter(LogFilter())
