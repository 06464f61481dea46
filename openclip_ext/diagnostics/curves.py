"""Draw the curves of one or more runs from their ``metrics.jsonl``: ``openclip-ext plot RUN...``."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from openclip_ext.cli import command_line
from openclip_ext.evaluation.training_log import TrainingLog, metric_names, read_log, training_charts
from openclip_ext.files.writing import output_path, write_atomically
from openclip_ext.pages.charts import Chart, draw_curves

_METRICS = 2  # maximum number of validation metrics to draw


def plot(logs: Mapping[str, TrainingLog], output: Path) -> None:
    """Draw the curves of runs over the number of samples seen. A run has the same color in all charts."""
    metrics = sorted(metric_names(logs.values()), key=_order_of_metrics)[:_METRICS]
    draw(training_charts({name: [log] for name, log in logs.items()}, metrics), output)


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


def main(argv: list[str]) -> None:
    parser = command_line.Parser(prog="openclip-ext plot", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (LOGS/NAME)")
    file = "file for the figure; the extension (such as .png) sets the format (default: %(default)s)"
    parser.add_argument("--output", type=output_path, default=Path("curves.png"), help=file)
    args = parser.parse_args(argv)
    names = [run.resolve().name for run in args.runs]
    keys = [name if names.count(name) == 1 else str(run) for name, run in zip(names, args.runs, strict=True)]
    logs = dict(zip(keys, map(read_log, args.runs), strict=True))
    logged = {name: log for name, log in logs.items() if log.steps}
    if empty := ", ".join(name for name in logs if name not in logged):
        problem = f"no training step is logged in {empty}: expected LOGS/NAME of training runs"
        if not logged or not all(run.is_dir() for run in args.runs):
            raise ValueError(problem)
        logging.warning(problem)  # a run may have stopped before its first step, so draw the others
    plot(logged, args.output)
    print(args.output)


if __name__ == "__main__":
    command_line.run(main)
