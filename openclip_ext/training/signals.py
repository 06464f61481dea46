"""Requests from outside: SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end of the run."""

import enum
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from openclip_ext import distributed


class Request(enum.IntEnum):
    """What was asked for; the larger wins where ranks disagree."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class SignalRequests:
    """Remembers signals until the end of the step, where all ranks act on them together.

    SLURM sends its signal to every process, torchrun hands SIGTERM on to its workers; where only one rank hears it, the
    others learn of it in ``agreed``. Use as a context manager: the previous handlers come back at the end.
    """

    def __init__(self) -> None:
        self._request = Request.NOTHING
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "SignalRequests":
        for number, request in ((signal.SIGUSR1, Request.SAVE), (signal.SIGTERM, Request.SAVE_AND_STOP)):
            self._previous[number] = signal.signal(number, self._handler(request))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handler(self, request: Request) -> Callable[[int, FrameType | None], None]:
        def remember(number: int, frame: FrameType | None) -> None:
            self._request = max(self._request, request)

        return remember

    def agreed(self) -> Request:
        """The strongest request that any rank has heard since the last call; call it on all ranks."""
        request = Request(distributed.any_rank(int(self._request)))
        self._request = Request.NOTHING
        return request
