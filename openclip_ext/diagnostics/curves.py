"""Draw the curves of one or more runs from their ``metrics.jsonl``: ``openclip-ext plot RUN... --output FILE``."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openclip_ext.cli import command_line
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path
from openclip_ext.pages.charts import short_number

Records = list[dict[str, Any]]
_VALIDATION_PANELS = 2


def read_records(run: Path) -> Records:
    """Return the logged training steps of a run folder in order; there are none if it has not logged any yet."""
    if not run.is_dir():
        raise ValueError(f"no run folder {run}: give LOGS/NAME of a training")
    return [record for record in json_lines.read(run / "metrics.jsonl") if "loss" in record]


def read_validation(run: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return samples and values of each metric of validation that a run folder has logged."""
    found: dict[str, list[tuple[float, float]]] = {}
    samples = 0
    for record in json_lines.read(run / "metrics.jsonl"):
        samples = record.get("samples", samples)
        for name, value in record.get("evaluation", {}).items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((samples, value))
    return {name: _columns(points) for name, points in found.items()}


def series(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and values of the records that have ``key``."""
    return _columns([(record["samples"], record[key]) for record in records if record.get(key) is not None])


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    samples, values = zip(*points, strict=True) if points else ((), ())
    return np.array(samples, dtype=float), np.array(values, dtype=float)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centered moving average over seven values, or over fewer near the ends."""
    reach = [min(3, position, len(values) - 1 - position) for position in range(len(values))]
    return np.array([values[p - r : p + r + 1].mean() for p, r in enumerate(reach)])


def plot(runs: dict[str, Records], output: Path, validation: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Draw the runs over the samples seen; a run has the same color in all panels.

    Args:
        runs: The logged steps of each run, by its name.
        output: The picture to write.
        validation: For each run what :func:`read_validation` returns; the first metrics get panels of their own.
    """
    named = dict.fromkeys(
        name for found in (validation or {}).values() for name in sorted(found, key=_order_of_metrics)
    )
    metrics = list(named)[:_VALIDATION_PANELS]
    rows = 2 + bool(metrics)
    figure = Figure(figsize=(10, 3.25 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False)
    (infonce, temperature), (normalizers, loss) = panels[:2]
    for number, (name, records) in enumerate(runs.items()):
        color = f"C{number % 10}"
        _draw_noisy(infonce, *series(records, "infonce"), color, name)
        _draw_band(temperature, records, ("temperature_min", "temperature", "temperature_max"), color)
        _draw_band(normalizers, records, ("alpha_q10", "alpha_q50", "alpha_q90"), color)
        _draw_noisy(loss, *series(records, "loss"), color, name)
        for axes, metric in zip(panels[2] if metrics else (), metrics, strict=False):
            if metric in (validation or {}).get(name, {}):
                axes.plot(*(validation or {})[name][metric], "o-", color=color, markersize=4, linewidth=1.8)
                axes.set(title=f"Validation: {metric}")
    _draw_chance(infonce, runs)
    infonce.legend(frameon=False)
    infonce.set(title="InfoNCE of the batch", ylabel="nats", ylim=(0, None))
    temperature.set(title="Temperature τ")
    normalizers.set(title="Estimated log-normalizer α", ylabel="median, 10 % to 90 %")
    loss.set(title="Training loss (each loss has a scale of its own)", ylabel="loss")
    if len(metrics) == 1:
        panels[2, 1].set_visible(False)
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    for axes in panels[-1]:
        axes.set_xlabel("samples seen")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def _order_of_metrics(name: str) -> int:
    """Return the place of a metric: recalls at 1 first, then accuracies, then the rest."""
    return next((place for place, part in enumerate(("R@1", "top1", "average")) if name.endswith(part)), 9)


def _draw_noisy(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=label)


def _draw_band(axes: Axes, records: Records, keys: tuple[str, str, str], color: str) -> None:
    """Draw the second of three series, and shade the area between the other two if they differ."""
    (steps, low), (of_middle, middle), (_, high) = (series(records, key) for key in keys)
    if len(low) == len(high) and np.any(high > low):
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(of_middle, middle, color=color, linewidth=1.8)


def _draw_chance(axes: Axes, runs: dict[str, Records]) -> None:
    """Draw the InfoNCE of guessing, ``ln B``: one line for each batch size, in the color of its first run."""
    chances: dict[float, str] = {}
    for number, records in enumerate(runs.values()):
        for chance in series(records, "chance")[1][:1].round(6).tolist():
            chances.setdefault(chance, f"C{number % 10}")
    for chance, of_run in chances.items():
        color = of_run if len(chances) > 1 else "0.4"
        axes.axhline(chance, color=color, linestyle="--", linewidth=1)
        axes.annotate(f"chance, ln {math.exp(chance):.0f}", (1, chance), (-4, -4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="top", color=color, fontsize=9)  # fmt: skip


def main(argv: list[str]) -> None:
    """Draw runs into a picture."""
    parser = argparse.ArgumentParser(prog="openclip-ext plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (LOGS/NAME)")
    parser.add_argument(
        "--output", type=output_path, required=True, help="picture to write; the extension says the format"
    )
    args = parser.parse_args(argv)
    names = [run.resolve().name for run in args.runs]
    runs = {
        name if names.count(name) == 1 else str(run): read_records(run)
        for name, run in zip(names, args.runs, strict=True)
    }
    logged = {name: records for name, records in runs.items() if records}
    if not logged:
        raise ValueError(f"no training step is logged in {', '.join(map(str, args.runs))}")
    for name in (name for name in runs if name not in logged):
        print(f"warning: {name} is left out: it has logged no training step", file=sys.stderr)
    validation = {name: read_validation(run) for name, run in zip(runs, args.runs, strict=True)}
    plot(logged, args.output, validation)
    print(args.output)


if __name__ == "__main__":
    command_line.run(main)
