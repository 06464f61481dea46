"""Build tables from the runs' training logs: settings that differ, time, and the last validation."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openclip_ext.evaluation.report.runs import EvaluatedRun
from openclip_ext.evaluation.statistics import seeds_interval
from openclip_ext.evaluation.tasks import SUITE_PREFIX
from openclip_ext.evaluation.training_log import TrainingLog, metric_names
from openclip_ext.pages.charts import short_number
from openclip_ext.pages.rendering import with_minus

# Settings that do not change a result: paths, logging, and how processes are started.
_NOT_COMPARED = {
    "name", "logs", "log_path", "checkpoint_path", "tensorboard_path", "resume", "rank", "local_rank", "world_size",
    "distributed", "device", "debug", "report_to", "remote_sync", "remote_sync_frequency", "save_every_steps",
    "log_every_n_steps", "save_frequency",
}  # fmt: skip
_SHARE = re.compile(r"^kept_|R@|top\d|acc")  # in the names of recalls, accuracies and main metrics
Table = list[list[str]]


def training_tables(runs: Sequence[EvaluatedRun]) -> list[Table]:
    """Return the non-empty tables of runs with logs. The first row of each table is its header."""
    names = [run.name for run in runs]
    found = (
        ("settings that differ", _differing_settings(runs)),
        ("training", _overview(runs) if any(log.steps for run in runs for log in run.logs) else []),
        ("before training", _last_validation(runs, until=0)),
        ("last validation", _last_validation(runs)),
        ("chosen mix", _chosen_mix(runs)),
    )
    return [[[title, *names], *rows] for title, rows in found if rows]


def validation_metrics(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return the names of validation metrics without DataComp's tasks, because these have their own tables."""
    return [name for name in metric_names(log for run in runs for log in run.logs) if not name.startswith(SUITE_PREFIX)]


def _differing_settings(runs: Sequence[EvaluatedRun]) -> Table:
    """Return one row per setting that differs between runs, with the values of all runs."""
    logs = [log for run in runs for log in run.logs]
    names = [name for name in (logs[0].settings if logs else ()) if all(name in log.settings for log in logs)]
    rows = []
    for name in names:
        values = [", ".join(dict.fromkeys(str(log.settings.get(name, "")) for log in run.logs)) for run in runs]
        if name not in _NOT_COMPARED and len(set(values)) > 1:
            rows.append([name if name.startswith("loss") else f"--{name.replace('_', '-')}", *values])
    return rows


def _overview(runs: Sequence[EvaluatedRun]) -> Table:
    def row(title: str, value: Callable[[TrainingLog], float | None], show: Callable[[float], str]) -> list[str]:
        cells = []
        for run in runs:
            found = [number for log in run.logs if log.steps and (number := value(log)) is not None]
            cells.append(with_minus(show(statistics.fmean(found))) if found else "-")
        return [title, *cells]

    unfinished = [[log.unfinished for log in run.logs if log.unfinished] for run in runs]
    steps = [", ".join(found) or "all" for found in unfinished]
    return [
        *([["logged steps", *steps]] if any(unfinished) else []),
        row("samples seen", lambda log: log.steps[-1]["samples"], short_number),
        row("training time, minutes", lambda log: _seconds(log) / 60, "{:.1f}".format),
        row("samples a second", lambda log: log.steps[-1]["samples"] / max(_seconds(log), 1e-9), short_number),
        row("InfoNCE, last tenth", lambda log: _last_tenth(log, "infonce"), "{:.3f}".format),
        row("temperature at the end", lambda log: _last_tenth(log, "temperature"), "{:.3f}".format),
        row("skipped steps", lambda log: log.steps[-1].get("skipped_steps"), "{:.0f}".format),
        row("bad samples", lambda log: log.steps[-1].get("bad_samples"), "{:.0f}".format),
    ]


def _seconds(log: TrainingLog) -> float:
    """Return the duration of the training steps in seconds, without evaluations and saves."""
    before, total = 0, 0.0
    for step in log.steps:
        total += (step["samples"] - before) / max(step.get("samples_per_second") or math.inf, 1e-9)
        before = step["samples"]
    return total


def _last_tenth(log: TrainingLog, key: str) -> float | None:
    last = log.steps[-max(1, len(log.steps) // 10) :]
    values = [step[key] for step in last if step.get(key) is not None]
    return statistics.fmean(values) if values else None


def _last_validation(runs: Sequence[EvaluatedRun], until: float = math.inf) -> Table:
    """Return one row per metric: mean ± standard deviation over repeats, and the difference from the first run.

    Recalls and accuracies are in percent. Validations after epoch ``until`` are ignored.

    If both runs have repeats with the same seeds, the difference has a 95 % interval over seeds. If the runs' last epochs
    differ, each cell also shows the epoch.
    """
    rows = []
    for name in validation_metrics(runs):
        epochs, values = zip(*(_last_by_seed(run, name, until) for run in runs), strict=True)
        if not any(values):
            continue
        marks = [f", epoch {epoch}" if len({*epochs} - {None}) > 1 and epoch is not None else "" for epoch in epochs]
        if _SHARE.search(name):
            name = f"{name}, %"
            values = tuple({seed: 100 * value for seed, value in of_run.items()} for of_run in values)
        rows.append([name, *(_cell(value, values[0]) + mark for value, mark in zip(values, marks, strict=True))])
    return rows


def _chosen_mix(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the mixes that fine-tunings chose: the share α of the trained weights, and a row per score in percent."""
    rows = []
    for name in dict.fromkeys(name for run in runs for log in run.logs for name in log.mix):
        title, factor = (name, 1) if name == "α" else (f"{name}, %", 100)
        values = [
            _by_seed(run, [factor * log.mix[name] for log in run.logs])
            if all(name in log.mix for log in run.logs)
            else {}
            for run in runs
        ]
        rows.append([title, *(_cell(value, values[0]) for value in values)])
    return rows


def _last_by_seed(run: EvaluatedRun, metric: str, until: float) -> tuple[int | None, dict[Any, float]]:
    """Return an epoch and each repeat's value of a metric at its end, by seed.

    The epoch is the last one, up to ``until``, that all repeats have. If there is no such epoch, the result is None and an
    empty dictionary.
    """
    by_epoch = [{one.epoch: one.values[metric] for one in log.validations if metric in one.values} for log in run.logs]
    reached = [epoch for epoch in by_epoch[0] if (math.inf if epoch is None else epoch) <= until]
    common = [epoch for epoch in reached if all(epoch in values for values in by_epoch)]
    if not common:
        return None, {}
    return common[-1], _by_seed(run, [values[common[-1]] for values in by_epoch])


def _by_seed(run: EvaluatedRun, values: Sequence[float]) -> dict[Any, float]:
    """Return the values of a run's repeats by their seeds, or by number if seeds are unknown or repeated."""
    found: dict[Any, float] = {}
    for number, (log, value) in enumerate(zip(run.logs, values, strict=True)):
        seed = log.settings.get("seed")
        found[seed if seed is not None and seed not in found else f"repeat {number}"] = value
    return found


def _cell(values: Mapping[Any, float], first: Mapping[Any, float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values.values())
    text = f"{mean:.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values.values()):.2g}"
    if values is first or not first:
        return with_minus(text)
    text += f", {round(mean - statistics.fmean(first.values()), 9):+.3g}"
    # Without seeds, the keys are numbers of repeats, such as "repeat 0". Repeats with equal numbers are not pairs.
    has_seeds = not any(isinstance(seed, str) for seed in values)
    if len(values) > 1 and has_seeds and values.keys() == first.keys():
        low, high = seeds_interval([values[seed] - first[seed] for seed in values])
        text += f" ({low:.3g} to {high:.3g})"
    return with_minus(text)
