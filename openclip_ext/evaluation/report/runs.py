"""Read the runs to compare: result files, run folders, and repeats of a run with different seeds."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from openclip_ext.evaluation.results import RESULTS_FILE, averages, has_other_size, main_metrics, read_results
from openclip_ext.evaluation.tasks import GROUPS, SUITE_PREFIX, TASKS
from openclip_ext.evaluation.training_log import METRICS_FILE, TrainingLog, read_log

_CHECKPOINT_NAME = re.compile(r"epoch_(\d+)(?:_step_(\d+))?$")


class Value(NamedTuple):
    """A metric of a checkpoint: mean and sample standard deviation over repeated runs."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The results of one checkpoint, with its numbers of completed epochs and training samples (None means unknown).

    ``scores`` has a row per repeat of the run, and a column per task (its main metric) and per complete group (the average).
    """

    label: str  # ``epoch_3``, or the name of the folder or file of the results
    scores: pd.DataFrame
    epoch: int | None = None
    samples: int | None = None
    protocols: frozenset[str] = frozenset()  # model, precision, protocol, and options that the run did not have
    other_sizes: frozenset[str] = frozenset()  # keys of tasks whose data does not have DataComp's size
    samples_of: Mapping[str, int] = field(default_factory=dict)  # number of evaluated samples by task key
    metric_of: Mapping[str, str] = field(default_factory=dict)  # name of the main metric by task key

    @property
    def tasks(self) -> list[str]:
        """Keys of the tasks that every repeat has, in DataComp's order. Unknown keys come last."""
        common = set(self.scores.dropna(axis=1)) - set(GROUPS)
        return [key for key in TASKS if key in common] + sorted(common - set(TASKS))

    def score(self, key: str) -> Value | None:
        """Return a task's main metric, or a group's average; None if a repeat has no result for one of the tasks."""
        if key not in self.scores or self.scores[key].isna().any():
            return None
        values = self.scores[key]
        return Value(values.mean(), values.std() if len(values) > 1 else None)

    def standard_error(self, key: str) -> float | None:
        """Return a task's standard error, as if its metric were the fraction of correct samples; None if unknown."""
        score = self.score(key)
        count = self.samples_of.get(key) or (TASKS[key].size if key in TASKS and key not in self.other_sizes else 0)
        return None if score is None or not count else math.sqrt(max(score.mean * (1 - score.mean), 0) / count)


def scores_of(main_metrics: Mapping[str, float]) -> pd.DataFrame:
    """Return the `Checkpoint.scores` of one repeat."""
    complete = {title: mean for title, (mean, _) in averages(main_metrics).items() if mean is not None}
    return pd.DataFrame([{**main_metrics, **complete}])


@dataclass(frozen=True)
class EvaluatedRun:
    """A run in the report: its evaluated checkpoints in the order of training, and the logs of all its repeats."""

    name: str
    checkpoints: tuple[Checkpoint, ...]
    logs: tuple[TrainingLog, ...] = ()

    @property
    def final(self) -> Checkpoint:
        """The checkpoint with the most evaluated tasks; of several such checkpoints, the last."""
        return max(reversed(self.checkpoints), key=lambda checkpoint: len(checkpoint.tasks))


def read_runs(arguments: Iterable[str]) -> list[EvaluatedRun]:
    """Read runs from arguments ``PATH`` or ``NAME=PATH``. Paths with the same NAME are repeats of one run.

    A path is a result file, a folder with a result file, or a run folder. In a run folder, result files are in
    ``datacomp/CHECKPOINT/``, and ``metrics.jsonl`` contains results of evaluations during training.
    """
    named: dict[str, list[EvaluatedRun]] = {}
    places, own_names = set[Path](), set[str]()
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not separator or os.path.exists(argument):  # Path.exists raises an error for a long name
            name, path = "", argument
        run = _read_run(Path(path))
        place, title = Path(path).resolve(), name or run.name
        if place in places:
            raise ValueError(f"{path} is given twice: remove one of them")
        if title in (own_names if name else named):  # only an explicit NAME marks repeats
            raise ValueError(
                f"{path} has the name of another run, {title}: give the runs different names with NAME=PATH"
            )
        places.add(place)
        if not name:
            own_names.add(title)
        named.setdefault(title, []).append(run)
    return [_merge(name, repeats) for name, repeats in named.items()]


def _read_run(path: Path) -> EvaluatedRun:
    file = path / RESULTS_FILE if (path / RESULTS_FILE).is_file() else path
    if file.is_file():
        # RUN/datacomp/epoch_3 gets the name RUN/epoch_3.
        parts = [part for part in file.parent.resolve().parts[-3:] if part != "datacomp"]
        return EvaluatedRun("/".join(parts[-2:]), (_from_file(file, path.stem if file == path else path.name),))
    if not path.is_dir():
        raise ValueError(f"{path} not found: expected a result file ({RESULTS_FILE}) or a run folder.")
    log = read_log(path)
    found = {}
    for one in log.validations:
        scores = {key: one.values[SUITE_PREFIX + key] for key in TASKS if SUITE_PREFIX + key in one.values}
        if scores:
            label = f"epoch_{one.epoch}"
            found[label] = Checkpoint(label, scores_of(scores), protocols=frozenset({"evaluation during training"}))
    for file in sorted([*path.glob(f"datacomp/*/{RESULTS_FILE}"), *path.glob(f"*/{RESULTS_FILE}")]):
        label = file.parent.name
        from_file = _from_file(file, label)
        # A result file replaces the evaluation during training if the file contains at least as many tasks.
        if label not in found or len(from_file.tasks) >= len(found[label].tasks):
            found[label] = from_file
    if not found and not log.steps and not log.validations:
        content = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"{path} has neither logged steps nor results: expected lines of steps or evaluations in {METRICS_FILE}, "
            f"{RESULTS_FILE} or datacomp/CHECKPOINT/{RESULTS_FILE}, found {content}."
        )
    placed = [_place(entry, log.steps) for entry in found.values()]
    # Checkpoints whose epoch is unknown come first. The shorter of two labels of an epoch has the lower step.
    placed.sort(key=lambda one: (*((-1, 0) if one.epoch is None else (one.epoch, len(one.label))), one.label))
    return EvaluatedRun(path.resolve().name, tuple(placed), (log,) if log.steps or log.validations else ())


def _from_file(path: Path, label: str) -> Checkpoint:
    lines = read_results(path)
    if not lines:
        raise ValueError(f"{path} has no results: run openclip-ext evaluate first.")
    identities = [line["run"] for line in lines if isinstance(line.get("run"), dict)]
    names = ("model", "precision", "protocol", "options")
    return Checkpoint(
        label,
        scores_of(main_metrics(lines)),
        protocols=frozenset(" ".join(str(run[name]) for name in names if name in run) for run in identities),
        other_sizes=frozenset(line["key"] for line in lines if has_other_size(line)),
        samples_of={line["key"]: line["samples"] for line in lines if isinstance(line.get("samples"), int)},
        metric_of={line["key"]: line["metric"] for line in lines if line.get("metric")},
    )


def _place(checkpoint: Checkpoint, steps: Sequence[Mapping[str, Any]]) -> Checkpoint:
    """Add the epoch and the number of training samples to a checkpoint. Between logged steps, samples are interpolated."""
    match = _CHECKPOINT_NAME.match(checkpoint.label)
    if match is None:
        return checkpoint
    epoch, step = int(match[1]), match[2]
    if step is None:  # at the end of an epoch, whose last step is always logged
        samples = max((logged["samples"] for logged in steps if logged["epoch"] < epoch), default=None)
    else:
        taken, seen = [0, *(logged["step"] + 1 for logged in steps)], [0, *(logged["samples"] for logged in steps)]
        samples = round(float(np.interp(int(step), taken, seen))) if steps else None
    return replace(checkpoint, epoch=epoch, samples=samples)


def _merge(name: str, repeats: Sequence[EvaluatedRun]) -> EvaluatedRun:
    """Merge repeats of a run: checkpoints with equal labels, or, if each repeat has only one checkpoint, these checkpoints."""
    logs = tuple(log for run in repeats for log in run.logs)
    if len(repeats) == 1 or not any(run.checkpoints for run in repeats):
        return EvaluatedRun(name, repeats[0].checkpoints, logs)
    by_label = [{checkpoint.label: checkpoint for checkpoint in run.checkpoints} for run in repeats]
    if all(len(found) == 1 for found in by_label):
        groups = [[next(iter(found.values())) for found in by_label]]
    else:
        groups = [[found[label] for found in by_label] for label in by_label[0] if all(label in of for of in by_label)]
    if not groups:
        labels = "; ".join(", ".join(found) or "none" for found in by_label)
        raise ValueError(f"the {len(repeats)} repeats of {name} have no checkpoint label in common, found: {labels}")
    merged = [
        replace(
            parts[0],
            label=", ".join(dict.fromkeys(part.label for part in parts)),
            scores=pd.concat([part.scores for part in parts]),
            samples=_mean([part.samples for part in parts]),
            protocols=frozenset().union(*(part.protocols for part in parts)),
            other_sizes=frozenset().union(*(part.other_sizes for part in parts)),
        )
        for parts in groups
    ]
    return EvaluatedRun(name, tuple(merged), logs)


def _mean(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return round(float(np.mean(known))) if len(known) == len(numbers) else None
