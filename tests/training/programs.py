"""Run short training runs in forked processes, and compare their results.

Importing torch and OpenCLIP takes longer than these runs, so a fork server imports them once. Everything else, from the
command line to the exit status, works as in the real program.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import open_clip
import open_clip_train.main  # noqa: F401 - as the two below: each fork would import it

import openclip_ext.compare.trial
import openclip_ext.training.run  # noqa: F401
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.main import cli
from tests.distributed.pool import FORKS, free_port, prepare_fork
from tests.training.runs import command, differences, final_state

# Time after which a program is considered stuck.
PATIENCE_SECONDS = 600
# When one trainer fails, the others receive SIGTERM, and after this time SIGKILL. torchrun also does this.
GRACE_SECONDS = 30
LOGS = ("metrics.jsonl", "checkpoints/results.jsonl")
# The fork server reads the configurations and the tokenizer once; otherwise every fork would read them.
add_model_configs()
open_clip.get_tokenizer("demo-vit")
_TIMES = ("samples_per_second", "batch_time", "data_time")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def program(argv: list[str]) -> None:
    """Run the training program; raise SystemExit if the exit status is not 0."""
    sys.argv = ["openclip_ext.training.main", *argv]
    cli()


class Program:
    """A training run in forked processes (trainers), which call ``target(argv)``.

    ``output`` is a file for stdout and stderr of the trainers; it is overwritten.
    """

    def __init__(
        self, argv: list[str], ranks: int, output: Path, target: Callable[[list[str]], None] = program
    ) -> None:
        self.output = output
        self._failed_at: float | None = None
        output.write_bytes(b"")
        self._forks = _fork(target, argv, ranks, output)

    def trainers(self) -> list[int]:
        """Return the process IDs of the trainers that still run."""
        return [fork.pid for fork in self._forks if fork.is_alive()]

    def statuses(self) -> list[int | None]:
        """Return the exit statuses of the trainers; None means that a trainer still runs."""
        return [fork.exitcode for fork in self._forks]

    def has_ended(self) -> bool:
        """Return whether all trainers have exited. After a failure, repeated calls also terminate the remaining trainers."""
        statuses = self.statuses()
        if any(statuses) and None in statuses:
            if self._failed_at is None:
                self._failed_at = time.monotonic()
                for fork in self._forks:
                    fork.terminate()
            elif time.monotonic() > self._failed_at + GRACE_SECONDS:
                for fork in self._forks:
                    fork.kill()
        return None not in statuses

    def wait(self) -> list[int | None]:
        """Wait until all processes exit, and return their statuses. After the timeout, kill the processes and fail."""
        try:
            wait_until(self.has_ended)
        except AssertionError:
            self.kill()
            raise
        return self.statuses()

    def wait_for_step(self, run_folder: Path, count: int) -> None:
        """Wait until the run has logged ``count`` lines; fail if the program exits first."""
        log = run_folder / "metrics.jsonl"
        wait_until(lambda: not self._runs() or (log.is_file() and log.read_text().count("\n") >= count))
        assert self._runs(), self.text()[-3000:]

    def _runs(self) -> bool:
        return set(self.statuses()) == {None}

    def kill(self) -> None:
        """Send SIGKILL to all processes, and wait until they have exited."""
        for fork in self._forks:
            fork.kill()
            fork.join()

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until the condition is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.005)


def children_of(pid: int) -> list[int]:
    """Return the process IDs of a process's children; an empty list if the process has exited."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    """Return whether a process still runs. A zombie counts as exited."""
    with contextlib.suppress(OSError):  # the process may exit while its file is read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def send_kill(pid: int) -> None:
    """Send SIGKILL to a process; do nothing if it has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork(target: Callable[[list[str]], None], argv: list[str], ranks: int, output: Path) -> list[BaseProcess]:
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = []
    for rank in range(ranks):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        environment = {"GLOO_SOCKET_IFNAME": "lo", **{name: str(value) for name, value in own.items()}}
        started.append(FORKS.Process(target=_serve, args=(target, argv, environment, output)))
        started[-1].start()
    return started


def _serve(target: Callable[[list[str]], None], argv: list[str], environment: dict[str, str], output: Path) -> None:
    """Call ``target`` in a fork. If it raises, multiprocessing sets the fork's exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prepare_fork(output)
    os.environ.update(environment)
    target(argv)


class Runs:
    """Uninterrupted reference runs in ``folder``; each run is made when a test first requests it."""

    def __init__(self, shards: str, folder: Path) -> None:
        self._shards, self._folder = shards, folder

    def argv(self, logs: Path, loss: str, ranks: int, *more: str) -> list[str]:
        """Return the command-line arguments of a run in the folder ``logs/run``.

        The run has 2 epochs of 5 steps, an evaluation after each epoch, a global batch of 16, and a save every 2 steps.
        """
        batch_size = ["--batch-size", str(16 // ranks)]
        saving = ["--save-every-steps", "2", "--val-data", self._shards, "--resume", "latest"]
        return command(self._shards, logs, "run", loss, *batch_size, *saving, *more)

    def uninterrupted(self, loss: str, ranks: int, *more: str) -> Path:
        """Return the folder of an uninterrupted run."""
        logs = self._folder / "-".join((loss, str(ranks), *more))
        if not logs.exists():
            logs.mkdir(parents=True)
            made = Program(self.argv(logs, loss, ranks, *more), ranks, logs / "output")
            assert not any(made.wait()), made.text()[-3000:]
        return logs / "run"


def lines_of(log: Path) -> list[str]:
    """Return the lines of a log without their timing fields."""
    lines = map(json.loads, log.read_text().splitlines() if log.is_file() else ())
    return [json.dumps({name: line[name] for name in sorted(line) if name not in _TIMES}) for line in lines]


def differing(run_folder: Path, whole: Path) -> list[str]:
    """Return the names of state tensors (compared bitwise) and logs that differ from the uninterrupted run ``whole``."""
    logs = [log for log in LOGS if lines_of(run_folder / log) != lines_of(whole / log)]
    return differences(final_state(run_folder), final_state(whole)) + logs
