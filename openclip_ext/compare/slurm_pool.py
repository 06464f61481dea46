"""Execute several runs at a time as jobs of a SLURM cluster, by the package submitit.

All nodes must see the folder of the jobs, the data and this environment.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.compare.process_pool import KILLED, Judge, ProcessPool, Task, TaskPool, outcome
from openclip_ext.files.writing import write_atomically

_POLL_SECONDS = 1.0
# The queue is asked this often, which a busy controller bears.
_QUEUE_SECONDS = 10.0
# A job writes its progress this often.
_PROGRESS_SECONDS = 5.0
# A job that has left the queue may still be writing its result, or a network file system may not show it yet.
_GRACE_SECONDS = 30.0
_MINUTES_OF_A_DAY = 24 * 60


class _Job(NamedTuple):
    job: Any
    progress: Path


class SlurmPool(TaskPool):
    """Runs tasks in jobs, each with the node's GPU that SLURM gives it, if any.

    Args:
        jobs: largest number of jobs at a time.
        folder: gets the jobs' files.
        parameters: of ``sbatch``, by submitit's names, such as ``partition=gpu,gpus_per_node=1``.
        judge: as in :class:`TaskPool`.

    Raises:
        UsageError: submitit or SLURM is missing, or a parameter is unknown.
    """

    _under_way: dict[str, _Job]

    def __init__(self, jobs: int, folder: Path, parameters: str, judge: Judge = lambda name, state: None) -> None:
        super().__init__(jobs, judge)
        try:
            from submitit import SlurmExecutor
        except ModuleNotFoundError as error:
            raise UsageError("--executor slurm needs submitit: pip install 'openclip_ext[slurm]'") from error
        self._folder = folder.absolute()
        try:
            self._executor = SlurmExecutor(self._folder)
            given = _parsed(parameters)
            self._executor.update_parameters(**{"job_name": "openclip-ext", "time": _MINUTES_OF_A_DAY, **given})
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"--executor slurm: {error}") from error
        self._queue_asked = 0.0
        self._gone_since: dict[str, float] = {}
        self._samples_of: dict[str, int] = {}

    def finished(self) -> list[tuple[str, dict[str, Any] | None, str]]:
        time.sleep(_POLL_SECONDS)
        self._ask_queue()
        found = []
        for name, entry in list(self._under_way.items()):
            if (ended := self._read(name, entry)) is not None:
                self._kill(entry)
                del self._under_way[name]
                found.append((name, *ended))
        return found

    def _start(self, name: str, task: Task) -> None:
        progress = self._folder / f"{name}.json"
        progress.unlink(missing_ok=True)
        self._under_way[name] = _Job(self._executor.submit(_work, task, progress), progress)

    def _kill(self, entry: _Job) -> None:
        entry.job.cancel(check=False)

    def _read(self, name: str, entry: _Job) -> tuple[dict[str, Any] | None, str] | None:
        if entry.progress.exists():
            samples, result = json.loads(entry.progress.read_text())
            self._samples_of[name] = samples
            self.samples = sum(self._samples_of.values())
            if result is not None and (stopped := self._judge(name, result)):
                return stopped, ""
        if entry.job.paths.result_pickle.exists():
            return entry.job.result()
        gone = self._gone_since.get(entry.job.job_id)
        if gone is not None and time.monotonic() - gone > _GRACE_SECONDS:
            return None, f"{KILLED} by SLURM or before it began; its log: {entry.job.paths.stderr}"
        return None

    def _ask_queue(self) -> None:
        """Note the jobs that have left the queue. Many clusters have no accounting, which submitit asks."""
        now = time.monotonic()
        if now - self._queue_asked < _QUEUE_SECONDS:
            return
        self._queue_asked = now
        asked = subprocess.run(["squeue", "--noheader", "--me", "--format=%A"], capture_output=True, text=True)
        if asked.returncode == 0:
            queued = set(asked.stdout.split())
            ours = {entry.job.job_id for entry in self._under_way.values()}
            self._gone_since = {job: self._gone_since.get(job, now) for job in ours - queued}


def _parsed(parameters: str) -> dict[str, int | str]:
    """Read ``partition=gpu,gpus_per_node=1``."""
    pairs = [word.partition("=")[::2] for word in parameters.split(",") if word]
    return {name.strip(): int(value) if value.isdigit() else value for name, value in pairs}


def _work(task: Task, progress: Path) -> tuple[dict[str, Any] | None, str]:
    """Run a task in its job; write the samples so far and the intermediate result into a file."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    samples, written, result = 0, 0.0, None

    def seen(message: Any) -> None:
        nonlocal samples, written, result
        is_result = isinstance(message, dict)
        samples, result = (samples, message) if is_result else (samples + message, result)
        if is_result or time.monotonic() - written > _PROGRESS_SECONDS:
            written = time.monotonic()
            write_atomically(progress, lambda file: file.write(json.dumps([samples, result]).encode()))

    return outcome(task, device, seen)


def make_pool(
    executor: str,
    processes: int,
    preload: str,
    folder: Path,
    parameters: str,
    judge: Judge = lambda name, state: None,
) -> TaskPool:
    """Return a pool on this machine, or with ``executor="slurm"`` on the cluster.

    Args:
        executor: ``local`` or ``slurm``.
        processes, judge: as in :class:`TaskPool`.
        preload: as in :class:`ProcessPool`.
        folder, parameters: as in :class:`SlurmPool`.
    """
    if executor == "slurm":
        return SlurmPool(processes, folder, parameters, judge)
    return ProcessPool(processes, preload, judge)
