"""Execute several runs in parallel, each in its own process. There is one process per GPU or core.

Processes start fast, because they are forked from a server that has imported all modules. The failure of a
run does not stop the other runs.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from openclip_ext.data.processes import available_cores

_POLL_SECONDS = 0.3
# This module imports all modules of a run.
_PRELOADED = "openclip_ext.compare.trial"
# A process calls ``task(device, seen)``. After each step, the task calls ``seen`` with the number of samples of the step.
Task = Callable[[torch.device, Callable[[int], None]], dict[str, Any]]
Ended = Callable[[str, dict[str, Any] | None, str], None]


class _Running(NamedTuple):
    process: Any
    connection: Connection
    slot: int


class ProcessPool:
    """A pool of processes on this machine. They are forked from a server process that has imported ``_PRELOADED``.

    Attributes:
        processes: Maximum number of tasks at a time.
        device: Where the tasks run. A CUDA device without an index means that the tasks are spread over all GPUs.
        samples: Number of samples that all tasks have processed so far.
    """

    def __init__(self, processes: int, device: torch.device) -> None:
        self.processes, self.device, self.samples = processes, device, 0
        self._running: dict[str, _Running] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOADED])

    def work_off(
        self,
        pending: Callable[[], Mapping[str, Task]],
        on_end: Ended,
        keep_going: Callable[[], bool] = lambda: True,
        on_start: Callable[[str, int], None] = lambda name, pid: None,
    ) -> bool:
        """Execute all tasks and return True. As soon as ``keep_going`` returns False, kill the running tasks and return False.

        Args:
            pending: Returns, by name, the tasks that can start and have not ended, the most urgent first.
            on_end: Called with name, result and failure of each task. The result is None after a failure.
            keep_going: Returns whether to continue. It is called several times per second.
            on_start: Called with the name and the process id of each task that starts.
        """
        try:
            while keep_going():
                for name, task in pending().items():
                    if len(self._running) < self.processes and name not in self._running:
                        on_start(name, self._start(name, task))
                if not self._running:
                    return True
                wait([entry.connection for entry in self._running.values()], _POLL_SECONDS)
                for name, entry in list(self._running.items()):
                    if (ended := self._read(entry)) is not None:
                        self._end(name)
                        on_end(name, *ended)
            return False
        finally:
            for name in list(self._running):
                self._end(name)

    def _start(self, name: str, task: Task) -> int:
        taken = {entry.slot for entry in self._running.values()}
        slot = next(slot for slot in range(self.processes) if slot not in taken)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(sender, self._device_of(slot), self.processes, task))
        process.start()
        sender.close()
        self._running[name] = _Running(process, receiver, slot)
        return process.pid or 0

    def _device_of(self, slot: int) -> torch.device:
        if self.device.type == "cuda" and self.device.index is None:
            return torch.device("cuda", slot % torch.cuda.device_count())
        return self.device

    def _end(self, name: str) -> None:
        process = self._running.pop(name).process
        process.kill()
        process.join()

    def _read(self, entry: _Running) -> tuple[dict[str, Any] | None, str] | None:
        """Read a task's messages. If the task has ended, return its result and failure, else None."""
        try:
            while entry.connection.poll():
                message = entry.connection.recv()
                if isinstance(message, tuple):
                    return message
                self.samples += message
        except (EOFError, OSError):  # OSError means that the process ended while it was sending a message
            entry.process.join()
            return None, _exit_reason(entry.process.exitcode)
        return None


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"its process ended with exit status {status}"
    name = signal.Signals(-status).name
    reason = " (is memory full? Give fewer --processes or a smaller --batch-size)" if name == "SIGKILL" else ""
    return f"killed by {name}{reason}"


def _work(sender: Connection, device: torch.device, processes: int, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the main process handles Ctrl-C
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # else torch has read the number of threads from it
        torch.set_num_threads(max(1, available_cores() // processes))
    ended: tuple[dict[str, Any] | None, str]
    try:
        ended = task(device, sender.send), ""
    except Exception as error:
        known = isinstance(error, ValueError | FileNotFoundError) and str(error).strip()
        ended = None, known or traceback.format_exc()
    with contextlib.suppress(OSError):  # the main process may have ended
        sender.send(ended)
