"""The comparison as one HTML page that fetches nothing, for light and dark."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

from ..tasks import GROUPS, TASKS
from .charts import SERIES_COLORS, Bar, Line, bar_chart, line_chart
from .runs import Checkpoint, Run, Value
from .tables import Row, describe_run, format_difference, format_value

# The three panels of NeuCLIP's Figure 1 come first; the other groups and the tasks are folded away.
_MAIN_GROUPS = (
    "DataComp average (38)",
    "ImageNet & variants (7)",
    "Retrieval, NeuCLIP and AmorLIP (Flickr, MSCOCO)",
)
# Curves of the training log are thinned out to this many points each; a chart is 400 pixels wide.
_MOST_POINTS = 400

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --faint: #5b6570; --rule: #d9dee3; --shade: #f5f7f9;
  --up: #0072b2; --down: #d55e00; --best: #0b6b3a;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --s4: #a67c00; --s5: #56b4e9; --s6: #7a4fbf; --s7: #666666; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { --page: #14181d; --ink: #e8ebee; --faint: #a3adb8;
  --rule: #333b44; --shade: #1d232a; --up: #4aa8e0; --down: #f0884a; --best: #5fd39a; --s0: #4aa8e0; --s1: #f0884a;
  --s2: #35c79a; --s3: #e39cc3; --s4: #e0b83a; --s5: #9bd4f5; --s6: #b394e8; --s7: #aab2ba; } }
:root[data-theme=dark] { color-scheme: dark; --page: #14181d; --ink: #e8ebee; --faint: #a3adb8;
  --rule: #333b44; --shade: #1d232a; --up: #4aa8e0; --down: #f0884a; --best: #5fd39a; --s0: #4aa8e0; --s1: #f0884a;
  --s2: #35c79a; --s3: #e39cc3; --s4: #e0b83a; --s5: #9bd4f5; --s6: #b394e8; --s7: #aab2ba; }
:root[data-theme=light] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1320px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
p, li { max-width: 80ch; } .faint, p.note { color: var(--faint); } .warning { color: var(--down); }
.bar { display: flex; justify-content: space-between; align-items: start; gap: 1rem; }
button { font: inherit; color: var(--ink); background: var(--shade); border: 1px solid var(--rule); border-radius: 6px;
  padding: .25rem .7rem; cursor: pointer; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; position: sticky; left: 0;
  background: var(--page); }
th[data-order=down]::after { content: " ▾"; } th[data-order=up]::after { content: " ▴"; }
td.metric { text-align: left; color: var(--faint); } th { background: var(--shade); cursor: pointer; }
th:first-child { background: var(--shade); } tr.group td { font-weight: 600; } td.partial { color: var(--faint); }
td.best { color: var(--best); font-weight: 700; } td.up { color: var(--up); } td.down { color: var(--down); }
.charts { display: flex; flex-wrap: wrap; gap: .8rem 1.2rem; } svg { max-width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0; padding: 0; list-style: none; }
.legend i { display: inline-block; width: 1.4em; height: .3em; border-radius: 2px; margin-right: .4em;
  vertical-align: middle; }
details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
svg text { font-size: 12px; fill: var(--ink); font-family: inherit; } svg .tick { fill: var(--faint); font-size: 11px; }
svg .title { font-size: 13px; font-weight: 600; } svg .value { fill: var(--faint); font-size: 11px; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--faint); } svg .up { fill: var(--up); }
svg .down { fill: var(--down); } svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""

# Sorts a table by the column whose head is clicked, and switches the theme. The page is complete without it.
_SCRIPT = """
document.querySelectorAll("th").forEach(head => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.dataset.order !== "down";
  head.closest("tr").querySelectorAll("th").forEach(other => delete other.dataset.order);
  head.dataset.order = down ? "down" : "up";
  const value = row => { const text = row.cells[column].textContent.replace("\\u2212", "-");
    const number = parseFloat(text); return Number.isNaN(number) ? text : number; };
  [...body.rows].sort((a, b) => { const x = value(a), y = value(b);
    const order = typeof x === typeof y ? (x > y ? 1 : x < y ? -1 : 0) : (typeof x === "number" ? 1 : -1);
    return down ? -order : order; }).forEach(row => body.append(row));
}));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""


def build_page(runs: Sequence[Run], rows: Sequence[Row], title: str) -> str:
    """The whole page.

    Args:
        runs: the first is the baseline.
        rows: from `eval.report.tables.build_rows`.
        title: title of the page.
    """
    colors = "".join(
        f"svg .s{n} {{ stroke: var(--s{n}); }} svg .dot.s{n} {{ fill: var(--s{n}); }} .legend .s{n} "
        f"{{ background: var(--s{n}); }}\n"
        for n in range(SERIES_COLORS)
    )
    sections = [
        _head(runs, title),
        _section("Averages", _averages_note(runs), _table(runs, [row for row in rows if row.is_group])),
        *(_differences(runs[0], run, rows, index) for index, run in enumerate(runs) if index),
        _curves(runs),
        _section("All tasks", "Main metrics in percent.", _table(runs, [row for row in rows if not row.is_group])),
        _training(runs),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{colors}</style>\n</head>\n<body>\n{''.join(sections)}<script>{_SCRIPT}</script>\n</body>\n"
        f"</html>\n"
    )


def _section(title: str, note: str, *content: str) -> str:
    body = "".join(content)
    if not body:
        return ""
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="note">{escape(note)}</p>\n{body}\n</section>\n'


def _head(runs: Sequence[Run], title: str) -> str:
    entries = "".join(f"<li>{escape(describe_run(run))}</li>" for run in runs)
    protocols = {run.final.protocols for run in runs if run.final}
    warning = ""
    if len({_protocol_only(names) for names in protocols}) > 1:
        warning = (
            '<p class="warning">The runs were not evaluated in the same way (precision or protocol differ, see above), '
            "so small differences mean nothing.</p>"
        )
    return (
        f'<div class="bar"><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></div>\n'
        f"<ul>{entries}</ul>\n{warning}\n"
    )


def _protocol_only(names: Iterable[str]) -> frozenset[str]:
    """Precision and protocol without the model's name, which may well differ."""
    return frozenset(name if name.startswith("evaluation") else " ".join(name.split()[1:]) for name in names)


def _averages_note(runs: Sequence[Run]) -> str:
    repeats = " ± is the standard deviation over repeats." if any(run.repeats > 1 for run in runs) else ""
    return (
        "Means of the tasks' main metrics, in percent. A set with missing tasks shows “partial” and the number of "
        f"evaluated tasks.{repeats}"
    )


def _table(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    groups = rows[0].is_group
    heads = ["group" if groups else "task", *([] if groups else ["metric"]), *(run.name for run in runs)]
    heads += [f"{run.name} − {runs[0].name}" for run in runs[1:]]
    body = "".join(_table_row(row) for row in rows)
    notes = "<p class=\"note\">† scored on data of another size than DataComp's, so not DataComp's number.</p>"
    return (
        '<div class="scroll"><table><thead><tr>'
        + "".join(f"<th>{escape(head)}</th>" for head in heads)
        + f"</tr></thead><tbody>{body}</tbody></table></div>"
        + (notes if any(note for row in rows for note in row.notes) else "")
    )


def _table_row(row: Row) -> str:
    numbers = [cell.mean for cell in row.cells if isinstance(cell, Value)]
    best = max(numbers) if len(numbers) > 1 else None
    cells = [f"<td>{escape(row.title)}</td>"]
    if not row.is_group:
        cells.append(f'<td class="metric">{escape(row.metric)}</td>')
    for cell, note in zip(row.cells, row.notes, strict=True):
        style = "partial" if isinstance(cell, str) else "best" if cell.mean == best else ""
        cells.append(f'<td class="{style}">{escape(format_value(cell))}{" †" if note else ""}</td>')
    for difference in row.differences()[1:]:
        style = "partial" if difference is None else "up" if difference > 0 else "down" if difference < 0 else ""
        cells.append(f'<td class="{style}">{_signed(difference)}</td>')
    return f'<tr class="{"group" if row.is_group else "task"}">{"".join(cells)}</tr>'


def _signed(difference: float | None) -> str:
    return format_difference(difference) if difference is None else format_difference(difference).replace("-", "−")


def _differences(baseline: Run, run: Run, rows: Sequence[Row], index: int) -> str:
    """Per-task differences of two runs, sorted: AmorLIP's Figure 2."""
    bars = []
    for row in rows:
        difference = row.differences()[index]
        if row.is_group or difference is None or TASKS.get(row.key) is None:
            continue
        before, after = format_value(row.cells[0]), format_value(row.cells[index])
        hint = f"{row.title} ({row.metric}): {before} → {after}"
        bars.append(Bar(row.title, 100 * difference, _signed(difference), hint))
    if not bars:
        return ""
    bars.sort(key=lambda bar: bar.value, reverse=True)
    better, worse = sum(bar.value > 0 for bar in bars), sum(bar.value < 0 for bar in bars)
    note = f"{run.name} is better on {better} of {len(bars)} tasks and worse on {worse}. Absolute differences."
    chart = bar_chart(bars, f"{run.name} − {baseline.name}, percentage points")
    return _section(f"{run.name} against {baseline.name}, task by task", note, chart)


def _curves(runs: Sequence[Run]) -> str:
    """Learning curves: NeuCLIP's Figure 1, then all other groups and tasks."""
    if all(len(run.checkpoints) < 2 for run in runs):
        return ""
    x_title, x_of = _horizontal(runs)

    def charts(
        titles: Iterable[str], score: Callable[[Checkpoint, str], Value | None], names: Callable[[str], str]
    ) -> Iterator[str]:
        for title in titles:
            lines = []
            for number, run in enumerate(runs):
                scored = [(x_of(run, entry), score(entry, title)) for entry in run.checkpoints]
                points = [(x, 100 * value.mean) for x, value in scored if x is not None and value is not None]
                if points:
                    lines.append(Line(run.name, number, points))
            if any(len(line.points) > 1 for line in lines):
                yield line_chart(lines, x_title, names(title), y_format=lambda value: f"{value:.2f}")

    main = list(charts(_MAIN_GROUPS, Checkpoint.average, str))
    others = list(charts((title for title in GROUPS if title not in _MAIN_GROUPS), Checkpoint.average, str))
    tasks = list(charts(TASKS, Checkpoint.score, lambda key: TASKS[key].name))
    legend = _legend(runs)
    content = "".join([legend, _charts(main), _fold("Other groups", others), _fold("Single tasks", tasks, not main)])
    note = "Main metrics in percent over training. A group has a point only where all of its tasks were evaluated."
    return _section("Learning curves", note, content) if main or others or tasks else ""


def _horizontal(runs: Sequence[Run]) -> tuple[str, Callable[[Run, Checkpoint], float | None]]:
    """The horizontal axis: samples if known for all checkpoints, else epochs, else the order of the checkpoints."""
    checkpoints = [checkpoint for run in runs for checkpoint in run.checkpoints]
    if all(checkpoint.samples is not None for checkpoint in checkpoints):
        return "samples seen", lambda run, checkpoint: checkpoint.samples
    if all(checkpoint.epoch is not None for checkpoint in checkpoints):
        return "epochs", lambda run, checkpoint: checkpoint.epoch
    return "checkpoint", lambda run, checkpoint: run.checkpoints.index(checkpoint) + 1


def _training(runs: Sequence[Run]) -> str:
    """From the training logs: comparable loss, temperature, and evaluations other than DataComp's."""
    if not any(lines for run in runs for lines in run.training):
        return ""
    charts = []
    for name, title in (("infonce", "InfoNCE of the batch"), ("loss", "loss"), ("temperature", "temperature")):
        lines = [
            Line(run.name, number, points, markers=False)
            for number, run in enumerate(runs)
            for records in run.training
            if len(points := _thin([(r["samples"], r[name]) for r in records if _is_number(r.get(name))])) > 1
        ]
        if lines:
            charts.append(line_chart(lines, "samples seen", title))
    evaluations = []
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        lines = []
        for number, run in enumerate(runs):
            points = [(place["samples"], value) for place, value in run.evaluations.get(name, ()) if _is_number(value)]
            if points:
                lines.append(Line(run.name, number, points))
        if any(len(line.points) > 1 for line in lines):
            evaluations.append(line_chart(lines, "samples seen", name))
    content = "".join([_legend(runs), _charts(charts), _fold("Other evaluations during training", evaluations)])
    note = "From metrics.jsonl. InfoNCE compares across losses and batches of one size; the losses themselves do not."
    return _section("Training", note, content)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` points, each the mean of a stretch of neighbors."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return list(points)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [tuple(sum(values) / len(stretch) for values in zip(*stretch, strict=True)) for stretch in stretches]


def _legend(runs: Sequence[Run]) -> str:
    entries = (f'<li><i class="s{n % SERIES_COLORS}"></i>{escape(run.name)}</li>' for n, run in enumerate(runs))
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _charts(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _fold(title: str, charts: Sequence[str], is_open: bool = False) -> str:
    if not charts:
        return ""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)} ({len(charts)})</summary>{_charts(charts)}</details>"
