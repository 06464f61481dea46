"""Short trainings as programs of their own: forked from this process or under torchrun, and what they leave compared.

Importing torch and OpenCLIP takes longer than such a training. A fork has imported both already; everything after
that, from the command line to the exit status, is the program's own.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch

import openclip_ext.model_configs
from openclip_ext.training.main import cli
from tests.training.runs import command, differences, final_state

ROOT = Path(__file__).parents[2]
# Whoever takes longer hangs.
PATIENCE_SECONDS = 600
# torchrun, too, asks the other trainers to end after one has failed, and kills them after this time.
GRACE_SECONDS = 30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# demo-vit with a narrower text tower: most of its checkpoint is the embedding of 49,408 tokens.
SMALL_MODEL = "faults-vit"
_TEXT_WIDTH = 16
_TIMES = ("samples_per_second", "batch_time", "data_time")


class HangError(Exception):
    """A program took longer than its patience."""


def add_small_model(folder: Path) -> None:
    """Make ``SMALL_MODEL`` known to this process and its forks."""
    config = json.loads((Path(openclip_ext.model_configs.__file__).parent / "demo-vit.json").read_text())
    config["text_cfg"]["width"] = _TEXT_WIDTH
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{SMALL_MODEL}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)


def arguments(shards: str, logs: Path, loss: str, ranks: int, *more: str) -> list[str]:
    """The run ``logs/run``: 2 epochs of 5 steps, an evaluation after each, a global batch of 16, a save every 2 steps."""
    saving = ["--save-every-steps", "2", "--val-data", shards, "--resume", "latest"]
    return command(shards, logs, "run", loss, "--batch-size", str(16 // ranks), *saving, *more)


class Program:
    """A training under way.

    Args:
        argv: the program's arguments.
        ranks: number of trainers.
        output: file for what they print; overwritten.
        torchrun: start them with torchrun.
        call: what a fork does with the arguments, returning its exit status; by default it is the program.

    Attributes:
        statuses: exit statuses of the processes that were started here (trainers, or torchrun) and have ended.
    """

    def __init__(
        self,
        argv: list[str],
        ranks: int,
        output: Path,
        torchrun: bool = False,
        call: Callable[[list[str]], int] | None = None,
    ) -> None:
        self.output, self.torchrun = output, torchrun
        self.statuses: dict[int, int] = {}
        self._failed_at: float | None = None
        output.write_bytes(b"")
        self._started = [_torchrun(argv, ranks, output)] if torchrun else _fork(call or _program, argv, ranks, output)

    @property
    def launcher(self) -> int | None:
        """torchrun's process, while it runs."""
        return self._running()[0] if self.torchrun and self._running() else None

    def trainers(self) -> list[int]:
        """The processes that train."""
        if not self.torchrun:
            return self._running()
        with contextlib.suppress(OSError, IndexError):
            (pid,) = self._running()
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def has_ended(self) -> bool:
        """Whether all processes that were started here have ended; to be called again and again."""
        for pid in self._running():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[pid] = os.waitstatus_to_exitcode(status)
        if any(self.statuses.values()) and self._running():
            self._end_the_others()
        return not self._running()

    def wait(self) -> list[int]:
        """Wait for the end; returns the exit statuses.

        Raises:
            HangError: after the patience; all processes are killed then.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.has_ended():
            if time.monotonic() > deadline:
                self.kill()
                raise HangError(f"no end after {PATIENCE_SECONDS} s")
            time.sleep(0.01)
        return list(self.statuses.values())

    def kill(self) -> None:
        """Kill all processes at once, and wait for them."""
        for pid in {*self.trainers(), *self._running()}:
            send_kill(pid)
        while not self.has_ended():
            time.sleep(0.005)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def message(self) -> str | None:
        """The program's own words for why it did not go on; None without any, or with a traceback."""
        lines = self.text().splitlines()
        return next((line for line in lines if line.startswith("error: ")), None)

    def _running(self) -> list[int]:
        return [pid for pid in self._started if pid not in self.statuses]

    def _end_the_others(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            for pid in self._running():
                os.kill(pid, signal.SIGTERM)
        elif time.monotonic() > self._failed_at + GRACE_SECONDS:
            for pid in self._running():
                os.kill(pid, signal.SIGKILL)


def send_kill(pid: int) -> None:
    """SIGKILL, for a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _torchrun(argv: list[str], ranks: int, output: Path) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(output, "ab") as file:
        program = subprocess.Popen(
            [*launcher, "-m", "--", "openclip_ext.training.main", *argv],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    program.returncode = 0  # it is waited for in Program, not by Popen's destructor
    return program.pid


def _program(argv: list[str]) -> int:
    sys.argv = ["openclip_ext.training.main", *argv]
    cli()
    return 0


def _fork(call: Callable[[list[str]], int], argv: list[str], ranks: int, output: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _serve(call, argv, ranks, rank, port, output)
        started.append(pid)
    return started


def _serve(call: Callable[[list[str]], int], argv: list[str], ranks: int, rank: int, port: int, output: Path) -> None:
    """A fork's whole life; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        torch.set_num_threads(1)
        if ranks > 1:
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({name: str(value) for name, value in own.items()}, GLOO_SOCKET_IFNAME="lo")
        status = call(argv)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# --- what a run leaves -----------------------------------------------------------------------------------------------


def lines_of(log: Path) -> list[str]:
    """The lines of a log, without the times."""
    lines = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            lines.append(line)
            continue
        if isinstance(content, dict):
            content = {name: value for name, value in content.items() if name not in _TIMES}
        lines.append(json.dumps(content, sort_keys=True))
    return lines


def compare(run: Path, whole: Path) -> list[str]:
    """Where a run's end differs from that of the uninterrupted one: model, optimizer, loss state, tables and logs."""
    found = differences(final_state(run), final_state(whole))
    for log in ("metrics.jsonl", "checkpoints/results.jsonl"):
        if lines_of(run / log) != lines_of(whole / log):
            found.append(log)
    return found


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Uninterrupted:
    """Runs without a fault, one for each loss and number of ranks, made when first asked for."""

    def __init__(self, shards: str, folder: Path) -> None:
        self._shards, self._folder = shards, folder

    def __call__(self, loss: str, ranks: int, *more: str) -> Path:
        logs = self._folder / "-".join((loss, str(ranks), *more))
        if not logs.exists():
            logs.mkdir(parents=True)
            program = Program(arguments(self._shards, logs, loss, ranks, *more), ranks, logs / "output")
            if any(program.wait()):
                raise AssertionError(f"the run without a fault failed:\n{program.text()[-3000:]}")
        return logs / "run"


def summary(outcomes: dict[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcomes.items())
