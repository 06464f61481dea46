"""DataLoader workers: protected from signals to the process group, with a clear error if one exits or does not answer."""

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

# Signals that torchrun, SLURM and a terminal send to the whole process group. The training process saves a checkpoint.
_TO_THE_GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
# The patience is waited for in so many parts.
_PARTS = 10
# Seconds until a worker whose sockets are closed has exited.
_EXIT_SECONDS = 2.0
# The patience is so many times as long for the first batches, which wait until the shuffle buffer is full.
_FIRST_BATCHES_FACTOR = 6
_NO_SHARED_MEMORY = re.compile(r"\(shm\)|out of shared memory|unable to \w+ .*No space left on device")


class WorkerError(RuntimeError):
    """A worker exited, did not answer in time, or had no memory for a batch."""


class _Flag:
    """What DataLoader uses of ``multiprocessing.Event``, without its lock, which a killed worker can hold for ever."""

    def __init__(self) -> None:
        self._value = multiprocessing.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return ``iter(loader)`` without letting a signal to the process group kill a worker that is just starting.

    A new worker inherits that signals are blocked until it has run :func:`leave_process_group`. Remove torch's handler for
    the end of a worker, which raises anywhere, even within an optimizer's step. The DataLoader notices at the next batch.
    """
    if loader.num_workers:
        loader.multiprocessing_context = copy.copy(multiprocessing.get_context())
        loader.multiprocessing_context.Event = _Flag
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_GROUP)
    child_handler = signal.getsignal(signal.SIGCHLD)
    if getattr(child_handler, "__module__", "").startswith("torch."):  # of a DataLoader that was started in another way
        child_handler = signal.SIG_DFL
    try:
        return iter(loader)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, child_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group(worker: int) -> None:
    """Keep signals to the process group from killing a worker (``worker_init_fn``, with :func:`start_workers`).

    The training process needs its workers until it has saved a checkpoint, and ends them itself.
    """
    os.setpgid(0, 0)
    begin_worker(worker)
    while pending := signal.sigpending() & _TO_THE_GROUP:
        signal.sigwait(pending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_GROUP)


def watched_batches(loader: DataLoader[Any], patience: float | None) -> Iterator[Any]:
    """Yield the batches of one pass over a DataLoader. On an error all workers are killed, as one may never exit.

    Args:
        loader: The DataLoader, whose workers take turns.
        patience: Seconds to wait for a batch, and six times as long for the first of each worker; None: for ever.

    Raises:
        WorkerError: A worker exited, did not answer, or has no shared memory for a batch.
    """
    received = largest = 0
    stuck: list[str] = []
    try:
        batches = start_workers(loader)
        while True:
            allowed = (
                None if patience is None else patience * (_FIRST_BATCHES_FACTOR if received < loader.num_workers else 1)
            )
            with _killed_after(allowed, loader, received, stuck):
                batch = next(batches, None)
            if batch is None:
                return
            received += 1
            largest = max(largest, sum(value.nbytes for value in batch.values() if isinstance(value, Tensor)))
            yield batch
    except GeneratorExit:
        raise
    except (RuntimeError, OSError, EOFError) as error:  # also from a dead worker's sockets
        reason = stuck[0] if stuck else _reason(error, _workers(loader), largest)
        kill_workers(loader)
        if reason is None:
            raise
        raise WorkerError(reason) from error
    except BaseException:
        kill_workers(loader)
        raise


@contextmanager
def _killed_after(seconds: float | None, loader: DataLoader[Any], turn: int, stuck: list[str]) -> Iterator[None]:
    """Kill the worker whose turn it is if the block takes longer: nothing else ends a wait for a process that is stopped.

    The time in which the whole run was stopped (SIGSTOP) counts as one part of the patience at most.
    """
    if seconds is None or not loader.num_workers:
        yield
        return
    answered = threading.Event()

    def kill() -> None:
        if not any(answered.wait(seconds / _PARTS) for _ in range(_PARTS)):
            number = turn % loader.num_workers
            worker = _workers(loader)[number]
            stuck.append(
                f"data worker {number} (process {worker.pid}) did not answer for {seconds:g} s (--rank-patience). Look at "
                "what it reads: a file server that hangs, an image or a caption without end"
            )
            worker.kill()

    threading.Thread(target=kill, daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _reason(error: Exception, workers: list[Any], largest: int) -> str | None:
    """Explain an error of torch about the exit of a worker; None if all are alive.

    Args:
        largest: Bytes of the largest batch so far.
    """
    ready = wait([worker.sentinel for worker in workers], timeout=_EXIT_SECONDS)
    for worker in workers:
        if worker.sentinel in ready:  # The kernel closes it some moments before the process has exited.
            worker.join(timeout=_EXIT_SECONDS)
    exited = [worker for worker in workers if not worker.is_alive()]
    if _NO_SHARED_MEMORY.search(str(error)) or any(worker.exitcode == -signal.SIGBUS for worker in exited):
        free = shutil.disk_usage("/dev/shm").free / 2**20
        return (
            f"the shared memory /dev/shm is too small: {free:,.0f} MiB are free, a batch takes {largest / 2**20:,.0f} MiB, "
            "and each worker holds two. Give it more (docker: --shm-size), or lower --workers or --batch-size; "
            "--workers 0 needs none"
        )
    if not exited:
        return None
    killed = any(worker.exitcode == -signal.SIGKILL for worker in exited)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of KiB
    return (
        f"data worker (process {', '.join(str(worker.pid) for worker in exited)}) "
        + ("was killed, as the kernel does when memory runs out" if killed else "exited")
        + f". The largest process that exited had {memory:.1f} GiB; fewer --workers take less"
    )


def kill_workers(loader: DataLoader[Any]) -> None:
    """Kill the persistent workers of a DataLoader: Python waits for them at its exit, and a stopped one ignores SIGTERM."""
    for worker in _workers(loader):
        worker.kill()


def _workers(loader: DataLoader[Any]) -> list[Any]:
    """Return the worker processes of a DataLoader with persistent workers, for which torch has no public name."""
    return getattr(getattr(loader, "_iterator", None), "_workers", [])
