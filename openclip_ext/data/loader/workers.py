"""Protect DataLoader workers from signals to the process group, and explain why a worker exited or did not answer."""

import copy
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from openclip_ext.data.processes import begin_worker

# Signals that torchrun, SLURM and a terminal send to the process group. The training process needs its workers until it has
# saved a checkpoint.
_GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
# A timeout consists of this many waits. If the run is stopped (SIGSTOP), only one wait passes, and not the whole timeout.
_INTERVALS = 10
_EXIT_SECONDS = 2.0  # timeout for the exit of a worker whose sockets are closed
# Timeout factor for the first batch of each worker, which waits until the shuffle buffer is full.
_FIRST_BATCHES_FACTOR = 6
_NO_SHARED_MEMORY = re.compile(r"\(shm\)|out of shared memory|unable to \w+ .*No space left on device")


class WorkerError(RuntimeError):
    """A worker exited, did not answer in time, or had no shared memory for a batch."""


class _Flag:
    """The part of ``multiprocessing.Event`` that DataLoader uses, without a lock that a killed worker would not release."""

    def __init__(self) -> None:
        self._value = multiprocessing.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, and protect new workers from signals to the process group.

    The signals stay blocked in a new worker until it runs :func:`leave_process_group`. Torch's signal handler for worker
    exits is removed, because it may raise within an optimizer step. The DataLoader detects the exit at the next batch.
    """
    if loader.num_workers:
        loader.multiprocessing_context = copy.copy(multiprocessing.get_context())
        loader.multiprocessing_context.Event = _Flag
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    child_handler = signal.getsignal(signal.SIGCHLD)
    if getattr(child_handler, "__module__", "").startswith("torch."):  # from another DataLoader
        child_handler = signal.SIG_DFL
    try:
        return iter(loader)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, child_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group(worker: int) -> None:
    """Protect a worker from signals to the process group. Use it as ``worker_init_fn``, with :func:`start_workers`."""
    os.setpgid(0, 0)
    begin_worker(worker)
    while pending := signal.sigpending() & _GROUP_SIGNALS:
        signal.sigwait(pending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def watched_batches(loader: DataLoader[Any], patience: float | None) -> Iterator[Any]:
    """Yield the batches of one pass over a DataLoader. On an error, kill all workers, because a worker may never exit.

    ``patience`` is the timeout for a batch in seconds. For the first batch of each worker it is six times as long.

    Raises:
        WorkerError: A worker exited, did not answer, or has no shared memory for a batch.
    """
    received = largest = 0
    stuck: list[str] = []
    try:
        batches = start_workers(loader)
        while True:
            factor = _FIRST_BATCHES_FACTOR if received < loader.num_workers else 1
            with _kill_unresponsive(None if patience is None else patience * factor, loader, received, stuck):
                batch = next(batches, None)
            if batch is None:
                return
            received += 1
            largest = max(largest, sum(value.nbytes for value in batch.values() if isinstance(value, Tensor)))
            yield batch
    except GeneratorExit:
        raise
    except (RuntimeError, OSError, EOFError) as error:  # a dead worker's sockets raise these, too
        reason = stuck[0] if stuck else _reason(error, _workers(loader), largest)
        kill_workers(loader)
        if reason is None:
            raise
        raise WorkerError(reason) from error
    except BaseException:
        kill_workers(loader)
        raise


@contextmanager
def _kill_unresponsive(seconds: float | None, loader: DataLoader[Any], turn: int, stuck: list[str]) -> Iterator[None]:
    """Kill the worker that makes batch ``turn`` if the block takes longer. A wait for a stopped process would never end."""
    if seconds is None or not loader.num_workers:
        yield
        return
    answered = threading.Event()

    def kill() -> None:
        if not any(answered.wait(seconds / _INTERVALS) for _ in range(_INTERVALS)):
            number = turn % loader.num_workers
            worker = _workers(loader)[number]
            stuck.append(
                f"data worker {number} (process {worker.pid}) did not answer for {seconds:g} s (--rank-patience). Check "
                "what it reads: the file server may hang, or an image or caption may be huge"
            )
            worker.kill()

    threading.Thread(target=kill, daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _reason(error: Exception, workers: list[Any], largest: int) -> str | None:
    """Explain torch's error about a worker; return None if no worker exited. ``largest``: bytes of the largest batch."""
    ready = wait([worker.sentinel for worker in workers], timeout=_EXIT_SECONDS)
    for worker in workers:
        if worker.sentinel in ready:  # the sentinel closes shortly before the process exits
            worker.join(timeout=_EXIT_SECONDS)
    exited = [worker for worker in workers if not worker.is_alive()]
    if _NO_SHARED_MEMORY.search(str(error)) or any(worker.exitcode == -signal.SIGBUS for worker in exited):
        free = shutil.disk_usage("/dev/shm").free / 2**20
        return (
            f"the shared memory /dev/shm is too small: {free:,.0f} MiB are free, a batch takes {largest / 2**20:,.0f} MiB, "
            "and each worker holds two. Increase it (docker: --shm-size), or lower --workers or --batch-size; --workers 0 "
            "needs no shared memory"
        )
    if not exited:
        return None
    killed = any(worker.exitcode == -signal.SIGKILL for worker in exited)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of KiB
    return (
        f"data worker (process {', '.join(str(worker.pid) for worker in exited)}) "
        + ("was killed, probably because memory ran out" if killed else "exited")
        + f". The largest exited process used {memory:.1f} GiB; fewer --workers need less memory"
    )


def kill_workers(loader: DataLoader[Any]) -> None:
    """Kill the persistent workers of a DataLoader. At exit, Python waits for workers, and a stopped one ignores SIGTERM."""
    for worker in _workers(loader):
        worker.kill()


def _workers(loader: DataLoader[Any]) -> list[Any]:
    # torch has no public attribute for its workers.
    return getattr(getattr(loader, "_iterator", None), "_workers", [])
