"""What training logged of each run: the settings that differ, time, and validation and loss over the samples seen."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from markupsafe import Markup

from openclip_ext.evaluation.statistics import seeds_interval
from openclip_ext.files import json_lines
from openclip_ext.pages.charts import Curve, line_chart, short_number

METRICS_FILE = "metrics.jsonl"
# Prefix that `eval.suite` gives to task keys in metrics.jsonl.
SUITE_PREFIX = "datacomp/"
# Where files lie, and how processes are started.
_NOT_COMPARED = {
    "name", "logs", "log_path", "checkpoint_path", "tensorboard_path", "resume", "rank", "local_rank", "world_size",
    "distributed", "device", "debug", "report_to", "remote_sync", "remote_sync_frequency", "save_every_steps",
    "log_every_n_steps", "save_frequency",
}  # fmt: skip
_POINTS = 40  # of a curve of logged steps, each the mean of its neighbors
Table = list[list[str]]


@dataclass(frozen=True)
class TrainingLog:
    """The log of a run folder.

    Attributes:
        settings: flags and options of the loss, by name.
        steps: the logged steps, in order.
        validation: samples seen, and the metrics measured there (those of DataComp's tasks aside).
    """

    settings: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validation: Sequence[tuple[int, Mapping[str, float]]] = ()

    @property
    def seconds(self) -> float:
        """Seconds spent in training steps, evaluations and saves aside."""
        before, total = 0, 0.0
        for step in self.steps:
            total += (step["samples"] - before) / max(step.get("samples_per_second") or math.inf, 1e-9)
            before = step["samples"]
        return total


class TrainedRun(Protocol):
    """A run with the logs of its repeats."""

    @property
    def name(self) -> str: ...

    @property
    def logs(self) -> Sequence[TrainingLog]: ...


def read_log(folder: Path) -> TrainingLog | None:
    """Read the log of a run folder; None if it has none."""
    lines = json_lines.read(folder / METRICS_FILE)
    steps = [line for line in lines if "loss" in line and "samples" in line]
    if not steps:
        return None
    settings: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        loss = config.get("loss", {})
        flags = config.get("flags", {})
        options = {f"loss: {name}" if name in flags else name: value for name, value in loss.get("options", {}).items()}
        settings = {"loss": loss.get("name"), **flags, **options}
    validation = []
    for line in lines:
        found = {
            name: value
            for name, value in line.get("evaluation", {}).items()
            if isinstance(value, int | float) and not name.startswith(SUITE_PREFIX) and name != "num_samples"
        }
        if found:
            validation.append(
                (max((step["samples"] for step in steps if step["step"] < line["step"]), default=0), found)
            )
    return TrainingLog(settings, steps, validation)


def differing_settings(runs: Sequence[TrainedRun]) -> Table:
    """Return a row for each setting that differs between runs, with its values; options of one loss alone say nothing."""
    logs = [log for run in runs for log in run.logs]
    names = [name for name in (logs[0].settings if logs else ()) if all(name in log.settings for log in logs)]
    rows = []
    for name in names:
        values = [", ".join(dict.fromkeys(str(log.settings.get(name, "")) for log in run.logs)) for run in runs]
        if name not in _NOT_COMPARED and len(set(values)) > 1:
            rows.append([name if name.startswith("loss") else f"--{name.replace('_', '-')}", *values])
    return rows


def overview(runs: Sequence[TrainedRun]) -> Table:
    """Return rows about the course of the runs."""

    def row(title: str, value: Callable[[TrainingLog], float | None], show: Callable[[float], str]) -> list[str]:
        cells = []
        for run in runs:
            found = [number for log in run.logs if (number := value(log)) is not None]
            cells.append(show(statistics.fmean(found)) if found else "-")
        return [title, *cells]

    return [
        row("samples seen", lambda log: log.steps[-1]["samples"], short_number),
        row("training time, minutes", lambda log: log.seconds / 60, "{:.1f}".format),
        row("samples a second", lambda log: log.steps[-1]["samples"] / max(log.seconds, 1e-9), short_number),
        row("InfoNCE, last tenth", lambda log: _last_tenth(log, "infonce"), "{:.3f}".format),
        row("temperature at the end", lambda log: _last_tenth(log, "temperature"), "{:.3f}".format),
        row("skipped steps", lambda log: log.steps[-1].get("skipped_steps"), "{:.0f}".format),
        row("bad samples", lambda log: log.steps[-1].get("bad_samples"), "{:.0f}".format),
    ]


def _last_tenth(log: TrainingLog, key: str) -> float | None:
    last = log.steps[-max(1, len(log.steps) // 10) :]
    values = [step[key] for step in last if step.get(key) is not None]
    return statistics.fmean(values) if values else None


def validation(runs: Sequence[TrainedRun]) -> Table:
    """Return a row for each metric of the last validation.

    Repeats are given as mean ± standard deviation, and their difference to the first run with the 95 % interval over the
    seeds if both runs have the same seeds.
    """
    names = dict.fromkeys(name for run in runs for log in run.logs for _, found in log.validation for name in found)
    rows = []
    for name in names:
        values = [_by_seed(run, name) for run in runs]
        rows.append([name, *(_cell(value, values[0]) for value in values)])
    return rows


def _by_seed(run: TrainedRun, metric: str) -> dict[Any, float]:
    """Return the last value of a metric for each seed, or number of a repeat."""
    found: dict[Any, float] = {}
    for number, log in enumerate(run.logs):
        last = [values[metric] for _, values in log.validation if metric in values]
        if last:
            seed = log.settings.get("seed")
            found[seed if seed is not None and seed not in found else f"repeat {number}"] = last[-1]
    return found


def _cell(values: Mapping[Any, float], first: Mapping[Any, float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values.values())
    text = f"{mean:.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values.values()):.2g}"
    if values is first or not first:
        return text
    text += f", {mean - statistics.fmean(first.values()):+.3g}"
    if len(values) > 1 and values.keys() == first.keys():
        low, high = seeds_interval([values[seed] - first[seed] for seed in values])
        text += f" ({low:.3g} to {high:.3g})"
    return text.replace("-", "−")


def curves(runs: Sequence[TrainedRun]) -> list[Markup]:
    """Draw the loss, the temperature and each validation metric over the samples seen; repeats have one color."""
    charts = []
    for key, title in (("infonce", "InfoNCE of the batch"), ("temperature", "temperature τ")):
        drawn = [Curve(run.name, _smoothed(log, key), color) for color, run in enumerate(runs) for log in run.logs]
        charts.append((title, drawn))
    metrics = dict.fromkeys(name for run in runs for log in run.logs for _, found in log.validation for name in found)
    for name in (name for name in metrics if not name.endswith(("_rank", "R@5", "R@10", "top5"))):
        drawn = [
            Curve(run.name, [(samples, found[name]) for samples, found in log.validation if name in found], color)
            for color, run in enumerate(runs)
            for log in run.logs
        ]
        charts.append((name, drawn))
    found = [(title, [curve for curve in drawn if curve.points]) for title, drawn in charts]
    return [line_chart(drawn, "samples seen", title) for title, drawn in found if drawn]


def _smoothed(log: TrainingLog, key: str) -> list[tuple[float, float]]:
    """Return at most :data:`_POINTS` points of a logged number, each the mean of its neighbors, the last at the end."""
    points = [(step["samples"], step[key]) for step in log.steps if step.get(key) is not None]
    size = max(1, math.ceil(len(points) / _POINTS))
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def markdown_table(title: str, names: Sequence[str], rows: Table) -> str:
    """Format a table; empty without rows."""
    if not rows:
        return ""
    lines = [[title, *names], ["---"] * (1 + len(names)), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
