"""The comparison as rows of numbers: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.runs import Run, Value
from eval.tasks import GROUPS, TASKS

# The groups that are averages; a group of one task shows as that task.
AVERAGES = {title: keys for title, keys in GROUPS.items() if len(keys) > 1}


@dataclass(frozen=True)
class Row:
    """A group average or a task.

    Attributes:
        title: as shown.
        key: of the task, or the group's title.
        metric: what the numbers are: the task's main metric, ``average`` for a group.
        cells: per run its number, or what to show in its place (``partial 12/38``, ``-``).
        notes: per run a remark on the number, mostly empty.
    """

    title: str
    key: str
    metric: str
    cells: tuple[Value | str, ...]
    notes: tuple[str, ...]

    @property
    def is_group(self) -> bool:
        """Whether this is an average over several tasks."""
        return self.metric == "average"

    def differences(self) -> list[float | None]:
        """Every run's number less the first run's, None where either is missing."""
        first = self.cells[0]
        return [
            cell.mean - first.mean if isinstance(cell, Value) and isinstance(first, Value) else None
            for cell in self.cells
        ]


def build_rows(runs: Sequence[Run]) -> list[Row]:
    """Group averages first, then every task that any run has, from the runs' final checkpoints; none without any."""
    finals = [run.final for run in runs]
    rows: list[Row] = []
    if not any(finals):
        return rows
    for title, keys in AVERAGES.items():
        cells = []
        for final in finals:
            done = len(keys) - len(final.missing(title)) if final else 0
            average = final.average(title) if final else None
            cells.append(average or (f"partial {done}/{len(keys)}" if done else "-"))
        notes = tuple(_size_note(keys, final.other_sizes if final else ()) for final in finals)
        rows.append(Row(title, title, "average", tuple(cells), notes))
    present = {key for final in finals if final for key in final.tasks}
    for key in [*(key for key in TASKS if key in present), *sorted(present - set(TASKS))]:
        task = TASKS.get(key)
        cells = tuple((final.score(key) if final else None) or "-" for final in finals)
        notes = tuple(_size_note((key,), final.other_sizes if final else ()) for final in finals)
        rows.append(Row(task.name if task else key, key, (task and task.main_metric) or "main metric", cells, notes))
    return rows


def _size_note(keys: Sequence[str], other_sizes: Sequence[str]) -> str:
    return "not DataComp's data" if set(keys) & set(other_sizes) else ""


def format_value(cell: Value | str) -> str:
    """In percent, with the standard deviation over repeats."""
    if isinstance(cell, str):
        return cell
    deviation = "" if cell.deviation is None else f" ± {100 * cell.deviation:.2f}"
    return f"{100 * cell.mean:.2f}{deviation}"


def format_difference(difference: float | None) -> str:
    """In percentage points, with its sign."""
    return "-" if difference is None else f"{100 * difference:+.2f}"


def markdown(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """A table a group: averages, then tasks; main metrics in percent, differences to the first run in points."""
    lines = ["Main metrics in percent, differences to the first run in percentage points.", ""]
    lines += [f"- {describe_run(run)}" for run in runs]
    for wanted in sorted({row.is_group for row in rows}, reverse=True):
        head = ["group" if wanted else "task", *([] if wanted else ["metric"]), *_column_titles(runs)]
        lines += ["", "| " + " | ".join(map(_escape, head)) + " |", "|" + "---|" * len(head)]
        for row in rows:
            if row.is_group == wanted:
                cells = [row.title, *([] if wanted else [row.metric]), *_cells(row)]
                lines.append("| " + " | ".join(map(_escape, cells)) + " |")
    if any(note for row in rows for note in row.notes):
        lines += ["", "† scored on data of another size than DataComp's, so not DataComp's number."]
    return "\n".join(lines) + "\n"


def describe_run(run: Run) -> str:
    """Name, checkpoint and what is behind the numbers of a run."""
    final = run.final
    if final is None:
        return f"{run.name}: no evaluated checkpoint"
    repeats = f", mean ± standard deviation of {run.repeats} repeats" if run.repeats > 1 else ""
    samples = f", {final.samples:,} samples seen" if final.samples else ""
    protocol = f" ({'; '.join(sorted(final.protocols))})" if final.protocols else ""
    return f"{run.name}: {final.label}{samples}{repeats}{protocol}"


def comma_separated(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """Fractions at full precision: columns ``key, name, metric``, per run its number, and, with repeats, deviation."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns = [column for run in runs for column in [run.name, *([f"{run.name} sd"] if run.repeats > 1 else [])]]
    writer.writerow(["key", "name", "metric", *columns])
    for row in rows:
        cells = []
        for run, cell in zip(runs, row.cells, strict=True):
            number = isinstance(cell, Value)
            cells.append(repr(cell.mean) if number else "")
            if run.repeats > 1:
                cells.append(repr(cell.deviation) if number else "")
        writer.writerow([row.key, row.title, row.metric, *cells])
    return stream.getvalue()


def _column_titles(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs] + [f"{run.name} − {runs[0].name}" for run in runs[1:]]


def _cells(row: Row) -> list[str]:
    values = [format_value(cell) + (" †" if note else "") for cell, note in zip(row.cells, row.notes, strict=True)]
    return values + [format_difference(difference) for difference in row.differences()[1:]]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
