"""The report as one HTML page without external resources: tables, and curves as inline SVG."""

import html
import math
from collections.abc import Mapping, Sequence

from openclip_ext.diagnostics.compare.report import Report, lines, tables

# Colors that people with color-blindness tell apart (Okabe and Ito).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 520, 300, 48, 40, 12, 110
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 14px; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.7rem; text-align: left; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { background: #f4f4f4; }
pre { background: #f4f4f4; padding: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.sentence { font-size: 1.3rem; font-weight: 600; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; }
"""

Point = tuple[float, float]


def render(report: Report) -> str:
    """The page."""
    chosen = next((one for one in report.results if one.loss == report.recommended), None)
    parts = [
        "<h1>Which loss?</h1>",
        f'<p class="sentence">{html.escape(report.sentence)}</p>',
        f"<p>{html.escape(report.text_of_judgement)}</p>",
    ]
    if chosen is not None:
        parts.append("<p>Train the recommended configuration, at the pilot's length:</p>")
        parts.append(f"<pre>{html.escape(chosen.command)}</pre>")
    if report.results:
        parts.append(f"<h2>Learning curves</h2><div class='charts'>{_curves(report)}</div>")
        parts.append("<p>Mean over the seeds that all have, R@1 in percent, on the half that gives the numbers.</p>")
    for title, rows in tables(report).items():
        parts.append(f"<h2>{html.escape(title)}</h2>{_table(rows)}")
    parts.append("<h2>Reading it</h2>")
    parts += [f"<p>{html.escape(text)}</p>" for text in lines(report)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Which loss?</title>'
    head += f"<style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(parts)}</body></html>\n'


def _table(rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(rows[0], "th") + "".join(row(cells, "td") for cells in rows[1:]) + "</table>"


def _curves(report: Report) -> str:
    over_samples, over_time = {}, {}
    common = min(len(one.curves) for one in report.results)
    for one in report.results:
        # Seeds have the same points in samples; their times are averaged.
        points = [
            tuple(sum(values) / len(values) for values in zip(*seeds, strict=True))
            for seeds in zip(*one.curves[:common], strict=False)
        ]
        over_samples[one.loss] = [(samples, 100 * score) for samples, _, score in points]
        over_time[one.loss] = [(seconds, 100 * score) for _, seconds, score in points]
    return chart(over_samples, "samples seen") + chart(over_time, "seconds of training")


def chart(series: Mapping[str, Sequence[Point]], label: str) -> str:
    """Lines with their names, as SVG; the vertical axis is R@1 and begins at 0."""
    points = [point for line in series.values() for point in line]
    right, top = (max((point[axis] for point in points), default=1.0) or 1.0 for axis in (0, 1))
    x_step, y_step = _step(right), _step(top)
    right, top = x_step * math.ceil(right / x_step), y_step * math.ceil(top / y_step)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: Point) -> Point:
        return _LEFT + inner_width * point[0] / right, _TOP + inner_height * (1 - point[1] / top)

    parts = []
    for number in range(round(top / y_step) + 1):
        x, y = place((0, number * y_step))
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:g}</text>')
    for number in range(round(right / x_step) + 1):
        x, y = place((number * x_step, 0))
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{_short(number * x_step)}</text>')
    parts.append(
        f'<text x="{_LEFT + inner_width / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{html.escape(label)}</text>'
    )
    for number, (name, line) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in map(place, line)]
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{_TOP + 14 + 18 * number}" fill="{color}">{html.escape(name)}</text>'
        )
    title = f"R@1 over {label}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _step(largest: float) -> float:
    """A round distance of three to six ticks."""
    rough = largest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"
