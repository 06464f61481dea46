"""Execute several runs in parallel, each in its own process. There is one process per GPU or core.

Processes start fast, because they are forked from a server that has imported all modules. The failure of a
run does not stop the other runs.
"""

import contextlib
import multiprocessing
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from openclip_ext.data.processes import available_cores

_POLL_SECONDS = 0.3
# This module imports all modules of a run.
_PRELOADED = "openclip_ext.compare.pilot"
# A process calls ``task(device, seen)``. After each step, the task calls ``seen`` with the number of samples of the step.
Task = Callable[[torch.device, Callable[[int], None]], dict[str, Any]]
Ended = Callable[[str, dict[str, Any] | None, str], None]


class _Running(NamedTuple):
    process: Any
    connection: Connection
    slot: int


class TaskPool(ABC):
    """A pool that executes a limited number of tasks in parallel. Subclasses define where tasks are executed.

    Attributes:
        processes: Maximum number of tasks at a time.
        samples: Number of samples that all tasks have processed so far.
    """

    def __init__(self, processes: int) -> None:
        self.processes, self.samples = processes, 0
        self._running: dict[str, Any] = {}

    @abstractmethod
    def _start(self, name: str, task: Task) -> None: ...

    @abstractmethod
    def _kill(self, entry: Any) -> None: ...

    @abstractmethod
    def _wait(self) -> None:
        """Wait briefly for tasks to end."""

    @abstractmethod
    def _read(self, name: str, entry: Any) -> tuple[dict[str, Any] | None, str] | None:
        """Read a task's messages. If the task has ended, return its result and failure, else None."""

    def work_off(
        self,
        pending: Callable[[], Mapping[str, Task]],
        on_end: Ended,
        keep_going: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Execute all tasks and return True. As soon as ``keep_going`` returns False, kill the running tasks and return False.

        Args:
            pending: Returns, by name, the tasks that can start and have not ended, the most urgent first.
            on_end: Called with name, result and failure of each task. The result is None after a failure.
            keep_going: Returns whether to continue. It is called several times per second.
        """
        try:
            while keep_going():
                for name, task in pending().items():
                    if len(self._running) < self.processes and name not in self._running:
                        self._start(name, task)
                if not self._running:
                    return True
                self._wait()
                for name, entry in list(self._running.items()):
                    if (ended := self._read(name, entry)) is not None:
                        self._kill(entry)
                        del self._running[name]
                        on_end(name, *ended)
            return False
        finally:
            for entry in self._running.values():
                self._kill(entry)
            self._running.clear()

    def run(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Execute tasks and return their results, in the order of the tasks."""
        results: dict[str, dict[str, Any]] = {}

        def on_end(name: str, result: dict[str, Any] | None, failure: str) -> None:
            if result is None:
                raise ValueError(f"a run failed: {failure}")
            results[name] = result

        named = {str(number): task for number, task in enumerate(tasks)}
        self.work_off(lambda: {name: task for name, task in named.items() if name not in results}, on_end)
        return [results[name] for name in named]


class ProcessPool(TaskPool):
    """A pool of processes on this machine. They are forked from a server process that has imported ``_PRELOADED``."""

    _running: dict[str, _Running]

    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOADED])

    def _wait(self) -> None:
        wait([entry.connection for entry in self._running.values()], _POLL_SECONDS)

    def _start(self, name: str, task: Task) -> None:
        taken = {entry.slot for entry in self._running.values()}
        slot = next(slot for slot in range(self.processes) if slot not in taken)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(sender, slot, self.processes, task))
        process.start()
        sender.close()
        self._running[name] = _Running(process, receiver, slot)

    def _kill(self, entry: _Running) -> None:
        entry.process.kill()
        entry.process.join()

    def _read(self, name: str, entry: _Running) -> tuple[dict[str, Any] | None, str] | None:
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


def _work(sender: Connection, slot: int, processes: int, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the main process handles Ctrl-C
    if torch.cuda.is_available():
        device = torch.device("cuda", slot % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(threads_of_each(processes))
    with contextlib.suppress(OSError):  # the main process may have ended
        sender.send(outcome(task, device, sender.send))


def threads_of_each(processes: int) -> int:
    """Return the number of threads of each process on the CPU, if ``processes`` processes work at a time."""
    return max(1, available_cores() // processes)


def outcome(task: Task, device: torch.device, seen: Callable[[int], None]) -> tuple[dict[str, Any] | None, str]:
    """Execute a task; return its result (None after a failure) and the text of its failure (empty if none)."""
    try:
        return task(device, seen), ""
    except Exception as error:
        known = isinstance(error, ValueError | FileNotFoundError) and str(error).strip()
        return None, known or traceback.format_exc()
