"""The worker processes of a DataLoader: signals to the process group do not end them, and their end is explained."""

import copy
import logging
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

from openclip_ext.machine import begin_worker

# Signals that torchrun, SLURM and a terminal send to the whole process group. The training process saves a checkpoint.
_TO_THE_GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
# Seconds until a worker whose sockets are closed has ended.
_LAST_BREATH = 2.0
# The patience with a worker is counted in so many parts.
_PARTS = 10
# It is so many times as long for the first batches, before which a shuffle reads ahead.
_FIRST_BATCHES_FACTOR = 6
_NO_SHARED_MEMORY = re.compile(r"\(shm\)|out of shared memory|unable to \w+ .*No space left on device")


class WorkerError(RuntimeError):
    """Workers end again and again, or have no memory to hand out a batch."""


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


class WorkerLost(RuntimeError):
    """A worker has ended too early; a new one can do its work."""


class WatchedBatches:
    """The batches of one pass over a DataLoader. A worker that does not answer is ended.

    Args:
        loader: The DataLoader, whose workers take turns.
        patience: Seconds to wait for a batch, and six times as long for the first of each worker; None: for ever.
    """

    def __init__(self, loader: DataLoader[Any], patience: float | None) -> None:
        self._patience = patience
        self._received = self._largest = 0
        self._stuck: str | None = None
        # Those of the pass before, which may have been killed since. torch has no public name for them.
        self._workers: list[Any] = getattr(getattr(loader, "_iterator", None), "_workers", [])
        with self._explained():
            self._batches = start_workers(loader)
        self._workers = getattr(self._batches, "_workers", [])

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            WorkerLost: A worker was killed.
            WorkerError: A worker did not answer, or has no shared memory for a batch.
        """
        while True:
            answered = threading.Event()
            if self._patience is not None and self._workers:
                patience = self._patience * (_FIRST_BATCHES_FACTOR if self._received < len(self._workers) else 1)
                threading.Thread(target=self._end_stuck, args=(answered, patience), daemon=True).start()
            try:
                with self._explained():
                    batch = next(self._batches)
            except StopIteration:
                return
            finally:
                answered.set()
            self._received += 1
            sizes = (value.nbytes for value in batch.values() if isinstance(value, Tensor))
            self._largest = max(self._largest, sum(sizes))
            yield batch

    def _end_stuck(self, answered: threading.Event, patience: float) -> None:
        """End the worker whose turn it is if it does not answer; the DataLoader notices.

        The time in which the whole run was stopped (SIGSTOP) counts as one part of the patience at most.
        """
        if any(answered.wait(patience / _PARTS) for _ in range(_PARTS)):
            return
        number = self._received % len(self._workers)
        self._stuck = f"data worker {number} (process {self._workers[number].pid}) did not answer for {patience:g} s"
        logging.error(f"{self._stuck}: it is ended.")
        self._workers[number].kill()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain torch's errors about the end of a worker."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:  # also from a dead worker's sockets
            if self._stuck is not None:
                raise WorkerError(
                    f"{self._stuck} (--rank-patience) and was ended. Look at the samples that it read (a file server that "
                    "hangs, an image or a caption without end); --resume latest goes on from the last checkpoint"
                ) from error
            ready = wait([worker.sentinel for worker in self._workers], timeout=_LAST_BREATH)
            for worker in self._workers:
                if worker.sentinel in ready:  # The kernel closes it some moments before the process has ended.
                    worker.join(timeout=_LAST_BREATH)
            ended = [worker for worker in self._workers if not worker.is_alive()]
            if _NO_SHARED_MEMORY.search(str(error)) or any(worker.exitcode == -signal.SIGBUS for worker in ended):
                free = shutil.disk_usage("/dev/shm").free / 2**20
                raise WorkerError(
                    f"the shared memory /dev/shm is too small: {free:,.0f} MiB are free, a batch takes "
                    f"{self._largest / 2**20:,.0f} MiB, and each worker holds two. Give it more (docker: --shm-size), or "
                    "lower --workers or --batch-size; --workers 0 needs none"
                ) from error
            if not ended:
                raise
            killed = any(worker.exitcode == -signal.SIGKILL for worker in ended)
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of KiB
            raise WorkerLost(
                f"data worker (process {', '.join(str(worker.pid) for worker in ended)}) "
                + ("was killed, as the kernel does where memory runs out" if killed else "ended")
                + f". The largest process that ended had {memory:.1f} GiB; fewer --workers take less"
            ) from error
