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
    """Set up this process, which multiprocessing has started (a DataLoader's ``worker_init_fn``).

    It exits when its parent has exited, also after SIGKILL. It collects its own garbage, even if the parent does not, and no
    objects inherited from a fork: destroying the copy of a process group would wait for threads that were not copied.
    """
    gc.freeze()
    gc.enable()
    parent = parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
