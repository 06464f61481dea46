"""Signals to the process group do not end the workers of a DataLoader."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

# What torchrun, SLURM and a terminal send to the whole process group; the training process answers with a checkpoint.
_TO_THE_GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``; a signal to the process group meanwhile does not kill a worker.

    A new worker is in the group until it ran :func:`leave_process_group`. It inherits that signals are held until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_GROUP)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group(worker: int) -> None:
    """Keep signals to the process group from killing a worker (``worker_init_fn``, with :func:`start_workers`).

    The training process needs its workers for the steps until it has saved a checkpoint. It ends them itself, and they
    end by themselves when it is gone. Python collects their garbage, whatever the training process has it do with its own.
    """
    gc.enable()
    os.setpgid(0, 0)
    while pending := signal.sigpending() & _TO_THE_GROUP:
        signal.sigwait(pending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_GROUP)
