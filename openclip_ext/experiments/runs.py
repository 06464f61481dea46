"""A run, and which runs come next: all settings of each family with the first seed, then the best with the other seeds."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

# Rows of finished runs by the run's id.
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """One training run: everything that its numbers follow from, but the code. Its row of results begins with these fields.

    Attributes:
        data: digest of the data, and of all else that no other field says.
        model: OpenCLIP's name.
        schedule: name of the batch size and the length.
        batch_size: samples of an optimizer step.
        epochs: length of the run.
        lr: learning rate.
        seed: of start weights, order and augmentation.
        family: whose settings compete with each other; families are compared.
        setting: ``loss`` and ``options`` for ``create_loss``, and what else the kind of experiment knows.
        epoch_samples: samples of an epoch; None: all, in whole batches.
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
        """Return a digest, equal for equal runs, whatever their family and schedule are called."""
        content = {name: value for name, value in asdict(self).items() if name not in ("family", "schedule")}
        if self.epoch_samples is None:  # rows from before there was this field stay valid
            del content["epoch_samples"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Contest:
    """Families that are tuned equally, and then compared with paired seeds.

    Attributes:
        families: the settings' runs of each family, with the first seed; the first family is the one to beat.
        seeds: all of them.
        finalists: so many settings of a family run all seeds: the best by their rows' ``val``.
    """

    families: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]
    finalists: int = 1

    def ranked(self, family: str, results: Results) -> list[Run]:
        """Return the runs of a family's settings, the best first; none while some are not finished."""
        tried = self.families[family]
        if any(run.id not in results for run in tried):
            return []
        return sorted(tried, key=lambda run: -score(results[run.id]))

    def by_setting(self, family: str, results: Results) -> list[list[Run]]:
        """Return the family's runs as far as they are decided, a list of seeds for each setting; the finalists come first."""
        ranked = self.ranked(family, results)
        if not ranked:
            return [[run] for run in self.families[family]]
        every = [[replace(run, seed=seed) for seed in self.seeds] for run in ranked[: self.finalists]]
        return [*every, *([run] for run in ranked[self.finalists :])]

    def best(self, family: str, results: Results) -> list[Run]:
        """Return the runs of the best finalist, by the seeds that all finalists have finished; none before it is chosen."""
        if not self.ranked(family, results):
            return []
        finalists = self.by_setting(family, results)[: self.finalists]
        complete = [runs for runs in zip(*finalists, strict=True) if all(run.id in results for run in runs)]
        totals = [sum(score(results[run.id]) for run in runs) for runs in zip(*complete, strict=True)]
        return finalists[totals.index(max(totals))]

    def decided(self, results: Results) -> list[Run]:
        """Return all runs that are decided, seed by seed, the families in turn, so that pairs are complete early."""
        runs = [
            ((self.seeds.index(run.seed), place), run)
            for family in self.families
            for place, of_setting in enumerate(self.by_setting(family, results))
            for run in of_setting
        ]
        return [run for _, run in sorted(runs, key=lambda entry: entry[0])]

    def pending(self, results: Results) -> list[Run]:
        """Return the runs that can start now, the most urgent first."""
        return [run for run in self.decided(results) if run.id not in results]


def score(row: Mapping[str, Any]) -> float:
    """Return what settings are chosen by: the score on validation data, which no reported number is of.

    Negative for a run that was stopped, or failed: it comes after all that are finished.
    """
    return row["val"]["mean"]
