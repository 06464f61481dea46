"""Runs, their order (all settings with one seed, then the best settings with the other seeds), and their results."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from openclip_ext.files import json_lines

# Rows of finished runs by the run's id.
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """A complete description of a training run, except the code; its row of results starts with these fields.

    Attributes:
        data: digest of the data, and of all that no other field describes.
        schedule: name of the combination of batch size and length.
        batch_size: samples of an optimizer step.
        seed: seed of initial weights, order and augmentation.
        family: settings of a family compete; families are compared.
        setting: ``loss`` and ``options`` for ``create_loss``, and further keys of the experiment.
        epoch_samples: samples of an epoch. None (default) means all, in full batches.
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
        """Return a digest of the run without the names of family and schedule.

        The rows in docs/benchmarks have these ids, so they must not change, even without ``epoch_samples``.
        """
        content = {name: value for name, value in asdict(self).items() if name not in ("family", "schedule")}
        if self.epoch_samples is None:
            del content["epoch_samples"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Contest:
    """A comparison of equally tuned families with paired seeds.

    ``families`` has for each family a run of every setting with the first seed; the first family is the baseline.
    """

    families: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]

    def ranked(self, family: str, results: Results) -> list[Run]:
        """Return the runs of a family's settings, the best first; empty while some are unfinished."""
        tried = self.families[family]
        if any(run.id not in results for run in tried):
            return []
        return sorted(tried, key=lambda run: -score(results[run.id]))

    def by_setting(self, family: str, results: Results) -> list[list[Run]]:
        """Return the runs decided so far, a list for each setting with its seeds; the best setting comes first."""
        best = self.best(family, results)
        if not best:
            return [[run] for run in self.families[family]]
        return [best, *([run] for run in self.ranked(family, results)[1:])]

    def best(self, family: str, results: Results) -> list[Run]:
        """Return the runs of the best setting with all seeds; empty before it is chosen."""
        return [replace(run, seed=seed) for run in self.ranked(family, results)[:1] for seed in self.seeds]

    def decided(self, results: Results) -> list[Run]:
        """Return all decided runs in the order of seeds and settings, so that pairs are complete early."""
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
    """Return the validation score that chooses settings; it is negative for a run that stopped or failed."""
    return row["val"]["mean"]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by id without broken lines; empty if there is no file."""
    return {row["id"]: row for row in json_lines.read(path) if "id" in row}


class ResultsFile:
    """A file with a JSON line for each finished run; callers lock its folder.

    Attributes:
        rows: rows of finished runs by id.
        failed: rows of failed runs, which are not in the file, so that the next call runs them again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("ab") as file:
            file.truncate(path.read_bytes().rfind(b"\n") + 1)  # removes an incomplete last line
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
