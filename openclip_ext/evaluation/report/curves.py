"""Draw the curves of one or more runs from their ``metrics.jsonl`` as one picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from openclip_ext.evaluation.training_log import TrainingLog, metric_names, training_charts
from openclip_ext.files.writing import write_atomically
from openclip_ext.pages.charts import Chart, draw_curves

_METRICS = 2  # maximum number of validation metrics to draw


def plot(runs: Mapping[str, Sequence[TrainingLog]], output: Path) -> None:
    """Draw the curves of runs and their repeats over the number of samples seen. A run has one color in all charts."""
    logs = [log for repeats in runs.values() for log in repeats]
    metrics = sorted(metric_names(logs), key=_order_of_metrics)[:_METRICS]
    draw(training_charts(runs, metrics), output)


def draw(charts: Sequence[Chart], output: Path) -> None:
    """Draw charts with a common legend, two charts per row, and save the figure to ``output``."""
    rows = math.ceil(len(charts) / 2)
    figure = Figure(figsize=(10, 3.25 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes, chart in zip(panels, charts, strict=False):
        draw_curves(axes, chart)
    for axes in panels[len(charts) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    picture = output.suffix.removeprefix(".") or "png"
    write_atomically(output, lambda file: figure.savefig(file, format=picture, dpi=130))


def _order_of_metrics(name: str) -> int:
    return next((place for place, part in enumerate(("R@1", "top1", "average")) if name.endswith(part)), 9)
