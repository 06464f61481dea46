"""CPU cores of this process, and the setup of worker processes."""

import gc
import os
import signal
import threading
from multiprocessing import parent_process


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin_worker(worker: int = 0) -> None:
    """Set up a process that multiprocessing has started, such as a DataLoader worker.

    The process will exit when its parent exits, even if SIGKILL kills the parent. Garbage collection is enabled, but not for
    objects copied by a fork: the destructor of a copied process group would wait for threads that a fork does not copy.
    """
    gc.freeze()
    gc.enable()
    parent = parent_process()
    assert parent is not None, "begin_worker is only for processes that multiprocessing has started"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
