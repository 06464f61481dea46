"""Read the training log of a run folder, and build charts from it."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from openclip_ext.evaluation.run_folder import chosen_mix, read_config
from openclip_ext.files import json_lines
from openclip_ext.pages.charts import Chart, Curve

METRICS_FILE = "metrics.jsonl"
_POINTS = 40  # maximum number of points of a curve
# Charts of logged steps: title, log key of the curve, and log keys of the lower and upper end of the curve's band.
_INFONCE = "InfoNCE of the batch"
_LOGGED = (
    (_INFONCE, "infonce", "infonce", "infonce"),
    ("temperature τ", "temperature", "temperature_min", "temperature_max"),
    ("log-normalizer α: median, 10 % to 90 %", "alpha_q50", "alpha_q10", "alpha_q90"),
    ("loss (each loss has a scale of its own)", "loss", "loss", "loss"),
)


class Validation(NamedTuple):
    """The metrics of one evaluation during training."""

    samples: int
    epoch: int | None
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrainingLog:
    """The log of a run folder.

    ``settings`` has the flags and loss options; it is empty if ``config.json`` does not exist. ``unfinished`` is a text such
    as ``104 of 186`` if the run has not taken all its steps, else it is empty. ``mix`` is the mix that a fine-tuning chose.
    """

    settings: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[Validation] = ()
    unfinished: str = ""
    mix: Mapping[str, float] = field(default_factory=dict)


def read_log(folder: Path) -> TrainingLog:
    """Read the log of a run folder. If nothing was logged yet, ``steps`` is empty."""
    settings: dict[str, Any] = {}
    total = ended = 0
    if (folder / "config.json").is_file():
        config = read_config(folder)
        loss, flags = config["loss"], config["flags"]
        options = {f"loss: {name}" if name in flags else name: value for name, value in loss.get("options", {}).items()}
        settings = {"loss": loss.get("name"), **flags, **options}
        total = config.get("steps", 0)
    steps, validations = [], []
    for line in json_lines.read(folder / METRICS_FILE):
        if "loss" in line and "samples" in line:
            steps.append(line)
        elif "bad_samples" in line and steps:
            # The end of an epoch with bad samples. Its last step is not logged if they shortened the epoch.
            steps[-1] = steps[-1] | line
            ended = line.get("epoch", -1) + 1
        values = {name: value for name, value in line.get("evaluation", {}).items() if isinstance(value, int | float)}
        values.pop("num_samples", None)
        if values:
            validations.append(Validation(steps[-1]["samples"] if steps else 0, line.get("epoch"), values))
    taken = steps[-1]["step"] + 1 if steps else total
    has_ended = taken >= total or ended == settings.get("epochs")
    unfinished = "" if has_ended else f"{taken:,} of {total:,}"
    return TrainingLog(settings, steps, validations, unfinished, chosen_mix(folder))


def metric_names(logs: Iterable[TrainingLog]) -> list[str]:
    """Return the names of all validation metrics."""
    return list(dict.fromkeys(name for log in logs for found in log.validations for name in found.values))


def training_charts(runs: Mapping[str, Sequence[TrainingLog]], metrics: Sequence[str]) -> list[Chart]:
    """Return charts of the logged steps and of the given validation metrics. Curves of a run's repeats have one color."""
    named = [(name, color, log) for color, (name, logs) in enumerate(runs.items()) for log in logs]
    charts = {title: [_step_curve(*place, *keys) for place in named] for title, *keys in _LOGGED}
    for metric in metrics:
        charts[metric] = [
            Curve(name, [(one.samples, one.values[metric]) for one in log.validations if metric in one.values], color)
            for name, color, log in named
        ]
    drawn = {title: [curve for curve in curves if curve.points] for title, curves in charts.items()}
    chances = {step["chance"] for _, _, log in named for step in log.steps[:1] if step.get("chance") is not None}
    levels = {_INFONCE: {f"chance, ln {math.exp(chance):.0f}": chance for chance in sorted(chances)}}
    return [Chart(title, curves, levels=levels.get(title, {})) for title, curves in drawn.items() if curves]


def _step_curve(name: str, color: int, log: TrainingLog, key: str, low: str, high: str) -> Curve:
    """Return a curve of up to :data:`_POINTS` points. A point is the mean of neighboring steps; the band is their range."""
    steps = [step for step in log.steps if step.get(key) is not None]
    size = max(1, math.ceil(len(steps) / _POINTS))
    points, band = [], []
    for first in range(0, len(steps), size):
        group = steps[first : first + size]
        mean = statistics.fmean(step[key] for step in group)
        points.append((group[-1]["samples"], mean))
        lows, highs = ([step[end] for step in group if step.get(end) is not None] for end in (low, high))
        band.append((min(lows, default=mean), max(highs, default=mean)))
    return Curve(name, points, color, band)
