"""Write the comparison as one HTML file that needs no network: tables, differences by task, and learning curves."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from openclip_ext.evaluation.report import tables
from openclip_ext.evaluation.report.runs import EvaluatedRun
from openclip_ext.evaluation.report.tables import Row
from openclip_ext.evaluation.report.training import Table, validation_metrics
from openclip_ext.evaluation.results import name_of
from openclip_ext.evaluation.tasks import GROUPS, TASKS
from openclip_ext.evaluation.training_log import training_charts
from openclip_ext.pages.charts import Bar, Chart, Curve, bar_chart, color, line_chart
from openclip_ext.pages.rendering import render_page

# A difference of more than this many standard errors is shown as better or worse.
_CLEAR = 2.0
# The page shows the three panels of NeuCLIP's Figure 1. The charts of other groups and tasks are collapsed.
_MAIN_GROUPS = ("DataComp average (38)", "ImageNet & variants (7)", "Retrieval, NeuCLIP and AmorLIP (Flickr, MSCOCO)")


def build_page(runs: Sequence[EvaluatedRun], training: Sequence[Table], rows: Sequence[Row], title: str) -> str:
    """Build the page from the tables of training logs (``training``) and the rows of evaluated checkpoints (``rows``)."""
    trained, evaluated = [run for run in runs if run.logs], [run for run in runs if run.checkpoints]
    metrics = [name for name in validation_metrics(trained) if not name.endswith(("_rank", "R@5", "R@10", "top5"))]
    charts = training_charts({run.name: run.logs for run in trained}, metrics)
    # Protocols are compared without their first word: the model's name, or "evaluation" of "evaluation during training".
    protocols = {frozenset(name.partition(" ")[2] for name in run.final.protocols) for run in evaluated}
    return render_page(
        "report.html",
        title,
        runs=[tables.describe_run(run) if run.checkpoints else run.name for run in runs],
        protocols_differ=len(protocols) > 1,
        training=training,
        training_curves=[line_chart(chart) for chart in charts],
        averages=tables.cell_table(evaluated, [row for row in rows if row.is_group]) if evaluated else [],
        tasks=tables.cell_table(evaluated, [row for row in rows if not row.is_group]) if evaluated else [],
        note=tables.size_note(rows),
        repeated=any(len(run.final.scores) > 1 for run in evaluated),
        baseline=evaluated[0].name if evaluated else "",
        differences=[found for index in range(1, len(evaluated)) if (found := _differences(evaluated, rows, index))],
        curves=_learning_curves(evaluated),
        legend=_legend(evaluated),
        trained_legend=_legend(trained),
    )


def _legend(runs: Sequence[EvaluatedRun]) -> list[tuple[str, str]]:
    return [(color(number), run.name) for number, run in enumerate(runs)]


def _differences(runs: Sequence[EvaluatedRun], rows: Sequence[Row], index: int) -> dict[str, Any] | None:
    """Return a run's differences from the baseline in group averages and tasks, as in AmorLIP's Figures 1 and 2.

    The tasks are sorted by difference. None means that the runs have no task in common.
    """
    averages = _bars((row for row in rows if row.is_group), index, runs)
    bars = sorted(_bars((row for row in rows if row.key in TASKS), index, runs), key=lambda bar: -bar.value)
    if not bars:
        return None
    title = f"{runs[index].name} − {runs[0].name}, percentage points"
    return {
        "name": runs[index].name,
        "tasks": len(bars),
        "better": sum(bar.value > _CLEAR * bar.error for bar in bars),
        "worse": sum(bar.value < -_CLEAR * bar.error for bar in bars),
        "charts": [bar_chart(drawn, title) for drawn in (averages, bars) if drawn],
    }


def _bars(rows: Iterable[Row], index: int, runs: Sequence[EvaluatedRun]) -> list[Bar]:
    bars = []
    for row in rows:
        difference = row.differences()[index]
        if difference is not None:
            before, after = tables.format_value(row.cells[0]), tables.format_value(row.cells[index])
            errors = [] if row.is_group else [run.final.standard_error(row.key) for run in (runs[0], runs[index])]
            error = 100 * math.hypot(*(value or 0.0 for value in errors))
            spread = f", standard error {error:.2f}" if error else ""
            hint = f"{row.title} ({row.metric}): {before} → {after}{spread}"
            text = tables.format_difference(difference) + (f" ± {error:.2f}" if error else "")
            bars.append(Bar(row.title, 100 * difference, text, hint, error))
    return bars


def _learning_curves(runs: Sequence[EvaluatedRun]) -> dict[str, list[Markup]]:
    """Draw scores over checkpoints: the charts of NeuCLIP's Figure 1, and the charts of all other groups and tasks."""
    has_samples = all(checkpoint.samples is not None for run in runs for checkpoint in run.checkpoints)
    x_title = "samples seen" if has_samples else "checkpoint"

    def chart(key: str) -> Chart:
        curves = []
        for number, run in enumerate(runs):
            placed = [
                (one.samples if has_samples else place, one.score(key)) for place, one in enumerate(run.checkpoints, 1)
            ]
            points = [(x, 100 * value.mean) for x, value in placed if x is not None and value is not None]
            curves.append(Curve(run.name, points, number))
        return Chart(name_of(key), [curve for curve in curves if curve.points], x_title)

    def drawn(keys: Iterable[str]) -> list[Markup]:
        return [line_chart(one) for one in map(chart, keys) if any(len(curve.points) > 1 for curve in one.curves)]

    others = [title for title in GROUPS if title not in _MAIN_GROUPS]
    return {"main": drawn(_MAIN_GROUPS), "groups": drawn(others), "tasks": drawn(TASKS)}
