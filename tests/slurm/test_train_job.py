"""``sbatch scripts/slurm/train.sh`` on a real SLURM: interrupted jobs have bitwise the same result as an uninterrupted run."""

from typing import NamedTuple

import pytest

from openclip_ext.training import recipes
from tests.slurm.conftest import GPUS, NODES
from tests.training.paced import read_notes
from tests.training.programs import Program
from tests.training.runs import assert_same_run, small_command

pytestmark = pytest.mark.slurm
SCRIPT = "scripts/slurm/train.sh"
TWO_GPUS = ("--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1")
ONE_GPU = ("--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1")
TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1")


class Runs(NamedTuple):
    """Trainings with ten steps on two ranks: data, folders and flags."""

    shards: str
    logs: object

    def flags(self, name, *more):
        more = ("--batch-size", "8", "--save-every-steps", "2", *more)
        return small_command(self.shards, self.logs, name, "fastclip", *more)

    def submit(self, cluster, name, *options, more=(), **variables):
        return cluster.submit(
            *options, SCRIPT, *self.flags(name, *more), NOTES=str(self.logs / "notes" / name), **variables
        )

    def notes(self, name, what):
        """Return sorted pairs of a recorded value (``what``: step, signal, ...) and the rank that recorded it."""
        return sorted((note[what], note["rank"]) for note in read_notes(self.logs / "notes" / name) if what in note)


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    return Runs(shards, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def whole(cluster, runs):
    """Make an uninterrupted run without SLURM; return its folder."""
    program = Program(runs.flags("whole"), 2, runs.logs / "output")
    assert program.wait() == [0, 0], program.text()[-3000:]
    return runs.logs / "whole"


@pytest.fixture(scope="module")
def jobs(cluster, runs):
    """Run five jobs and return their final fields and output by name.

    ``array`` (in a job array) is preempted after its third step, ``limited`` comes near its time limit, ``failing`` fails, and
    ``nodes`` loses a node. Of the array with ``first`` and ``last``, only the last task comes near its time limit. The jobs
    run in parallel, because SLURM needs half a minute to detect limits and lost nodes.
    """
    array = runs.submit(cluster, "run-%a", "--array=1", *TWO_GPUS, HOLD_AT="3")
    limited = runs.submit(cluster, "limited", *TWO_GPUS, "--time=60", HOLD_AT="3")
    pair = runs.submit(cluster, "pair-%a", "--array=0-1", *ONE_GPU, HOLD_AT="3", PACE="0.5")
    failing = runs.submit(cluster, "failing", *ONE_GPU, more=("--train-data", "nowhere/00000.tar"))
    nodes = runs.submit(cluster, "nodes", *TWO_NODES, PACE="0.5")
    cluster.wait_for_step(nodes, runs.logs / "nodes", 5)
    cluster.kill_node(NODES[1])
    cluster.wait_for_step(array, runs.logs / "run-1", 2)
    cluster.run("scontrol", "requeue", f"{array}_1")
    cluster.wait_for_step(f"{pair}_1", runs.logs / "pair-1", 2)
    cluster.run("scancel", "--signal=USR1", "--batch", f"{pair}_1")  # as SLURM does before the time limit
    cluster.wait_for_step(limited, runs.logs / "limited", 2)
    # The script requests a signal 120 s before the time limit, and SLURM sends the signal 120 to 150 s before.
    minutes = int(cluster.job(limited)["RunTime"].split(":")[1])
    cluster.run("scontrol", "update", f"JobId={limited}", f"TimeLimit={minutes + 2}")
    cluster.wait(limited, "PENDING", "COMPLETING")
    cluster.run("scontrol", "update", f"JobId={limited}", "TimeLimit=60")
    numbers = {"array": f"{array}_1", "limited": limited, "failing": failing, "nodes": nodes}
    numbers |= {"first": f"{pair}_0", "last": f"{pair}_1"}
    ended = {name: cluster.wait(number, "COMPLETED", "FAILED", "TIMEOUT") for name, number in numbers.items()}
    return {name: job | {"output": cluster.output(numbers[name])} for name, job in ended.items()}


def test_a_preempted_job_of_an_array_goes_on_bitwise(runs, jobs, whole):
    assert_same_run(runs.logs / "run-1", whole)
    assert runs.notes("run-%a", "signal") == [("SIGTERM", 0), ("SIGTERM", 1)]


def test_before_the_time_limit_every_trainer_saves_and_the_job_goes_on_bitwise(runs, jobs, whole):
    limited = jobs["limited"]
    assert "Time limit ahead" in limited["output"]
    assert "Stopped by a signal" in limited["output"]
    assert runs.notes("limited", "signal") == [("SIGTERM", 0), ("SIGTERM", 1)]
    assert runs.notes("limited", "step") == [(step, rank) for step in range(10) for rank in range(2)], "a repeated step"
    assert (limited["JobState"], limited["Restarts"], limited["ExitCode"]) == ("COMPLETED", "1", "0:0"), limited
    assert_same_run(runs.logs / "limited", whole)


def test_the_time_limit_of_one_task_of_an_array_leaves_the_others_alone(runs, jobs):
    states = [(jobs[name]["JobState"], jobs[name]["Restarts"]) for name in ("first", "last")]
    assert states == [("COMPLETED", "0"), ("COMPLETED", "1")]
    assert ("SIGTERM", 0) in runs.notes("pair-%a", "signal") and len(runs.notes("pair-%a", "signal")) == 1


def test_a_run_that_fails_is_not_requeued(jobs):
    failing = jobs["failing"]
    assert (failing["JobState"], failing["Restarts"], failing["ExitCode"]) == ("FAILED", "0", "2:0"), failing
    assert "nowhere/00000.tar" in failing["output"]


def test_of_two_nodes_one_dies_and_a_spare_takes_its_place(cluster, runs, jobs, whole):
    nodes = jobs["nodes"]
    assert NODES[1] not in cluster.run("scontrol", "show", "hostnames", nodes["NodeList"])
    assert (nodes["JobState"], nodes["Restarts"]) == ("COMPLETED", "1"), nodes
    assert_same_run(runs.logs / "nodes", whole)


def test_slurm_takes_the_job_of_every_recipe(cluster):
    for gpus in {recipes.get(name, loss).gpus for name in recipes.names() for loss in recipes.losses(name)}:
        cluster.run("sbatch", "--test-only", f"--gpus-per-node={min(GPUS, gpus)}", SCRIPT, "--train-data", "X")
