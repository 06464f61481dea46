"""A pool of two gloo processes that tests share, and the fork server of all tests that start processes.

The fork server imports torch and OpenCLIP only once, because these imports take longer than most tests.

``two_ranks().run(function, *arguments)`` calls a top-level function on each rank and returns the results in rank order. The
processes start at the first call, and restart after a failure. Each pytest-xdist worker has its own pool.
"""

import atexit
import contextlib
import faulthandler
import functools
import io
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from datetime import timedelta
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import torch

WORLD_SIZE = 2
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.training.programs"])
# After the failure of one rank, the other rank may also fail within this time. Otherwise, it hangs in a collective.
_GRACE_SECONDS = 5.0


class RankError(AssertionError):
    """A rank failed. The message contains its traceback and the end of its output."""


class RankPool:
    """Processes, one per rank, that call the same functions one after another."""

    def __init__(self) -> None:
        self._ranks: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []
        self._folder = Path()
        self._jobs = 0

    def run(self, function: Callable, *arguments: Any, group: bool = True, timeout: float = 600) -> list[Any]:
        """Call ``function(*arguments)`` on every rank.

        The ranks use the environment variables and working directory of this process at the time of the call.

        Args:
            function: function at the top level of a module, so that it can be pickled.
            arguments: picklable arguments.
            group: whether to create a process group for the call. Otherwise, torchrun's environment variables are set,
                for functions that create their own group.
            timeout: seconds after which ranks without a result are killed.

        Returns:
            The results in rank order. They may contain only tensors and plain Python types.

        Raises:
            RankError: a rank raised an exception, died or did not finish in time.
        """
        if not self._ranks:
            self._start()
        self._jobs += 1
        rendezvous = f"file://{self._folder}/group_{self._jobs}" if group else None
        torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD_SIZE)}
        answers = []
        for rank, process in enumerate(self._ranks):
            own = {} if group else {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            place = {**os.environ, **own}, os.getcwd()
            answers.append(process.submit(_call, function, arguments, rank, rendezvous, *place))
        wait(answers, timeout, FIRST_EXCEPTION)
        wait(answers, _GRACE_SECONDS if any(map(_has_failed, answers)) else 0)
        if any(not answer.done() or _has_failed(answer) for answer in answers):
            report = "\n".join(self._report(rank, answer) for rank, answer in enumerate(answers))
            self.close()
            raise RankError(report)
        return [torch.load(io.BytesIO(answer.result()), weights_only=True) for answer in answers]

    def close(self) -> None:
        """Kill the processes of the pool. The next call of :meth:`run` starts new processes."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._ranks:
            process.shutdown()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks, self._pids = [], []

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        for rank in range(WORLD_SIZE):
            self._ranks.append(ProcessPoolExecutor(1, FORKS, prepare_fork, (self._log(rank),)))
        self._pids = [process.submit(os.getpid).result() for process in self._ranks]

    def _report(self, rank: int, answer: Future) -> str:
        end = "did not answer" if not answer.done() else "returned"
        if _has_failed(answer):
            end = "".join(traceback.format_exception(answer.exception()))
        return f"rank {rank} {end}\n--- its output\n{self._log(rank).read_text(errors='replace')[-4000:]}"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.log"


def _has_failed(answer: Future) -> bool:
    return answer.done() and answer.exception() is not None


@functools.cache
def two_ranks() -> RankPool:
    """Return the pool of this test process, which is closed at exit."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def free_port() -> int:
    """Return an unused port below the range from which the system takes ports for outgoing connections."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


# --- on the ranks -----------------------------------------------------------------------------------------------------


def prepare_fork(log: Path) -> None:
    """Prepare a process of the fork server for a test: one thread, and its output in a file, which may exist."""
    torch.set_num_threads(1)
    # Restore the default start method, because data workers from the fork server could outlive this process.
    set_start_method(None, force=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.enable()


def _call(
    function: Callable,
    arguments: tuple,
    rank: int,
    rendezvous: str | None,
    environment: dict[str, str],
    folder: str,
) -> bytes:
    os.ftruncate(sys.stdout.fileno(), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(folder)
    # Earlier calls may have changed the random state. OpenCLIP also adds two log handlers per run and never removes them.
    torch.manual_seed(0)
    logging.getLogger().handlers.clear()
    result = io.BytesIO()
    try:
        with _process_group(rendezvous, rank):
            torch.save(function(*arguments), result)
    except SystemExit as stop:
        raise RuntimeError(f"exited with status {stop.code}") from stop
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return result.getvalue()


@contextlib.contextmanager
def _process_group(rendezvous: str | None, rank: int) -> Iterator[None]:
    from openclip_ext import distributed

    try:
        if rendezvous is None:
            yield
            return
        torch.distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(minutes=2)
        )
        # The barriers keep a rank from exiting while another rank still connects or receives, which would be an error.
        torch.distributed.barrier()
        yield
        torch.distributed.barrier()
    finally:
        distributed.shutdown()
