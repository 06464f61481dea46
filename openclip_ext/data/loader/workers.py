"""Protect DataLoader workers from signals to the process group, and explain why a worker exited or did not answer."""

import atexit
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from openclip_ext.data.processes import begin_worker

# A timeout consists of this many intervals. While the run is stopped (SIGSTOP), only one of them can pass.
_INTERVALS = 10
_EXIT_SECONDS = 2.0  # timeout for the exit of a worker whose sockets are closed
# Timeout factor for the first batch of each worker, which waits until the shuffle buffer is full.
_FIRST_FACTOR = 6
_NO_SHARED_MEMORY = re.compile(r"\(shm\)|out of shared memory|unable to \w+ .*No space left on device")
_EXIT_ERRORS = (RuntimeError, OSError, EOFError)  # raised by torch, or by a socket of a dead worker
_started: WeakSet[Any] = WeakSet()  # the workers of all loaders in this process


class WorkerError(RuntimeError):
    """A worker exited, did not answer in time, or had no shared memory for a batch."""


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, but remove torch's signal handler, because it may raise within an optimizer step.

    Without this handler, the DataLoader detects the exit of a worker at the next batch.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    if loader.num_workers and threading.current_thread() is threading.main_thread():
        is_torchs = getattr(handler, "__module__", "").startswith("torch.")  # set by another DataLoader
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs else handler)
    _started.update(_workers(batches))
    return batches


@atexit.register
def _kill_all() -> None:
    """Kill all workers at exit, because Python waits for them, and SIGTERM does not end a stopped or hanging worker."""
    for worker in [*_started]:
        if worker._parent_pid == os.getpid() and worker.is_alive():
            worker.kill()


def leave_process_group(worker: int) -> None:
    """Protect a worker from signals to the process group, for ``worker_init_fn``.

    torchrun, SLURM and a terminal send such signals, and the training process needs its workers until it has saved.
    """
    os.setpgid(0, 0)
    begin_worker(worker)


def watched_batches(loader: DataLoader[Any], patience: float | None) -> Iterator[Any]:
    """Yield the batches of one pass over a DataLoader. On an error, kill all workers, which may never exit otherwise.

    ``patience`` is the timeout for a batch in seconds; None means no timeout. It is six times as long for the first batch of
    each worker.

    Raises:
        WorkerError: A worker exited, did not answer, or has no shared memory for a batch.
    """
    received, workers = 0, _workers(getattr(loader, "_iterator", None))  # workers of an earlier pass, if any
    watchdog = _Watchdog(patience)
    try:
        with watchdog.limit(workers, _FIRST_FACTOR):
            batches = start_workers(loader)
        workers = _workers(batches)
        while True:
            with watchdog.limit(workers, _FIRST_FACTOR if received < len(workers) else 1):
                batch = next(batches, None)
            if batch is None:
                return
            received += 1
            yield batch
    except GeneratorExit:
        raise
    except BaseException as error:
        reason = _reason(error, workers)
        for worker in workers:
            worker.kill()
        if reason is None:
            raise
        raise WorkerError(reason) from error
    finally:
        watchdog.ended.set()


class _Watchdog:
    """A thread that kills the workers if a wait for them takes too long. It starts with the first wait.

    DataLoader's own timeout does not end a wait for a stopped process. All workers are killed, because DataLoader may wait
    for any of them.
    """

    def __init__(self, patience: float | None) -> None:
        self.ended = threading.Event()
        self._patience = patience
        self._wait: _Wait | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @contextmanager
    def limit(self, workers: list[Any], factor: int) -> Iterator[None]:
        """Kill all workers and raise WorkerError if the block takes longer than ``factor`` times the patience."""
        if self._patience is None or not workers:
            yield
            return
        wait = self._wait = _Wait(workers, factor * _INTERVALS)
        if self._thread.ident is None:
            self._thread.start()
        try:
            yield
        except _EXIT_ERRORS as error:
            if not wait.is_late:
                raise
            raise WorkerError(
                f"a data worker (process {' or '.join(str(worker.pid) for worker in workers)}) did not answer for "
                f"{factor * self._patience:g} s (--rank-patience). Check what it reads: the file server may hang, or an image "
                "or caption may be huge"
            ) from error
        finally:
            self._wait = None

    def _watch(self) -> None:
        assert self._patience is not None, "without a limit, the thread does not start"
        while not self.ended.wait(self._patience / _INTERVALS):
            if (wait := self._wait) is not None:
                wait.intervals_left -= 1
                wait.is_late = wait.intervals_left < 0
                for worker in wait.workers if wait.is_late else ():
                    worker.kill()


@dataclass
class _Wait:
    """A wait for a batch of workers."""

    workers: list[Any]
    intervals_left: int
    is_late: bool = False


def _reason(error: BaseException, workers: list[Any]) -> str | None:
    """Explain torch's error about a worker; return None if the error has another cause, or explains itself."""
    if isinstance(error, WorkerError) or not isinstance(error, _EXIT_ERRORS):
        return None
    ready = wait([worker.sentinel for worker in workers], timeout=_EXIT_SECONDS)
    for worker in workers:
        if worker.sentinel in ready:  # the sentinel closes shortly before the process exits
            worker.join(timeout=_EXIT_SECONDS)
    exited = {worker.pid: worker.exitcode for worker in workers if not worker.is_alive()}
    if _NO_SHARED_MEMORY.search(str(error)) or -signal.SIGBUS in exited.values():
        return (
            "the shared memory /dev/shm is too small: each worker stores two batches there. Increase it (docker: "
            "--shm-size), or lower --workers or --batch-size; --workers 0 needs no shared memory"
        )
    if not exited:
        return None
    is_killed = -signal.SIGKILL in exited.values()
    return f"data worker (process {', '.join(map(str, exited))}) " + (
        "was killed, probably because memory ran out; fewer --workers need less memory" if is_killed else "exited"
    )


def _workers(iterator: Any) -> list[Any]:
    # torch has no public attribute for its workers.
    return getattr(iterator, "_workers", [])
