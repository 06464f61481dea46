"""The table of trials: names of runs, states after a restart, the best settings, and the processes that execute runs."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openclip_ext.compare.comparison import winners
from openclip_ext.compare.config import parse
from openclip_ext.compare.pool import ProcessPool
from openclip_ext.compare.trials import Run, Rung, Trials, read_results
from openclip_ext.data.processes import available_cores

RUN = Run("data", "model", "short", 4, 1, 1e-3, 0, "base", {"loss": "openclip"})


def test_a_run_is_named_by_what_it_does():
    assert replace(RUN, family="other", schedule="other").id == RUN.id
    changes = [{"seed": 1}, {"data": "more"}, {"lr": 1.0}, {"epochs": 2}, {"epoch_samples": 8}, {"setting": {}}]
    assert len({RUN.id, *(replace(RUN, **change).id for change in changes)}) == 7


def test_the_rows_of_the_docs_have_the_names_of_their_runs():
    """The program that makes tables finds rows by the id of a run, so published rows must keep their ids."""
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "icons" / "icons-30-epochs.jsonl"
    rows = read_results(path)
    assert len(rows) > 10
    for name, row in rows.items():
        assert Run(**{field: row[field] for field in vars(RUN) if field in row}).id == name


@pytest.mark.parametrize("name", ["cpu", "cuda:1", "cuda"])
def test_a_machine_with_gpus_uses_the_device_that_was_chosen(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 64)
    (tmp_path / "a.tar").touch()
    config, training = parse([str(tmp_path / "a.tar"), "--device", name, "--precision", "fp32"])
    assert training.device == name
    assert config.processes == {"cpu": available_cores(), "cuda:1": 1, "cuda": 64}[name]


def runs(losses: dict[str, int]) -> list[Run]:
    """Return, for each loss, runs with this many learning rates 1, 2, ..."""
    return [
        replace(RUN, family=loss, setting={"loss": loss}, lr=lr) for loss in losses for lr in range(1, losses[loss] + 1)
    ]


def test_the_best_losses_and_settings_go_on_also_after_a_restart(tmp_path):
    trials = Trials(tmp_path / "trials.jsonl")
    trials.plan_rung(Rung(8, (0, 1)), study={"flags": "f"})
    planned = runs({"openclip": 3, "a": 2, "b": 1, "c": 1})
    trials.plan(0, planned)
    scores = {"openclip": 0.1, "a": 0.3, "b": 0.2, "c": 0.4}
    for run in planned[:-1]:
        trials.start(run.id, pid=1)
        failure = "too bad" if (run.family, run.lr) == ("a", 2) else ""
        trials.keep(
            run.id, None if failure else {"id": run.id, "val": {"mean": scores[run.family] + run.lr / 100}}, failure
        )
    assert trials.best(0, "c") == [] and [run.lr for run in trials.best(0, "openclip")] == [3]
    trials.plan(0, [replace(planned[2], seed=1)])
    assert [(run.lr, run.seed) for run in trials.best(0, "openclip")] == [(3, 0), (3, 1)]
    trials.keep(planned[-1].id, {"id": planned[-1].id, "val": {"mean": 0.4}})
    found = {loss: [run.lr for run in best] for loss, best in winners(trials, 0, list(scores)).items()}
    assert found == {"openclip": [3, 2], "c": [1], "a": [1]}
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"id": "killed during a w')
    again = Trials(tmp_path / "trials.jsonl")
    assert (again.study, again.rungs, again.planned) == (trials.study, trials.rungs, trials.planned)
    assert again.done == trials.done and not again.failed  # a failed run is executed again
    again.drop_rungs(0)
    again.plan_rung(Rung(4, (0,)))
    assert Trials(tmp_path / "trials.jsonl").rungs == [Rung(4, (0,))]


class Task:
    """A picklable task that succeeds, fails or is killed."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, device: torch.device, seen) -> dict:
        seen(3)
        if self.what.startswith("fails"):
            raise ValueError(*self.what.split()[1:])
        if self.what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"val": {"mean": 0.5}, "device": str(device)}


def test_a_run_that_fails_costs_nothing_but_itself():
    pool, ended, started = ProcessPool(2, torch.device("meta")), {}, []
    expected = {
        "works": "",
        "fails bad": "bad",
        "is killed": "killed by SIGKILL (is memory full?",
        "fails": "ValueError",
    }
    names = [f"{what}/{copy}" for copy in (0, 1) for what in expected]
    pending = {name: Task(name.split("/")[0]) for name in names}

    def tasks() -> dict[str, Task]:
        return {name: task for name, task in pending.items() if name not in ended}

    def keep(name: str, row: dict | None, failure: str) -> None:
        ended[name] = row, failure

    assert pool.work_off(tasks, keep, on_start=lambda name, pid: started.append(name))
    assert sorted(started) == sorted(ended) == sorted(names) and pool.samples == 8 * 3
    for name, (row, failure) in ended.items():
        assert (row and row["device"]) == ("meta" if name.startswith("works") else None)
        assert failure.strip().rpartition("\n")[2].startswith(expected[name.split("/")[0]])


@pytest.mark.parametrize("after", [0, 1])
def test_the_pool_kills_its_tasks_when_the_time_is_over(after):
    pool, ended = ProcessPool(1, torch.device("cpu")), []
    left = iter([True] * after + [False] * 9)
    assert not pool.work_off(lambda: {"one": Task("works")}, lambda *row: ended.append(row), lambda: next(left))
    assert len(ended) <= after
