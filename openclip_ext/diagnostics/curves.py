"""Draw the curves of one or more runs from their ``metrics.jsonl``: ``openclip-ext plot RUN... --output FILE``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise SystemExit("error: curves need the package matplotlib: pip install matplotlib") from error

matplotlib.use("Agg")  # writes files; needs no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from openclip_ext import json_lines

Records = list[dict[str, Any]]
_COLORS = [f"C{number}" for number in range(10)]  # tab10


def read_records(run: Path) -> Records:
    """The logged training steps of a run folder in order; none if it has not logged any yet.

    Raises:
        ValueError: the folder does not exist.
    """
    if not run.is_dir():
        raise ValueError(f"no run folder {run}: give LOGS/NAME of a training")
    return [record for record in json_lines.read(run / "metrics.jsonl") if "loss" in record]


def series(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have ``key``."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def smooth(values: np.ndarray, window: int = 7) -> np.ndarray:
    """Centered moving average that gets narrower towards both ends."""
    reach = [min(window // 2, position, len(values) - 1 - position) for position in range(len(values))]
    return np.array([values[p - r : p + r + 1].mean() for p, r in enumerate(reach)])


def _draw_noisy(axes: Axes, steps: np.ndarray, values: np.ndarray, color: Any, label: str) -> None:
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=label)


def draw_infonce(axes: Axes, runs: dict[str, Records]) -> None:
    chances: dict[float, Any] = {}
    for color, (name, records) in zip(_cycle(runs), runs.items(), strict=True):
        _draw_noisy(axes, *series(records, "infonce"), color, name)
        for chance in series(records, "chance")[1][:1].round(6).tolist():
            chances.setdefault(chance, color)
    for chance, of_run in chances.items():
        color = of_run if len(chances) > 1 else "0.4"  # runs of other batches have a line each
        axes.axhline(chance, color=color, linestyle="--", linewidth=1)
        axes.annotate("chance, ln B", (1, chance), (-4, -4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="top", color=color, fontsize=9)  # fmt: skip
    axes.set(title="InfoNCE of the batch", ylabel="nats", ylim=(0, None))


def draw_temperature(axes: Axes, runs: dict[str, Records]) -> None:
    for color, (name, records) in zip(_cycle(runs), runs.items(), strict=True):
        steps, low = series(records, "temperature_min")
        _, high = series(records, "temperature_max")
        if len(low) == len(high) and np.any(high > low):  # one temperature a sample
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(*series(records, "temperature"), color=color, linewidth=1.8, label=name)
    axes.set(title="Temperature τ")


def draw_normalizers(axes: Axes, runs: dict[str, Records]) -> None:
    for color, (name, records) in zip(_cycle(runs), runs.items(), strict=True):
        steps, median = series(records, "alpha_q50")
        if len(steps):
            low, high = series(records, "alpha_q10")[1], series(records, "alpha_q90")[1]
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(steps, median, color=color, linewidth=1.8, label=name)
    axes.set(title="Estimated log-normalizer α", ylabel="median, 10 % to 90 %")


def draw_loss(axes: Axes, runs: dict[str, Records]) -> None:
    for color, (name, records) in zip(_cycle(runs), runs.items(), strict=True):
        _draw_noisy(axes, *series(records, "loss"), color, name)
    axes.set(title="Training loss (each loss has a scale of its own)", ylabel="loss")


def _cycle(runs: dict[str, Records]) -> list[Any]:
    return [_COLORS[number % len(_COLORS)] for number in range(len(runs))]


def plot(runs: dict[str, Records], output: Path) -> None:
    """Write a picture of four panels; a run has the same color in all of them."""
    panels: list[Callable[[Axes, dict[str, Records]], None]] = [
        draw_infonce,
        draw_temperature,
        draw_normalizers,
        draw_loss,
    ]
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for axes, draw in zip(grid.flat, panels, strict=True):
        draw(axes, runs)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("optimizer step")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    grid[0, 0].legend(handles, labels, frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="openclip-ext plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (LOGS/NAME)")
    parser.add_argument("--output", type=Path, required=True, help="picture to write; the extension says the format")
    args = parser.parse_args(argv)
    try:
        names = [run.resolve().name for run in args.runs]
        runs = {
            name if names.count(name) == 1 else str(run): read_records(run)
            for name, run in zip(names, args.runs, strict=True)
        }
        logged = {name: records for name, records in runs.items() if records}
        if not logged:
            raise ValueError(f"no training step logged in {', '.join(map(str, args.runs))}")
        for name in (name for name in runs if name not in logged):
            print(f"warning: {name} is left out: it has logged no training step", file=sys.stderr)
        plot(logged, args.output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(args.output)


if __name__ == "__main__":
    main()
