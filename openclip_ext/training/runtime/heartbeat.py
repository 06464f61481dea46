"""Notice a rank that has stopped, and say which: the others would wait for it in a collective, for hours, without a word."""

import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from openclip_ext import distributed

# Seconds between two beats.
INTERVAL = 5.0
EXIT_STATUS = 1
_LEFT = b"left"


@contextmanager
def watched(patience: float | None) -> Iterator[None]:
    """Let each rank beat, also while it evaluates or saves for hours, and watch the others.

    A rank that does not beat for ``patience`` seconds (None: watch nobody) is stopped, or its node is gone. Whoever notices
    names it in the log and ends its process: it may be inside a collective, out of which no exception leads.
    """
    if patience is None or distributed.world_size() == 1:
        yield
        return
    heartbeat = _Heartbeat(_store(), distributed.rank(), distributed.world_size(), max(1, round(patience / INTERVAL)))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(INTERVAL):
            try:
                missing = heartbeat.beat()
            except RuntimeError:
                return  # the store is gone, and with it the master or its torchrun: the collectives fail by themselves
            if missing:
                _end(missing, patience)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        heartbeat.leave()


class _Heartbeat:
    """This rank's beats, and how many of its own ago it saw each other rank's last one.

    Counting own beats instead of seconds, a run of which all ranks were stopped for a while finds nobody missing.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: int) -> None:
        self._store, self._rank, self._world_size, self._patience = store, rank, world_size, patience
        self._beats = 0
        self._seen: dict[int, bytes] = {}
        self._since = dict.fromkeys(range(world_size), 0)
        store.set(self._key(rank, "name"), f"rank {rank} (process {os.getpid()} on {platform.node()})")
        store.set(self._key(rank), b"0")

    def beat(self) -> list[str]:
        """Beat once; returns the names of the ranks that are missing."""
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats))
        return [self._name(rank) for rank in range(self._world_size) if rank != self._rank and self._is_missing(rank)]

    def _is_missing(self, rank: int) -> bool:
        key = self._key(rank)
        last = self._store.get(key) if self._store.check([key]) else b""
        self._since[rank] = self._since[rank] + 1 if last == self._seen.get(rank) else 0
        self._seen[rank] = last
        return last != _LEFT and self._since[rank] >= self._patience

    def _name(self, rank: int) -> str:
        key = self._key(rank, "name")
        return self._store.get(key).decode() if self._store.check([key]) else f"rank {rank}, which never began"

    def leave(self) -> None:
        """Tell the others not to wait for beats any more."""
        try:
            self._store.set(self._key(self._rank), _LEFT)
        except RuntimeError:
            logging.debug("The store was gone at the end of the run.")

    @staticmethod
    def _key(rank: int, kind: str = "beat") -> str:
        return f"openclip_ext/{kind}/{rank}"


def _store() -> Any:
    """Return a connection of our own to the store of the process group: the group's may wait in it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _end(missing: list[str], patience: float) -> None:
    logging.critical(
        f"Not heard of for {patience:g} s: {', '.join(missing)}. Rank {distributed.rank()} ends; --resume latest goes on from "
        "the last checkpoint."
    )
    logging.shutdown()
    os._exit(EXIT_STATUS)
