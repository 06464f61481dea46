"""Many runs at a time, each in a process of its own, one a GPU or core; finished ones are appended to a file.

A process is a fork of a server that has imported everything, so that it starts at once. A run that is killed or fails costs
nothing but itself.
"""

import contextlib
import fcntl
import json
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openclip_ext.machine import available_cores

_POLL_SECONDS = 0.3
# What a process runs: ``task(device, seen)``, where ``seen`` takes the samples of each step.
Task = Callable[[torch.device, Callable[[int], None]], dict[str, Any]]


class ResultsFile:
    """Lines of finished runs by id. One process at a time may have it open.

    Raises:
        ValueError: another process has it open, or a line is no result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {path}: wait for it, or give another --output") from None
        content = path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)  # a line that was cut off
        self.lines: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].decode().splitlines(), start=1):
            try:
                result = json.loads(line)
                self.lines[result["id"]] = result
            except (json.JSONDecodeError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number}: not the result of a run; remove the line or the file"
                ) from None

    def add(self, result: dict[str, Any]) -> None:
        """Append a line."""
        self.lines[result["id"]] = result
        self._file.write(json.dumps(result) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Let others write."""
        self._file.close()


class _UnderWay(NamedTuple):
    process: Any
    connection: Connection
    slot: int


class Workers:
    """Runs tasks in processes.

    Args:
        processes: how many at a time.
        preload: the module that the server imports.

    Attributes:
        samples: that all tasks have seen so far.
    """

    def __init__(self, processes: int, preload: str) -> None:
        self.processes = processes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        self.samples = 0
        self._under_way: dict[str, _UnderWay] = {}

    @property
    def under_way(self) -> set[str]:
        """Names of the tasks."""
        return set(self._under_way)

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < self.processes

    def start(self, name: str, task: Task) -> None:
        """Start a task."""
        taken = {entry.slot for entry in self._under_way.values()}
        slot = next(slot for slot in range(self.processes) if slot not in taken)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(sender, slot, self.processes, task))
        process.start()
        sender.close()
        self._under_way[name] = _UnderWay(process, receiver, slot)

    def finished(self) -> list[tuple[str, dict[str, Any] | None, str]]:
        """Name, result and failure of tasks that have ended; waits a moment for one."""
        wait([entry.connection for entry in self._under_way.values()], _POLL_SECONDS)
        found = []
        for name, entry in list(self._under_way.items()):
            ended = self._read(entry)
            if ended is not None:
                entry.process.join()
                del self._under_way[name]
                found.append((name, *ended))
        return found

    def _read(self, entry: _UnderWay) -> tuple[dict[str, Any] | None, str] | None:
        """Count the steps that a task reports; its result and failure if it has ended."""
        try:
            while entry.connection.poll():
                message = entry.connection.recv()
                if not isinstance(message, int):
                    return message
                self.samples += message
        except EOFError:
            entry.process.join()
            return None, f"its process ended with exit status {entry.process.exitcode}"
        return None

    def stop(self) -> None:
        """Kill what is under way."""
        for entry in self._under_way.values():
            entry.process.kill()
            entry.process.join()
        self._under_way.clear()

    def run(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Results of tasks, in order.

        Raises:
            ValueError: one has failed.
        """
        waiting = list(enumerate(tasks))
        results: dict[int, dict[str, Any]] = {}
        try:
            while waiting or self._under_way:
                while waiting and self.has_room:
                    number, task = waiting.pop(0)
                    self.start(str(number), task)
                for name, result, failure in self.finished():
                    if result is None:
                        raise ValueError(failure)
                    results[int(name)] = result
        finally:
            self.stop()
        return [results[number] for number in sorted(results)]


def default_processes() -> int:
    """One a GPU, or without one, one a core."""
    return torch.cuda.device_count() or available_cores()


def _work(sender: Connection, slot: int, processes: int, task: Task) -> None:
    """The process of a task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program stops it
    if torch.cuda.is_available():
        device = torch.device("cuda", slot % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, available_cores() // processes))

    def seen(count: int) -> None:
        sender.send(count)  # fails, and ends this process, when the program is gone

    try:
        sender.send((task(device, seen), ""))
    except Exception as error:
        known = isinstance(error, ValueError | FileNotFoundError)
        with contextlib.suppress(OSError):  # the program is gone
            sender.send((None, str(error) if known else traceback.format_exc()))


class Deadline:
    """When to stop: so many minutes after ``started``, a time of ``time.monotonic()``."""

    def __init__(self, minutes: float, started: float) -> None:
        self._end = started + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()
