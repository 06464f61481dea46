"""The SLURM job for trainings: which command it runs, and what it does when SLURM signals."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openclip_ext.training import recipes
from openclip_ext.training.flags import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sh"

STUBS = {
    # Runs one task.
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do printf '%s ' "$1" >>"$RECORD/srun_options"; shift; done
printf '%s' "$MASTER_ADDR:$MASTER_PORT:$LOCAL_WORLD_SIZE" >>"$RECORD/srun_options"
exec "$@"
""",
    "scontrol": """#!/bin/bash
case "$1" in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "requeue $2" >>"$RECORD/events"; kill -TERM "$(cat "$RECORD/pid")" 2>/dev/null || true ;;
esac
""",
    "scancel": """#!/bin/bash
echo "scancel $*" >>"$RECORD/events"
[[ "$MODE" == hang ]] || kill -TERM "$(cat "$RECORD/pid")"
""",
}

# Stands for Python: recipes are listed by the real one; a trainer notes its arguments, and on SIGTERM saves and ends with 143.
TRAINER = """#!{python} -S
import os, pathlib, signal, sys, time
record = pathlib.Path(os.environ["RECORD"])
if "openclip_ext.training.recipes" in sys.argv:
    os.execv("{python}", ["{python}", *sys.argv[1:]])

def note(event):
    with open(record / "events", "a") as file:
        file.write(event + "\\n")

def save(*_):
    note("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
(record / "argv").write_text("\\0".join(sys.argv[1:]))
(record / "pid.new").write_text(str(os.getpid()))
(record / "pid.new").rename(record / "pid")
mode = os.environ["MODE"]
if mode in ("run", "hang"):
    time.sleep(60)
sys.exit(3 if mode == "crash" else 0)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A job's environment on a cluster of stubs; returns the folder in which they note what happened."""
    for name, text in {**STUBS, "trainer": TRAINER.format(python=sys.executable)}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "trainer"),
        "RECORD": str(tmp_path),
        "MODE": "finish",
        "SAVE_SECONDS": "0.5",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run_job(*arguments):
    return subprocess.run(["bash", SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True)


def trainer_arguments(cluster):
    launcher, _, arguments = (cluster / "argv").read_text().partition("openclip_ext.training.main\0")
    assert launcher == "-u\0-m\0"
    return parse(arguments.split("\0"))


@pytest.mark.parametrize(("name", "loss"), [("cc3m", "neuclip"), ("cc12m", "tempnet"), ("coco", "cliplite")])
def test_a_recipe_is_trained_with_its_batch_on_the_jobs_gpus(name, loss, cluster):
    job = run_job("--recipe", name, "--loss", loss, "--train-data", "SHARDS", "--precision", "amp_bf16")
    assert job.returncode == 0, job.stderr
    args, choice = trainer_arguments(cluster)
    assert (args.recipe, choice.name, args.train_data, args.precision) == (name, loss, "SHARDS", "amp_bf16")
    assert args.batch_size * 8 == recipes.get(name, loss).global_batch
    assert (args.name, args.resume) == ("job-4711", "latest")
    srun = (cluster / "srun_options").read_text().split()
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1"} <= set(srun)
    assert srun[-1] == "node-a:14711:4"


def test_the_users_flags_win(cluster, monkeypatch):
    flags = ["--name", "mine-%a", "--recipe", "cc3m", "--batch-size", "7", "--aug-cfg", "scale=(0.4, 1.0)"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    assert run_job(*flags).returncode == 0
    args, _ = trainer_arguments(cluster)
    assert (args.name, args.batch_size, args.aug_cfg) == ("mine-5", 7, {"scale": (0.4, 1.0)})
    assert args.workers == 7  # of 8 CPUs


def test_a_batch_that_the_gpus_cannot_share_is_refused(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    job = run_job("--recipe", "cc3m", "--loss", "neuclip")
    assert job.returncode == 2
    assert "batch of 1024 cannot be shared by 12 GPUs" in job.stderr
    assert not (cluster / "argv").exists()


@pytest.mark.parametrize(
    ("mode", "events"),
    [
        ("run", ["scancel --signal=TERM 4711", "saved", "requeue 4711"]),
        # A trainer that does not save in time is ended by the requeue.
        ("hang", ["scancel --signal=TERM 4711", "requeue 4711", "saved", "requeue 4711"]),
    ],
)
def test_at_the_time_limit_the_job_saves_and_is_requeued(mode, events, cluster, monkeypatch):
    monkeypatch.setenv("MODE", mode)
    job = subprocess.Popen(["bash", SCRIPT], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(cluster / "pid")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 143
    assert (cluster / "events").read_text().splitlines() == events


def test_a_run_that_fails_is_not_requeued(cluster, monkeypatch):
    monkeypatch.setenv("MODE", "crash")
    assert run_job().returncode == 3
    assert not (cluster / "events").exists()


def wait_for(path, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never appeared"
        time.sleep(0.02)


def test_the_job_asks_slurm_for_the_signal_and_the_requeue():
    directives = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), flags=re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= set(directives)
