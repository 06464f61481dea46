"""Execute several runs in parallel as SLURM jobs, with the package submitit.

All nodes need access to the jobs' folder, to the data, and to this Python environment.
"""

import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.compare.process_pool import ProcessPool, Task, TaskPool, outcome
from openclip_ext.files.writing import write_text

_POLL_SECONDS = 1.0
# Time between two calls of squeue. More frequent calls would overload SLURM's controller.
_QUEUE_SECONDS = 10.0
# Time between two updates of a job's progress file.
_PROGRESS_SECONDS = 5.0
# Time to wait for the result of a job that has left the queue, because a network file system may show files with a delay.
_GRACE_SECONDS = 30.0
_MINUTES_PER_DAY = 24 * 60


class SlurmPool(TaskPool):
    """A pool of SLURM jobs, each on the GPU that SLURM assigns, if any.

    Args:
        jobs: Maximum number of jobs at a time.
        folder: Folder for the jobs' files.
        parameters: Parameters of ``sbatch``, with submitit's names, such as ``partition=gpu,gpus_per_node=1``.

    Raises:
        UsageError: submitit or SLURM is missing, or a parameter is unknown.
    """

    def __init__(self, jobs: int, folder: Path, parameters: str) -> None:
        super().__init__(jobs)
        try:
            from submitit import SlurmExecutor
        except ModuleNotFoundError as error:
            raise UsageError("--executor slurm needs submitit: pip install 'openclip_ext[slurm]'") from error
        self._folder = folder.absolute()
        try:
            self._executor = SlurmExecutor(self._folder)
            given = _parsed(parameters)
            # By default, submitit lets SLURM send SIGUSR2 90 seconds before the time limit. This signal kills tasks, which
            # have no checkpoints, and with a limit of one or two minutes it kills them at their start.
            own = {"job_name": "openclip-ext", "time": _MINUTES_PER_DAY, "signal_delay_s": 0}
            self._executor.update_parameters(**own | given)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"--executor slurm: {error}") from error
        self._queue_time = 0.0
        self._left_queue: dict[str, float] = {}
        self._samples: dict[str, int] = {}

    def _wait(self) -> None:
        time.sleep(_POLL_SECONDS)
        self._read_queue()

    def _start(self, name: str, task: Task) -> None:
        progress = self._progress(name)
        progress.unlink(missing_ok=True)
        try:
            self._running[name] = self._executor.submit(_work, task, progress)
        except RuntimeError as error:  # such as an unknown partition
            raise UsageError(f"--executor slurm: sbatch rejected a job: {str(error).strip()}") from error

    def _progress(self, name: str) -> Path:
        return self._folder / f"{name}.txt"

    def _kill(self, job: Any) -> None:
        if not job.paths.result_pickle.exists():  # scancel prints an error for a job that has ended
            job.cancel(check=False)

    def _read(self, name: str, job: Any) -> tuple[dict[str, Any] | None, str] | None:
        if self._progress(name).exists():
            self._samples[name] = int(self._progress(name).read_text())
            self.samples = sum(self._samples.values())
        if job.paths.result_pickle.exists():
            error = job.exception()  # an error outside the task, such as a module that the node lacks
            return job.result() if error is None else (None, str(error))
        left = self._left_queue.get(job.job_id)
        if left is not None and time.monotonic() - left > _GRACE_SECONDS:
            return None, f"killed by SLURM, perhaps before it started; see its log: {job.paths.stderr}"
        return None

    def _read_queue(self) -> None:
        """Record when jobs leave the queue. submitit's own check needs SLURM accounting, which many clusters lack."""
        now = time.monotonic()
        if now - self._queue_time < _QUEUE_SECONDS:
            return
        self._queue_time = now
        # --all includes the jobs in hidden partitions.
        command = ["squeue", "--all", "--noheader", "--me", "--format=%A"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            queued = set(result.stdout.split())
            ours = {job.job_id for job in self._running.values()}
            self._left_queue = {job: self._left_queue.get(job, now) for job in ours - queued}


def _parsed(parameters: str) -> dict[str, int | str]:
    pairs = [word.partition("=")[::2] for word in parameters.split(",") if word]
    return {name.strip(): int(value) if value.isdigit() else value for name, value in pairs}


def _work(task: Task, progress: Path) -> tuple[dict[str, Any] | None, str]:
    """Execute a task inside its job; write the number of samples to ``progress``."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    samples, written = 0, 0.0

    def seen(number: int) -> None:
        nonlocal samples, written
        samples += number
        if time.monotonic() - written > _PROGRESS_SECONDS:
            written = time.monotonic()
            write_text(progress, str(samples))

    return outcome(task, device, seen)


def make_pool(executor: str, processes: int, folder: Path, parameters: str) -> TaskPool:
    """Return a :class:`SlurmPool` if ``executor`` is ``slurm``, else a :class:`ProcessPool`."""
    return SlurmPool(processes, folder, parameters) if executor == "slurm" else ProcessPool(processes)
