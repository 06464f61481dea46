"""What this process may use of the machine, and for how long."""

import gc
import os
import signal
import threading
from multiprocessing import parent_process


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin_worker(worker: int = 0) -> None:
    """Prepare this process, which multiprocessing has started (a DataLoader's ``worker_init_fn``).

    It ends when the process that asked for it has ended, also by SIGKILL. It collects its own garbage, even if that process
    has turned this off for itself, and none of what a fork has copied: destroying the copy of a process group would wait for
    threads that were not copied.
    """
    gc.freeze()
    gc.enable()
    parent = parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
