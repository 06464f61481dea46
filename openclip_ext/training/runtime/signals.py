"""Requests by signal: SIGUSR1 for a checkpoint; SIGTERM, SIGINT and SIGHUP for a checkpoint and the end of the run."""

import ctypes
import enum
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from openclip_ext import distributed
from openclip_ext.data.loader.train_loader import Interrupted


class Request(enum.IntEnum):
    """What was requested; the larger wins if ranks disagree."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


# The conventional exit status of a program that a signal has stopped.
EXIT_AFTER_SIGTERM = 128 + signal.SIGTERM
EXIT_AFTER_SIGINT = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REQUESTS = {
    signal.SIGUSR1: Request.SAVE,
    signal.SIGTERM: Request.SAVE_AND_STOP,
    signal.SIGINT: Request.SAVE_AND_STOP,
    signal.SIGHUP: Request.SAVE_AND_STOP,
}


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """Ask Linux to send this process SIGTERM when torchrun, its parent, dies, so that it never runs next to a restarted run.

    A process with another parent may outlive it (``nohup``).
    """
    if sys.platform == "linux" and _is_under_torchrun():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SignalRequests:
    """Signals, remembered until the end of the step, when all ranks act on them together. A context manager.

    A signal may reach one rank only; the others receive it in :meth:`poll_ranks`. A second Ctrl-C ends the run at once, but
    not under torchrun, which forwards the first one. ``exit_status`` is the shell's for the signal, and SIGTERM's if
    another rank received it.
    """

    def __init__(self) -> None:
        self._request = Request.NOTHING
        self._asked: Callable[[], int] = _nothing
        self._previous: dict[int, Any] = {}
        self._is_interruptible = False
        self.exit_status = EXIT_AFTER_SIGTERM

    def __enter__(self) -> "SignalRequests":
        for number in _REQUESTS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        request = _REQUESTS[signal.Signals(number)]
        if number == signal.SIGINT:
            if self._request == Request.SAVE_AND_STOP and not _is_under_torchrun():
                raise KeyboardInterrupt
            self.exit_status = EXIT_AFTER_SIGINT
        self._request = max(self._request, request)
        if self._is_interruptible and request == Request.SAVE_AND_STOP:
            self._is_interruptible = False
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a request to stop raise ``Interrupted`` while the run waits for a batch, which may never come."""
        self._is_interruptible = True
        try:
            if self._request == Request.SAVE_AND_STOP:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False

    def poll_ranks(self, now: bool = False) -> Request:
        """Return the strongest request of any rank up to the last call, or with ``now`` up to this one. Collective.

        This way no step waits for the slowest rank's host.
        """
        known = self._request
        earlier, self._asked = self._asked, distributed.any_rank_soon(int(known))
        if self._request == known:  # else a signal came meanwhile: it is for the next call
            self._request = Request.NOTHING
        request = earlier()
        if now or distributed.world_size() == 1:
            request, self._asked = max(request, self._asked()), _nothing
        return Request(request)


def _nothing() -> int:
    return Request.NOTHING
