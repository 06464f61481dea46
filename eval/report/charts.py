"""Charts as SVG text, without any library: bars of differences, and lines over training.

Colors come from the page's style sheet (classes ``s0`` to ``s7``, ``up``, ``down``, ``axis``, ``grid``), so that one
drawing serves light and dark.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

SERIES_COLORS = 8
_CHARACTER_WIDTH = 6.6  # of the 12-pixel font, on average


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value, and the text beside it and on hovering."""

    label: str
    value: float
    text: str
    hint: str


@dataclass(frozen=True)
class Line:
    """One curve: its name, its color's number, and its points, ascending in x."""

    name: str
    color: int
    points: Sequence[tuple[float, float]]
    markers: bool = True


def bar_chart(bars: Sequence[Bar], unit: str, width: int = 860) -> str:
    """Horizontal bars to both sides of zero, from top to bottom in the given order.

    Args:
        bars: at least one.
        unit: title of the axis.
        width: in pixels.
    """
    row, top, bottom = 20, 8, 44
    left = round(max(len(bar.label) for bar in bars) * _CHARACTER_WIDTH) + 14
    value_room = round(max(len(bar.text) for bar in bars) * _CHARACTER_WIDTH) + 8
    low, high = min(0.0, *(bar.value for bar in bars)), max(0.0, *(bar.value for bar in bars))
    ticks = _ticks(low, high, 8)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    room_left, room_right = value_room if low < 0 else 0, value_room if high > 0 else 0
    place = _scale(low, high, left + room_left, width - room_right - 8)
    height = top + row * len(bars) + bottom
    parts = [_open(width, height, f"{unit}: {len(bars)} bars")]
    for tick in ticks:
        x = place(tick)
        parts.append(_segment(x, top, x, height - bottom, "axis" if tick == 0 else "grid"))
        parts.append(_text(x, height - bottom + 16, _number(tick), anchor="middle", style="tick"))
    parts.append(_text((place(low) + place(high)) / 2, height - 8, unit, anchor="middle", style="tick"))
    for number, bar in enumerate(bars):
        y = top + row * number
        zero, end = place(0.0), place(bar.value)
        style = "up" if bar.value >= 0 else "down"
        parts.append(f"<g><title>{escape(bar.hint)}</title>")
        parts.append(_text(left - 8, y + 14, bar.label, anchor="end"))
        parts.append(
            f'<rect class="{style}" x="{min(zero, end):.1f}" y="{y + 3}" width="{max(abs(end - zero), 1):.1f}" '
            f'height="{row - 6}" rx="2"/>'
        )
        anchor, offset = ("start", 5) if bar.value >= 0 else ("end", -5)
        parts.append(_text(end + offset, y + 14, bar.text, anchor=anchor, style="value"))
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def line_chart(
    lines: Sequence[Line],
    x_title: str,
    y_title: str,
    width: int = 400,
    height: int = 270,
    y_format: Callable[[float], str] | None = None,
) -> str:
    """Curves over training. The names of the curves are the page's business (one legend for all charts).

    Args:
        lines: at least one, each with at least one point.
        x_title: title of the horizontal axis.
        y_title: title, above the chart.
        width: in pixels.
        height: in pixels.
        y_format: text of a value, for hovering; default four significant digits.
    """
    y_format = y_format or (lambda value: f"{value:.4g}")
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_ticks, y_ticks = _ticks(min(0.0, min(xs)), max(xs), 6), _ticks(min(ys), max(ys), 6)
    y_labels = [_number(tick) for tick in y_ticks]
    left, right, top, bottom = 14 + round(max(map(len, y_labels)) * _CHARACTER_WIDTH), 16, 30, 44
    across = _scale(min(x_ticks[0], min(xs)), max(x_ticks[-1], max(xs)), left, width - right)
    up = _scale(min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys)), height - bottom, top)
    parts = [_open(width, height, f"{y_title} over {x_title}"), _text(left, 16, y_title, style="title")]
    for tick, label in zip(y_ticks, y_labels, strict=True):
        parts.append(_segment(left, up(tick), width - right, up(tick), "grid"))
        parts.append(_text(left - 6, up(tick) + 4, label, anchor="end", style="tick"))
    for tick in x_ticks:
        parts.append(_segment(across(tick), height - bottom, across(tick), height - bottom + 4, "axis"))
        parts.append(_text(across(tick), height - bottom + 18, _number(tick), anchor="middle", style="tick"))
    parts.append(_segment(left, height - bottom, width - right, height - bottom, "axis"))
    parts.append(_text((left + width - right) / 2, height - 8, x_title, anchor="middle", style="tick"))
    for line in lines:
        color = f"s{line.color % SERIES_COLORS}"
        points = [(across(x), up(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {color}" points="{path}"/>')
        for (x, y), (raw_x, raw_y) in zip(points, line.points, strict=True):
            if line.markers or len(points) == 1:
                hint = escape(f"{line.name}: {y_format(raw_y)} at {_number(raw_x)} {x_title}")
                parts.append(
                    f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{hint}</title></circle>'
                )
    return "".join([*parts, "</svg>"])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A linear map from values to pixels; a single value lies in the middle."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round numbers that enclose [low, high]; a single one if they are equal."""
    if high <= low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _number(value: float) -> str:
    """Short: 320M rather than 320000000."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    )


def _segment(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "label") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
