"""Write the tables of the comparison: Markdown for people, CSV for programs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from openclip_ext.evaluation.report.runs import EvaluatedRun, Value
from openclip_ext.evaluation.results import name_of
from openclip_ext.evaluation.tasks import AVERAGED, GROUPS, TASKS
from openclip_ext.pages.rendering import markdown_table, with_minus

_AVERAGE, _IMAGENET = "DataComp average (38)", "ImageNet 1k"


@dataclass(frozen=True)
class Row:
    """A row of the table: the results of all runs in one task, or their averages over one group."""

    key: str  # key of the task, or title of the group
    metric: str  # the task's main metric, or ``average`` for a group
    cells: tuple[Value | str, ...]  # each run's value, or a text if it has none (``partial 12/38``, ``-``)
    other_sizes: tuple[bool, ...]  # for each run, whether the size of the data differs from DataComp's

    @property
    def title(self) -> str:
        """The task's name, or the group's title."""
        return name_of(self.key)

    @property
    def is_group(self) -> bool:
        """Whether the row shows the average of a group instead of a task."""
        return self.metric == "average"

    def differences(self) -> list[float | None]:
        """Return each run's value minus the first run's value; None if one of the two values is missing."""
        first = self.cells[0]
        return [
            cell.mean - first.mean if isinstance(cell, Value) and isinstance(first, Value) else None
            for cell in self.cells
        ]


class Cell(NamedTuple):
    """The text of a cell and its CSS class on the page: ``metric``, ``best``, ``up``, ``down``, ``faint`` or empty."""

    text: str
    style: str = ""


def build_rows(runs: Sequence[EvaluatedRun]) -> list[Row]:
    """Build the rows from the runs' final checkpoints: first the group averages, then all tasks that any run has."""
    finals = [run.final for run in runs]
    present = {key for final in finals for key in final.tasks}
    rows = []
    for key in [*GROUPS, *(key for key in TASKS if key in present), *sorted(present - set(TASKS))]:
        members = {*GROUPS.get(key, (key,))}
        names = {final.metric_of[key] for final in finals if key in final.metric_of} or {"main metric"}
        own = TASKS[key].main_metric if key in TASKS else " or ".join(sorted(names))
        metric = "average" if key in GROUPS else own or "main metric"
        done = [len(members.intersection(final.tasks)) for final in finals]
        if not any(done):  # a group of which no run has a task
            continue
        partial = [f"partial {count}/{len(members)}" if count else "-" for count in done]
        cells = tuple(final.score(key) or text for final, text in zip(finals, partial, strict=True))
        rows.append(Row(key, metric, cells, tuple(bool(final.other_sizes & members) for final in finals)))
    return rows


def size_note(rows: Sequence[Row]) -> str:
    """Return an explanation of the mark †, or an empty text if no value has the mark."""
    is_needed = any(any(row.other_sizes) for row in rows)
    return (
        "† not comparable with DataComp's numbers, because the data differs from DataComp's in size."
        if is_needed
        else ""
    )


def format_value(cell: Value | str) -> str:
    """Format a value in percent, with the standard deviation over repeats. A cell without a value is returned unchanged."""
    if isinstance(cell, str):
        return cell
    deviation = "" if cell.deviation is None else f" ± {100 * cell.deviation:.2f}"
    return with_minus(f"{100 * cell.mean:.2f}{deviation}")


def format_difference(difference: float | None) -> str:
    """Format a difference in percentage points, with its sign."""
    return "-" if difference is None else with_minus(f"{100 * difference:+.2f}")


def cell_table(runs: Sequence[EvaluatedRun], rows: Sequence[Row]) -> list[list[Cell]]:
    """Return the cells of a table, starting with the header. ``rows`` are either all groups or all tasks."""
    is_group = all(row.is_group for row in rows)
    head = [Cell("group")] if is_group else [Cell("task"), Cell("metric", "metric")]
    names = [run.name for run in runs]
    return [[*head, *map(Cell, names), *(Cell(f"{name} − {names[0]}") for name in names[1:])], *map(_cells, rows)]


def _cells(row: Row) -> list[Cell]:
    numbers = [cell.mean for cell in row.cells if isinstance(cell, Value)]
    best = max(numbers) if len(numbers) > 1 else None
    found = [Cell(row.title)] if row.is_group else [Cell(row.title), Cell(row.metric, "metric")]
    for cell, has_other_size in zip(row.cells, row.other_sizes, strict=True):
        style = "faint" if isinstance(cell, str) else "best" if cell.mean == best else ""
        found.append(Cell(format_value(cell) + (" †" if has_other_size else ""), style))
    for difference in row.differences()[1:]:
        style = "up" if (difference or 0) > 0 else "down" if (difference or 0) < 0 else "faint"
        found.append(Cell(format_difference(difference), style))
    return found


def markdown(runs: Sequence[EvaluatedRun], rows: Sequence[Row]) -> str:
    """Format a table of groups and a table of tasks, with values in percent and differences from the first run in points."""
    lines = ["Main metrics in percent, differences from the first run in percentage points.", ""]
    lines += [f"- {describe_run(run)}" for run in runs]
    for is_group in (True, False):
        if part := [row for row in rows if row.is_group == is_group]:
            lines += ["", markdown_table([[cell.text for cell in cells] for cells in cell_table(runs, part)])]
    note = size_note(rows)
    return "\n".join([*lines, *(["", note] if note else [])]) + "\n"


def describe_run(run: EvaluatedRun) -> str:
    """Describe a run by its name, checkpoint, number of training samples, repeats and protocol."""
    final = run.final
    count = len(final.scores)
    repeats = f", mean ± standard deviation of {count} repeats" if count > 1 else ""
    samples = f", {final.samples:,} samples seen" if final.samples else ""
    protocol = f" ({'; '.join(sorted(final.protocols))})" if final.protocols else ""
    return f"{run.name}: {final.label}{samples}{repeats}{protocol}"


def comma_separated(runs: Sequence[EvaluatedRun]) -> str:
    """Format a CSV table with one row per run, in the layout of OpenCLIP's published results.

    Values are fractions at full precision. Incomplete averages are empty. The columns are ``name``, ``pretrained`` (the
    checkpoint), the average over 38 tasks, these tasks with OpenCLIP's titles, other tasks, and other averages. If a run has
    repeats, the table also has ``repeats`` and standard deviations (``TITLE sd``). If the data of a task differs in size from
    DataComp's, the column ``other_sizes`` lists the keys of such tasks.
    """
    finals = [run.final for run in runs]
    others = sorted({key for final in finals for key in final.tasks} - set(AVERAGED))
    keys = [_AVERAGE, *sorted(AVERAGED, key=lambda key: key != "imagenet1k"), *others]
    keys += [title for title in GROUPS if title not in (_AVERAGE, _IMAGENET)]
    titles = {key: "Average perf. on 38 datasets" if key == _AVERAGE else name_of(key) for key in keys}
    rows = []
    for run, final in zip(runs, finals, strict=True):
        values = {title: final.score(key) or Value(math.nan) for key, title in titles.items()}
        row: dict[str, Any] = {"name": run.name, "pretrained": final.label}
        row |= {title: value.mean for title, value in values.items()}
        if any(len(final.scores) > 1 for final in finals):
            row["repeats"] = len(final.scores)
            row |= {f"{title} sd": value.deviation for title, value in values.items()}
        if any(final.other_sizes for final in finals):
            row["other_sizes"] = " ".join(sorted(final.other_sizes))
        rows.append(row)
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
