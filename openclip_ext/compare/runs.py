"""Runs, their results and their order: first all settings with one seed, then the best settings with the other seeds."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
class Contest:
    """A comparison of families of settings. All families are tuned equally and use the same seeds.

    ``families`` contains, for each family, the runs of all its settings with the first seed. The first family is the baseline.
    """

    families: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]

    def ranked(self, family: str, results: Results) -> list[Run]:
        """Return a family's runs with the first seed, the best first; empty while one of them is unfinished."""
        tried = self.families[family]
        if any(run.id not in results for run in tried):
            return []
        return sorted(tried, key=lambda run: -score(results[run.id]))

    def by_setting(self, family: str, results: Results) -> list[list[Run]]:
        """Return the runs chosen so far, a list for each setting. The best setting, if chosen, is first and has all seeds."""
        best = self.best(family, results)
        if not best:
            return [[run] for run in self.families[family]]
        return [best, *([run] for run in self.ranked(family, results)[1:])]

    def best(self, family: str, results: Results) -> list[Run]:
        """Return the runs of the best setting with all seeds; empty before the best setting is chosen."""
        return [replace(run, seed=seed) for run in self.ranked(family, results)[:1] for seed in self.seeds]

    def decided(self, results: Results) -> list[Run]:
        """Return all runs chosen so far, ordered by seed, then by setting, to complete pairs with equal seeds early."""
        placed = [
            (self.seeds.index(run.seed), place, run)
            for family in self.families
            for place, of_setting in enumerate(self.by_setting(family, results))
            for run in of_setting
        ]
        return [run for *_, run in sorted(placed, key=lambda entry: entry[:2])]

    def pending(self, results: Results) -> list[Run]:
        """Return the runs that can start now, the most urgent first."""
        return [run for run in self.decided(results) if run.id not in results]


def score(row: Mapping[str, Any]) -> float:
    """Return a run's validation score, by which settings are chosen. It is negative if the run failed."""
    return row["val"]["mean"]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by run id, without broken lines; empty if there is no file."""
    return {row["id"]: row for row in json_lines.read(path) if "id" in row}


class ResultsFile:
    """A file with a JSON line for each finished run. Callers must lock its folder.

    Attributes:
        rows: Rows of finished runs by id.
        failed: Rows of failed runs by id. They are not written to the file, so the next call executes these runs again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        json_lines.truncate(path, keep=lambda row: True)  # removes the incomplete last line of a killed process
        self.rows = read_results(path)
        self.failed: dict[str, dict[str, Any]] = {}

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """Return the rows of finished and failed runs."""
        return {**self.rows, **self.failed}

    def keep(self, name: str, row: dict[str, Any] | None, failure: str = "") -> None:
        """Append the row of a finished run, or record its failure."""
        if row is None:
            self.failed[name] = {"id": name, "val": {"mean": -1.0}, "failed": failure}
            return
        self.rows[name] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_lines.dumps(row) + "\n")
