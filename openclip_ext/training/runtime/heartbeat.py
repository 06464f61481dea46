"""Detect and report a stopped rank, so that the remaining ranks do not block silently in a collective for hours."""

import concurrent.futures
import contextlib
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from openclip_ext import distributed
from openclip_ext.data.remote import in_background

INTERVAL = 5.0  # seconds between two heartbeats of a rank, if the timeout is at least twice as long
EXIT_STATUS = 1
_LEFT = b"left"


@contextmanager
def watched(patience: float | None) -> Iterator[None]:
    """Send this rank's heartbeats, even while it evaluates or saves for hours, and watch the heartbeats of other ranks.

    If another rank sends no heartbeat for ``patience`` seconds (None means no limit), this rank logs the other rank's name
    and exits. It kills its own process, because an exception cannot end a blocked collective. Collective: all ranks call it.
    """
    if patience is None or distributed.world_size() == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):  # use a separate connection, because the process group's connection may block
        store = store.clone()
    # A healthy rank's heartbeat may arrive shortly after this rank's next one, so the timeout has at least two intervals.
    interval = min(INTERVAL, patience / 2)
    heartbeat = _Heartbeat(store, round(patience / interval))
    ended = threading.Event()

    def beat() -> None:
        # A RuntimeError means that the store's process (rank 0 or torchrun) has ended. Collectives then fail by themselves.
        with contextlib.suppress(RuntimeError):
            while not ended.wait(interval):
                if missing := heartbeat.beat():
                    logging.critical(
                        f"No heartbeat for {patience:g} s from {', '.join(missing)}. Rank {distributed.rank()} exits; "
                        "--resume latest continues from the last checkpoint."
                    )
                    logging.shutdown()
                    os._exit(EXIT_STATUS)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        heartbeat.leave()


class _Heartbeat:
    """A sender of heartbeats. It counts this rank's heartbeats since the last heartbeat of each other rank.

    The timeout is counted in this rank's heartbeats, so that no rank counts as missing after all ranks were paused together.
    The store is read and written in the background, because a store whose process is stopped never answers.
    """

    def __init__(self, store: Any, patience: int) -> None:
        self._store, self._patience, self._beats, self._unanswered = store, patience, 0, 0
        rank = distributed.rank()
        self._own_key = _key(rank)
        store.set(self._own_key, b"0")
        # After this collective, the store contains a heartbeat of every rank.
        self._names = distributed.all_gather_object(f"rank {rank} (process {os.getpid()} on {platform.node()})")
        self._seen = [b""] * len(self._names)
        self._since = [0] * len(self._names)
        self._answer = in_background(self._exchange)

    def beat(self) -> list[str]:
        """Send one heartbeat. Return the names of the ranks whose heartbeats are missing."""
        if not self._answer.done():
            self._unanswered += 1
            # If torchrun serves the store, a stopped torchrun does not stop the ranks.
            is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return [] if is_torchruns or self._unanswered < self._patience else self._names[:1]
        latest, self._unanswered = self._answer.result(), 0
        self._beats += 1
        self._answer = in_background(self._exchange)
        return [name for rank, name in enumerate(self._names) if self._is_missing(rank, latest[rank])]

    def _exchange(self) -> list[bytes]:
        self._store.set(self._own_key, str(self._beats))
        return [self._store.get(_key(rank)) for rank in range(len(self._names))]

    def _is_missing(self, rank: int, last: bytes) -> bool:
        self._since[rank] = self._since[rank] + 1 if last == self._seen[rank] else 0
        self._seen[rank] = last
        return last != _LEFT and self._since[rank] >= self._patience

    def leave(self) -> None:
        """Inform the other ranks that this rank sends no more heartbeats."""
        concurrent.futures.wait([self._answer], timeout=INTERVAL)
        if self._answer.done():
            with contextlib.suppress(RuntimeError):  # the store's process may have ended
                self._store.set(self._own_key, _LEFT)


def _key(rank: int) -> str:
    return f"openclip_ext/beat/{rank}"
