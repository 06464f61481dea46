"""CPU cores of this process, and the setup of worker processes."""

import gc
import multiprocessing
import os
import signal
import threading
from multiprocessing import parent_process

from openclip_ext.cli.errors import UsageError


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_main_program(workers: int) -> None:
    """Raise UsageError if ``workers`` processes would each run the main program again, because its code has no guard.

    multiprocessing imports the main program into a new process, unless it forks. The run would wait forever for a worker that
    fails in this import, so a process that does nothing is tried first.
    """
    # The first method is the default, which allow_none leaves unset.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if workers == 0 or method == "fork":
        return
    trial = multiprocessing.Process(target=_do_nothing)
    try:
        trial.start()
        trial.join()
    except (OSError, EOFError):  # the server that forks processes failed in the import
        pass
    if trial.exitcode != 0:
        raise UsageError(
            'a new process runs the main program again: put its code below if __name__ == "__main__":, or set --workers 0'
        )


def _do_nothing() -> None:
    """Do nothing, in a new process."""


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
