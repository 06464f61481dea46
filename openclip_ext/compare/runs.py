"""Define runs, store their results, and decide which run next: all settings with one seed, then the best with the others."""

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
    """Describes one training run completely, except for the code. Its row of results begins with these fields.

    Attributes:
        data: digest of the data, and of everything that no other field describes.
        schedule: name of the combination of batch size and length.
        batch_size: samples of an optimizer step.
        seed: seed of start weights, order and augmentation.
        family: the settings of a family compete with each other; families are compared.
        setting: ``loss`` and ``options`` for ``create_loss``, and further keys that the kind of experiment knows.
        epoch_samples: samples of an epoch; None means all, in whole batches.
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
        """Return a digest that is equal for equal runs; the names of family and schedule do not enter it.

        The rows in docs/benchmarks have these ids, also for runs without ``epoch_samples``: they must not change.
        """
        content = {name: value for name, value in asdict(self).items() if name not in ("family", "schedule")}
        if self.epoch_samples is None:
            del content["epoch_samples"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Contest:
    """Tunes several families equally, and compares them with paired seeds.

    ``families`` holds for each family a run of every setting with the first seed; the first family is the baseline.
    """

    families: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]

    def ranked(self, family: str, results: Results) -> list[Run]:
        """Return the runs of a family's settings, the best first; no runs while some are unfinished."""
        tried = self.families[family]
        if any(run.id not in results for run in tried):
            return []
        return sorted(tried, key=lambda run: -score(results[run.id]))

    def by_setting(self, family: str, results: Results) -> list[list[Run]]:
        """Return the runs that are decided so far, a list for each setting with its seeds; the best comes first."""
        ranked = self.ranked(family, results)
        if not ranked:
            return [[run] for run in self.families[family]]
        return [[replace(ranked[0], seed=seed) for seed in self.seeds], *([run] for run in ranked[1:])]

    def best(self, family: str, results: Results) -> list[Run]:
        """Return the runs of the best setting with all seeds; none before it is chosen."""
        return self.by_setting(family, results)[0] if self.ranked(family, results) else []

    def decided(self, results: Results) -> list[Run]:
        """Return all decided runs, seed by seed and family by family, so that pairs are complete early."""
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
    """Return the score on validation data, by which settings are chosen and of which nothing is reported.

    It is negative for a run that was stopped or failed, which therefore comes after all finished runs.
    """
    return row["val"]["mean"]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by id; no rows if there is no file. A line that a killed process left is skipped."""
    return {row["id"]: row for row in json_lines.read(path) if "id" in row}


class ResultsFile:
    """A file with a JSON line for each finished run, which one process at a time may write: see :func:`held`.

    Attributes:
        rows: rows of finished runs by id.
        failed: rows of failed runs, which are not written, so the next call tries these runs again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("ab") as file:
            file.truncate(path.read_bytes().rfind(b"\n") + 1)  # drops an incomplete last line
        self.rows = read_results(path)
        self.failed: dict[str, dict[str, Any]] = {}

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """Return the rows of the runs that have ended, well or not."""
        return {**self.rows, **self.failed}

    def keep(self, name: str, row: dict[str, Any] | None, failure: str = "") -> None:
        """Append the row of a run that has ended, or note its failure."""
        if row is None:
            self.failed[name] = {"id": name, "val": {"mean": -1.0}, "failed": failure}
            return
        self.rows[name] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_lines.dumps(row) + "\n")
