"""The table of a study's trials: which runs are planned, running, done or failed."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from openclip_ext.files import json_lines

# Rows of results by run id.
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """Everything that defines a training run, except the code. A row of results starts with these fields.

    Attributes:
        data: Digest of the data, model, preprocessing and other settings that are equal in all runs.
        schedule: Name of the combination of batch size and length.
        batch_size: Samples per optimizer step.
        seed: Seed of initial weights, order and augmentation.
        family: Name of a family of settings. The best setting of each family is compared with the other families.
        setting: ``loss`` and ``options`` for ``create_loss``, and other keys that an experiment defines.
        epoch_samples: Samples per epoch. None (default) means all samples, in full batches.
    """

    data: str
    model: str
    schedule: str
    batch_size: int
    epochs: int
    lr: float
    seed: int
    family: str
    setting: Mapping[str, Any]
    epoch_samples: int | None = None

    @property
    def id(self) -> str:
        """Return a digest of the run that ignores the names of family and schedule.

        The rows in docs/benchmarks have these ids, so the ids must not change. A run without ``epoch_samples`` has the
        id from before this field existed.
        """
        content = {name: value for name, value in asdict(self).items() if name not in ("family", "schedule")}
        if self.epoch_samples is None:
            del content["epoch_samples"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Rung:
    """Runs of equal length: the number of samples per run, and the seeds. The next rung is longer, or has more seeds."""

    samples: int
    seeds: Sequence[int]


def score(row: Mapping[str, Any]) -> float:
    """Return a run's validation score, by which settings are chosen. It is −∞ if the run failed."""
    return -math.inf if "failed" in row else row["val"]["mean"]


def ranked(runs: Iterable[Run], results: Results) -> list[Run]:
    """Return runs, the best first; empty while one of them has no result."""
    tried = list(runs)
    return sorted(tried, key=lambda run: -score(results[run.id])) if all(run.id in results for run in tried) else []


def chosen(families: Mapping[str, Sequence[Run]], seeds: Sequence[int], results: Results) -> list[Run]:
    """Return the runs to execute: those of each family's settings, then the best settings with the other ``seeds``.

    ``families`` has the runs of all settings with the first seed. The best setting is known when these have results.
    """
    first = itertools.chain.from_iterable(itertools.zip_longest(*families.values()))
    best = [run for runs in families.values() for run in ranked(runs, results)[:1]]
    return [*filter(None, first), *(replace(run, seed=seed) for seed in seeds[1:] for run in best)]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the finished runs in a file by run id, without broken lines; empty if there is no file."""
    return {row["id"]: row for row in json_lines.read(path) if "id" in row and row.get("status", "done") == "done"}


class Trials:
    """A table of runs in a file that only grows. Callers must lock its folder.

    A row has the ``id`` of a run and its ``status``: ``planned`` (with the run and its ``rung``), ``running``, ``done`` (with
    the results; also if the row has no status) or ``failed`` (with the reason). The last row of a run counts. Runs that failed
    or did not end in an earlier call are executed again. Rows without ``id`` plan a rung; the first also has the ``study``.

    Attributes:
        study: What all rungs have in common; None in a new table.
        rungs: The rungs planned so far.
        planned: The runs of each rung by id, in the order of planning.
        done, failed: Rows of finished runs, and of those that failed in this call, by id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        json_lines.truncate(path, keep=lambda row: True)  # removes the incomplete last line of a killed process
        self.study: dict[str, Any] | None = None
        self.rungs: list[Rung] = []
        self.planned: list[dict[str, Run]] = []
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        for row in json_lines.read(path):
            self._take(row)
        self.failed.clear()

    def _take(self, row: dict[str, Any]) -> None:
        status = row.get("status", "done")
        if "id" not in row:
            self.study = row.get("study", self.study)
            self.drop_rungs(row["rung"])  # it may have been planned before, for another time
            self.rungs.append(Rung(row["samples"], tuple(row["seeds"])))
            self.planned.append({})
        elif status == "planned":
            self.planned[row["rung"]][row["id"]] = Run(**{one.name: row[one.name] for one in fields(Run)})
        elif status == "done":
            self.done[row["id"]] = row
        elif status == "failed":
            self.failed[row["id"]] = row

    def _add(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_lines.dumps(row) + "\n")
        self._take(row)

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """Return the rows of finished and failed runs."""
        return {**self.done, **self.failed}

    def plan_rung(self, rung: Rung, **more: Any) -> None:
        """Plan the next rung. With the first, give the ``study``."""
        self._add({"rung": len(self.rungs), "status": "planned", **asdict(rung), **more})

    def drop_rungs(self, first: int) -> None:
        """Forget the rungs from number ``first``, so that they can be planned anew. The results of their runs stay."""
        del self.rungs[first:], self.planned[first:]

    def plan(self, rung: int, runs: Iterable[Run]) -> None:
        """Plan runs of a rung, unless they are planned already."""
        for run in runs:
            if run.id not in self.planned[rung]:
                self._add({"id": run.id, "rung": rung, "status": "planned", **asdict(run)})

    def start(self, name: str, **about: Any) -> None:
        """Record that a run has started."""
        self._add({"id": name, "status": "running", **about})

    def keep(self, name: str, row: dict[str, Any] | None, failure: str = "") -> None:
        """Record the result of a run, or its failure."""
        self._add({"id": name, "status": "failed", "failed": failure} if row is None else {**row, "status": "done"})

    def settings(self, rung: int, loss: str) -> list[list[Run]]:
        """Return a loss's planned runs in a rung: a list for each setting, ordered by seed.

        The best setting is first. Before all settings have a result with the first seed, the order is that of planning.
        """
        seeds = self.rungs[rung].seeds
        own = [run for run in self.planned[rung].values() if run.family == loss]
        first = [run for run in own if run.seed == seeds[0]]
        of_setting = [[replace(run, seed=seed) for seed in seeds] for run in ranked(first, self.known) or first]
        return [[run for run in runs if run.id in self.planned[rung]] for runs in of_setting]

    def best(self, rung: int, loss: str) -> list[Run]:
        """Return the runs of a loss's best setting with the seeds of a rung; empty before this setting is known."""
        settings = self.settings(rung, loss)
        return settings[0] if ranked([runs[0] for runs in settings], self.known) else []
