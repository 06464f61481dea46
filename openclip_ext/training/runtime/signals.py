"""Requests by signal: SIGUSR1 saves a checkpoint. SIGTERM, SIGINT and SIGHUP save a checkpoint and end the run."""

import ctypes
import enum
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.data.loader.train_loader import Interrupted

logger = get_logger(__name__)


class Request(enum.IntEnum):
    """The kind of a request. If ranks have different requests, the largest value counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


# Exit statuses that shells use for a program that was stopped by a signal.
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
    """Make Linux send SIGTERM to this process when its parent torchrun dies.

    Otherwise, the process could run at the same time as the restarted run. If the parent is not torchrun, do nothing, because
    the process may have to outlive its parent (``nohup``).
    """
    if sys.platform == "linux" and _is_under_torchrun():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SignalRequests:
    """A context manager that stores signals until the end of the step, when all ranks act on them together.

    A signal may reach only one rank. The other ranks receive it in :meth:`poll_ranks`. A second Ctrl-C ends the run
    immediately, except under torchrun: there, the terminal and torchrun both send each Ctrl-C. ``exit_status`` is the
    shell's exit status for the signal, or SIGTERM's exit status if only another rank received the signal. In other threads
    than the main thread, Python cannot handle signals, so signals are not stored.
    """

    def __init__(self) -> None:
        self._request = Request.NOTHING
        self._asked: Callable[[], int] = _nothing
        self._previous: dict[int, Any] = {}
        self._is_interruptible = False
        self.exit_status = EXIT_AFTER_SIGTERM

    def __enter__(self) -> "SignalRequests":
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Signals do not save a checkpoint, because this training does not run in the process's main thread."
            )
            return self
        for number in _REQUESTS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # started with nohup
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
        """Inside the ``with`` block, in which the run waits for a batch, raise ``Interrupted`` if a signal requests a stop.

        The batch may never arrive, so the request is not delayed until the end of the step.
        """
        self._is_interruptible = True
        try:
            if self._request == Request.SAVE_AND_STOP:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False

    def poll_ranks(self, now: bool = False) -> Request:
        """Return the largest request of all ranks at the previous call, or with ``now`` also at this call. Collective.

        The result is delayed by one call so that no step waits for the host of the slowest rank.
        """
        known = self._request
        earlier, self._asked = self._asked, distributed.any_rank_soon(int(known))
        if self._request == known:  # else a new signal has arrived, and the next call handles it
            self._request = Request.NOTHING
        request = earlier()
        if now or distributed.world_size() == 1:
            request, self._asked = max(request, self._asked()), _nothing
        return Request(request)


def _nothing() -> int:
    return Request.NOTHING
