"""What this process may use of the machine, and for how long."""

import os
import signal
import threading
from multiprocessing import parent_process


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """End this process, which multiprocessing has started, when the one that asked for it has ended, also by SIGKILL."""
    parent = parent_process()
    assert parent is not None, "called in a worker"

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
