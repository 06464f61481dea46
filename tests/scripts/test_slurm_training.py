"""The SLURM job for training runs: its command, and a trainer that saves too slowly. tests/slurm tests the other signals."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openclip_ext.training import recipes
from openclip_ext.training.flags import parse
from tests.training.programs import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sh"

STUBS = {
    # This fake srun runs its command once.
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do printf '%s ' "$1" >>"$RECORD/srun_options"; shift; done
printf '%s' "$MASTER_ADDR:$MASTER_PORT:$LOCAL_WORLD_SIZE" >>"$RECORD/srun_options"
exec "$@"
""",
    "scontrol": """#!/bin/bash
[[ "$1" == requeue ]] || exec printf 'node-a\\nnode-b\\n'
echo "requeue $2" >>"$RECORD/events"
kill -TERM "$(cat "$RECORD/pid")" 2>/dev/null || true
""",
    # This fake scancel sends no signal, as if the signal was lost.
    "scancel": """#!/bin/bash
echo "scancel $*" >>"$RECORD/events"
""",
    # This fake Python runs the real Python for recipes. As a trainer, it records its arguments, and saves on SIGTERM.
    "trainer": """#!/bin/bash
[[ "$*" != *openclip_ext.training.recipes* ]] || exec "$REAL_PYTHON" "$@"
save() {
    echo saved >>"$RECORD/events"
    kill "$training"
    exit 143
}
trap save TERM
printf '%s\n' "$@" >"$RECORD/argv"
sleep "$SECONDS_TO_TRAIN" &
training=$!
echo $$ >"$RECORD/pid"
wait
""",
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Set the environment of a SLURM job, with the fake programs; return the folder in which they record calls."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "trainer"),
        "REAL_PYTHON": sys.executable,
        "RECORD": str(tmp_path),
        "SECONDS_TO_TRAIN": "0",
        "SAVE_SECONDS": "0.5",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run_job(*arguments):
    return subprocess.run(["bash", SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True)


def trainer_arguments(cluster):
    unbuffered, as_module, module, *arguments = (cluster / "argv").read_text().splitlines()
    assert (unbuffered, as_module, module) == ("-u", "-m", "openclip_ext.training.main")
    return argparse.Namespace(**parse(arguments).flags)


def test_a_recipe_is_trained_with_its_batch_on_the_jobs_gpus_if_they_can_share_it(cluster, monkeypatch):
    job = run_job("--recipe", "coco", "--loss", "cliplite", "--train-data", "SHARDS", "--precision", "amp_bf16")
    assert job.returncode == 0, job.stderr
    args = trainer_arguments(cluster)
    assert (args.recipe, args.loss, args.train_data, args.precision) == ("coco", "cliplite", "SHARDS", "amp_bf16")
    assert args.batch_size * 8 == recipes.get("coco", "cliplite").global_batch
    assert (args.name, args.resume) == ("job-4711", "latest")
    srun = (cluster / "srun_options").read_text().split()
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1"} <= set(srun)
    assert srun[-1] == "node-a:14711:4"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert run_job("--recipe", "coco", "--loss", "cliplite").returncode == 2


def test_the_users_flags_win(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    flags = ["--train-data", "SHARDS", "--name", "mine-%a", "--recipe", "cc3m", "--batch-size", "7", "--aug-cfg"]
    assert run_job(*flags, "scale=(0.4, 1.0)").returncode == 0
    args = trainer_arguments(cluster)
    assert (args.name, args.batch_size, args.aug_cfg) == ("mine-5", 7, {"scale": (0.4, 1.0)})
    assert args.workers == 7  # one less than the 8 CPUs


def test_a_trainer_that_does_not_save_in_time_is_ended_by_the_requeue(cluster, monkeypatch):
    monkeypatch.setenv("SECONDS_TO_TRAIN", "60")
    job = subprocess.Popen(["bash", SCRIPT], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: (cluster / "pid").exists() and (cluster / "pid").read_text() != "", 60)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 143
    events = ["scancel --signal=TERM 4711", "requeue 4711", "saved", "requeue 4711"]
    assert (cluster / "events").read_text().splitlines() == events
