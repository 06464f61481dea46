"""Requests from outside: SIGUSR1 asks for a checkpoint, SIGTERM, SIGINT and SIGHUP for a checkpoint and the end of the run."""

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
    """What was asked for; the larger wins where ranks disagree."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


# The conventional exit status of a program that a signal has ended.
EXIT_AFTER_SIGTERM = 128 + signal.SIGTERM
EXIT_AFTER_SIGINT = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """Ask the kernel to send this process SIGTERM when torchrun, its parent, dies: it saves and ends then.

    Otherwise the trainers of a torchrun that was killed outright would go on beside a restarted run. Linux only. Started in
    another way a process may outlive its parent (``nohup``), and does.
    """
    if sys.platform == "linux" and _under_torchrun():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SignalRequests:
    """Remembers signals until the end of the step, where all ranks act on them together.

    SLURM sends its signal to every process, torchrun hands SIGTERM on to its workers; where only one rank hears it, the
    others learn of it in ``agreed``. Use as a context manager: the previous handlers come back at the end.

    A second Ctrl-C ends the run at once; not under torchrun, which hands the first one on once more. ``exit_status`` is the
    shell's for the signal, and SIGTERM's where another rank heard it.
    """

    def __init__(self) -> None:
        self._request = Request.NOTHING
        self._asked: Callable[[], int] = _nothing
        self._previous: dict[int, Any] = {}
        self._is_interruptible = False
        self.exit_status = EXIT_AFTER_SIGTERM

    def __enter__(self) -> "SignalRequests":
        requests = {
            signal.SIGUSR1: Request.SAVE,
            signal.SIGTERM: Request.SAVE_AND_STOP,
            signal.SIGINT: Request.SAVE_AND_STOP,
            signal.SIGHUP: Request.SAVE_AND_STOP,
        }
        for number, request in requests.items():
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._previous[number] = signal.signal(number, self._handler(request))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handler(self, request: Request) -> Callable[[int, FrameType | None], None]:
        def remember(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT:
                if self._request == Request.SAVE_AND_STOP and not _under_torchrun():
                    raise KeyboardInterrupt
                self.exit_status = EXIT_AFTER_SIGINT
            self._request = max(self._request, request)
            if self._is_interruptible and request == Request.SAVE_AND_STOP:
                self._is_interruptible = False
                raise Interrupted

        return remember

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a request to stop raise ``Interrupted`` in here: a batch for which the run waits may never come."""
        self._is_interruptible = True
        try:
            if self._request == Request.SAVE_AND_STOP:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False

    def agreed(self, now: bool = False) -> Request:
        """Return the strongest request any rank had heard by the last call, with ``now`` by this one; call it on all ranks.

        So no step waits until the slowest rank's host has come to its end. A single process has no one to wait for.
        """
        told = self._request
        earlier, self._asked = self._asked, distributed.any_rank_soon(int(told))
        if self._request == told:  # else a signal came meanwhile: it is for the next call
            self._request = Request.NOTHING
        request = earlier()
        if now or distributed.world_size() == 1:
            request, self._asked = max(request, self._asked()), _nothing
        return Request(request)


def _nothing() -> int:
    return Request.NOTHING
