"""Grids of runs: the order of the runs, the results file, and the processes that execute runs."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from openclip_ext.compare.process_pool import ProcessPool
from openclip_ext.compare.runs import Contest, ResultsFile, Run, read_results

RUN = Run("data", "model", "short", 4, 1, 1e-3, 0, "base", {"loss": "openclip"})


def contest() -> Contest:
    tried = {
        name: [replace(RUN, family=name, setting={"loss": name, "setting": number}) for number in range(3)]
        for name in ("base", "a")
    }
    return Contest(tried, (0, 1, 2))


def finish(runs: list[Run], **scores: float) -> dict[str, dict]:
    """Return the results of runs. The score is 0.1, or the one in ``scores`` for a family and setting such as ``base1``."""
    names = [f"{run.family}{run.setting['setting']}" for run in runs]
    return {
        run.id: {"id": run.id, "val": {"mean": scores.get(name, 0.1)}} for run, name in zip(runs, names, strict=True)
    }


def names(runs: list[Run]) -> list[tuple[str, int, int]]:
    return [(run.family, run.setting["setting"], run.seed) for run in runs]


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


def test_all_settings_run_the_first_seed_and_the_best_the_others():
    plan, results = contest(), {}
    first = plan.pending(results)
    assert names(first) == [(family, setting, 0) for setting in range(3) for family in ("base", "a")]
    results |= finish(first[:-1])
    assert plan.pending(results) == [*first[-1:], *plan.pending(results)[1:]]
    assert plan.best("a", results) == []  # a setting's first seed is missing
    results |= finish(first[-1:], a2=0.2)
    others = plan.pending(results)
    assert names(others) == [("base", 0, 1), ("a", 2, 1), ("base", 0, 2), ("a", 2, 2)]
    results |= finish(others)
    assert plan.pending(results) == []
    assert names(plan.best("a", results)) == [("a", 2, 0), ("a", 2, 1), ("a", 2, 2)]
    assert [len(runs) for runs in plan.by_setting("a", results)] == [3, 1, 1]


class Task:
    """A picklable task. The setting of its run defines whether it succeeds, fails or is killed."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, device: torch.device, seen) -> dict:
        seen(3)
        if self.run.setting["setting"] == "fails":
            raise ValueError("too bad")
        if self.run.setting["setting"] == "fails without a message":
            raise ValueError
        if self.run.setting["setting"] == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": self.run.id, "val": {"mean": 0.5}}


def test_a_run_that_fails_costs_nothing_but_itself(tmp_path):
    results, workers = ResultsFile(tmp_path / "runs.jsonl"), ProcessPool(2)
    words = ("works", "fails", "is killed", "fails without a message")
    runs = [replace(RUN, setting={"setting": word}, seed=seed) for seed in (0, 1) for word in words]
    assert workers.work_off(lambda: {run.id: Task(run) for run in runs if run.id not in results.known}, results.keep)
    assert sorted(row["val"]["mean"] for row in results.known.values()) == [*[-1] * 6, 0.5, 0.5]
    killed = "killed by SIGKILL (is memory full? Give fewer --processes or a smaller --batch-size)"
    failed = {row["failed"].strip().splitlines()[-1] for row in results.failed.values()}
    assert failed == {"too bad", killed, "ValueError"}
    assert workers.samples == 8 * 3
    assert len(read_results(tmp_path / "runs.jsonl")) == 2
