"""``--executor slurm`` of ``compare`` and of the grid: submitit runs the tasks of a pool as jobs on a real SLURM."""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.compare.runs import read_results
from openclip_ext.compare.slurm_pool import SlurmPool
from scripts.experiments import grid
from tests.compare.test_grid import GRID, write_splits
from tests.slurm.conftest import wait_until

pytestmark = pytest.mark.slurm
pytest.importorskip("submitit", reason="pip install submitit")
ONE_CORE = "cpus_per_task=1,time=10"


class Task:
    """A picklable task. Within a job, it succeeds, fails or sleeps, depending on ``what``."""

    def __init__(self, what: str, mark: Path) -> None:
        self.what, self.mark = what, mark

    def __setstate__(self, state: dict) -> None:
        if state["what"] == "cannot be loaded" and "SLURM_JOB_ID" in os.environ:
            raise ImportError("this node lacks a module")
        self.__dict__.update(state)

    def __call__(self, device: torch.device, seen) -> dict:
        seen(3)
        self.mark.write_text(os.environ["SLURM_JOB_ID"])
        if self.what == "fails":
            raise ValueError("too bad")
        if self.what != "works":
            time.sleep(600)
        return {"what": self.what, "device": device.type}


def test_tasks_run_as_jobs_and_end_in_each_way(cluster, tmp_path, monkeypatch):
    """One task succeeds, one raises, one cannot be unpickled, one is killed from outside."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("openclip_ext.compare.slurm_pool._GRACE_SECONDS", 2.0)
    monkeypatch.setattr("openclip_ext.compare.slurm_pool._QUEUE_SECONDS", 1.0)
    whats = ("works", "fails", "cannot be loaded", "is killed")
    marks = {what: tmp_path / what for what in whats}
    ended = {}

    def kill():
        number = wait_until(lambda: marks["is killed"].exists() and marks["is killed"].read_text(), str)
        cluster.run("scancel", "--signal=KILL", "--full", number)

    killer = threading.Thread(target=kill)
    killer.start()
    pool = SlurmPool(4, tmp_path / "jobs", ONE_CORE)

    def pending():
        return {what: Task(what, marks[what]) for what in whats if what not in ended}

    def keep(name, result, failure):
        ended[name] = result, failure

    assert pool.work_off(pending, keep)
    killer.join()
    assert ended["works"] == ({"what": "works", "device": "cpu"}, "")
    assert ended["fails"] == (None, "too bad")
    result, failure = ended["cannot be loaded"]
    assert result is None and "this node lacks a module" in failure
    result, failure = ended["is killed"]
    assert result is None and failure.startswith("killed by SLURM")
    assert pool.samples == 3 * 3
    wait_until(lambda: not cluster.run("squeue", "-h"), lambda: cluster.run("squeue"), seconds=60)


def test_a_grid_on_the_cluster_gives_the_rows_of_this_machine(cluster, tmp_path, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "grid.json").write_text(json.dumps(GRID | {"seeds": [0]}))
    write_splits(tmp_path / "icons")
    found = {}
    for executor, more in (("local", []), ("slurm", ["--slurm", ONE_CORE])):
        rows = tmp_path / f"{executor}.jsonl"
        flags = ["--data", f"{tmp_path}/icons", "--results", f"{rows}", "--executor", executor, *more]
        grid.main([f"{tmp_path}/grid.json", *flags])
        found[executor] = {name: (row["val"], row["test"]) for name, row in read_results(rows).items()}
    assert len(found["slurm"]) == 2
    assert found["slurm"] == found["local"]


def test_a_wrong_parameter_is_refused_before_any_job(cluster, tmp_path, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="partitoin"):
        SlurmPool(1, tmp_path, "partitoin=all")


def test_without_slurm_the_pool_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="srun"):
        SlurmPool(1, tmp_path, "")


def test_a_job_that_sbatch_rejects_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'invalid partition specified: nope' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    pool = SlurmPool(1, tmp_path / "jobs", "partition=nope")
    with pytest.raises(UsageError, match=r"rejected a job: .*invalid partition specified: nope"):
        pool.run([Task("works", tmp_path / "mark")])
    (script,) = (tmp_path / "jobs").glob("*.sh")
    assert "#SBATCH --signal=USR2@0\n" in script.read_text()  # a signal before the time limit would kill the task


def test_jobs_in_a_hidden_partition_are_in_the_queue(tmp_path, monkeypatch):
    """squeue shows these jobs to their user only with --all. root, who runs the cluster of these tests, sees all jobs."""
    for name, script in {"srun": "", "squeue": 'case "$*" in *--all*) echo 7;; esac'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    pool = SlurmPool(2, tmp_path / "jobs", "")
    pool._running = {"hidden": SimpleNamespace(job_id="7"), "ended": SimpleNamespace(job_id="6")}
    pool._read_queue()
    assert pool._left_queue.keys() == {"6"}
