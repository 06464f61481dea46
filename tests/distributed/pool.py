"""Two gloo processes that tests share, and the fork server of all tests that start processes.

Importing torch and OpenCLIP takes longer than most of what they are asked to do; the server does so once.

``two_ranks().run(function, *arguments)`` calls a function of a module on each rank and returns what it returned, in rank
order. The processes are started at the first use and again after a failure; each pytest-xdist worker has its own.
"""

import atexit
import contextlib
import faulthandler
import functools
import importlib
import io
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, get_context, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

WORLD_SIZE = 2
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.training.programs"])
# After one rank has failed the others hang in a collective, or fail soon, too.
_GRACE_SECONDS = 5.0


class RankError(AssertionError):
    """What went wrong on a rank: its traceback or exit status, and the end of its output."""


class _Job(NamedTuple):
    module: str
    function: str
    arguments: tuple
    group: str | None
    environment: dict[str, str]
    folder: str


class RankPool:
    """Processes that run one function after another, all ranks the same one.

    Args:
        world_size: number of processes.
    """

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None
        self._jobs = 0

    def run(self, function: Callable, *arguments: Any, group: bool = True, timeout: float = 600) -> list[Any]:
        """Call ``function(*arguments)`` on every rank.

        The ranks see this process's environment variables and working directory of now.

        Args:
            function: found by its name in its module.
            arguments: can be pickled.
            group: whether the ranks are in a process group, a fresh one. Otherwise they have torchrun's environment
                variables, for a function that makes its own.
            timeout: seconds until ranks that have not answered are killed.

        Returns:
            The results in rank order; tensors and plain types only.

        Raises:
            RankError: a rank raised, died or did not answer.
        """
        if not all(process.is_alive() for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        assert self._folder is not None
        self._jobs += 1
        rendezvous = f"file://{self._folder}/group_{self._jobs}" if group else None
        torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.world_size)}
        for rank, pipe in enumerate(self._pipes):
            ours = {} if group else {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = {**os.environ, **ours}
            pipe.send(_Job(function.__module__, function.__qualname__, arguments, rendezvous, environment, os.getcwd()))
        answers = self._answers(timeout)
        # In the order of arrival, the first tells the cause; one that only did not answer is a consequence.
        ranks = dict.fromkeys([*answers, *range(self.world_size)])
        failed = [rank for rank in ranks if answers.get(rank, ("", None))[1] is None]
        if failed:
            # A rank that a signal ended is a cause even where the others' error, a lost connection, arrives first.
            failed.sort(key=lambda rank: (self._processes[rank].exitcode or 0) >= 0)
            report = "\n".join(self._report(rank, answers.get(rank)) for rank in failed)
            self.close()
            raise RankError(report)
        return [torch.load(io.BytesIO(answers[rank][1]), weights_only=True) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes, if there are any."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        for rank in range(self.world_size):
            ours, theirs = FORKS.Pipe()
            # Not daemons: those may have no children, and data loaders start workers.
            process = FORKS.Process(target=_serve, args=(rank, self.world_size, theirs, self._log(rank)))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self, timeout: float) -> dict[int, tuple[str, bytes | None]]:
        """Error and result of each rank that answered or died, in the order of arrival."""
        answers: dict[int, tuple[str, bytes | None]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join()
                    answers[rank] = f"exited with status {self._processes[rank].exitcode}", None
                if answers[rank][1] is None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _report(self, rank: int, answer: tuple[str, bytes | None] | None) -> str:
        error = "did not answer" if answer is None else answer[0]
        output = Path(self._log(rank)).read_text(errors="replace")[-4000:]
        return f"rank {rank} {error}\n--- its output\n{output}"

    def _log(self, rank: int) -> str:
        return f"{self._folder}/rank_{rank}.log"


@functools.cache
def two_ranks() -> RankPool:
    """The pool of this process."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to no outgoing connection before it is used."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


# --- on the ranks ----------------------------------------------------------------------------------------------------


def _serve(rank: int, world_size: int, pipe: Connection, log: str) -> None:
    """Do jobs until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    # Or a data loader's workers would come from the fork server, too, which lets them end later than this process.
    set_start_method(None, force=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.enable()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        os.ftruncate(output, 0)
        try:
            pipe.send(("", _done(job, rank, world_size)))
        except (Exception, SystemExit):
            pipe.send((f"raised\n{traceback.format_exc()}", None))
        sys.stdout.flush()
        sys.stderr.flush()


def _done(job: _Job, rank: int, world_size: int) -> bytes:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(job.folder)
    # Whatever ran before: OpenCLIP adds two handlers a run and never takes them off.
    torch.manual_seed(0)
    logging.getLogger().handlers.clear()
    function = functools.reduce(getattr, job.function.split("."), importlib.import_module(job.module))
    with _process_group(job.group, rank, world_size):
        result = io.BytesIO()
        torch.save(function(*job.arguments), result)
    return result.getvalue()


@contextlib.contextmanager
def _process_group(rendezvous: str | None, rank: int, world_size: int) -> Iterator[None]:
    from openclip_ext import distributed

    try:
        if rendezvous is None:
            yield
            return
        torch.distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(minutes=2)
        )
        # A rank that leaves while another one still connects, or receives, breaks that one's connection.
        torch.distributed.barrier()
        yield
        torch.distributed.barrier()
    finally:
        distributed.shutdown()
