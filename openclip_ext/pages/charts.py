"""Draw bar charts and curves as inline SVG, with matplotlib.

Text, axes and grid have the page's text color (``currentColor``). The series have colors that are readable on white and on
black.
"""

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Colors based on Okabe and Ito's palette for color-blind people. Their contrast is at least 3:1 on a light and a dark page.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c0689a", "#a67c00", "#4a90d9", "#8a63d2", "#808080")
# Placeholder for the page's text color (``currentColor``), which matplotlib does not support. It is replaced in the SVG.
_TEXT_COLOR = "#010203"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _TEXT_COLOR,
    "axes.labelcolor": _TEXT_COLOR,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",  # part of matplotlib; in HTML pages, CSS replaces this font
    "font.size": 11,
    "grid.alpha": 0.2,
    "grid.color": _TEXT_COLOR,
    "svg.fonttype": "none",
    "text.color": _TEXT_COLOR,
    "text.parse_math": False,
    "xtick.color": _TEXT_COLOR,
    "ytick.color": _TEXT_COLOR,
}
_PIXELS_PER_INCH = 72  # with this value, one of matplotlib's points is one pixel in the SVG

Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its value, the text next to the bar, the tooltip (``hint``), and the standard error."""

    label: str
    value: float
    text: str
    hint: str
    error: float = 0.0


@dataclass(frozen=True)
class Curve:
    """A curve: name, points in ascending order of x, color number (see :func:`color`), optional ``(low, high)`` per point."""

    name: str
    points: Sequence[Point]
    color: int = 0
    band: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """Curves over a common horizontal axis that starts at 0. ``levels`` are labeled horizontal lines."""

    title: str
    curves: Sequence[Curve]
    x_title: str = "samples seen"
    from_zero: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)


def color(number: int) -> str:
    """Return the color of series ``number``. After eight series, the colors repeat."""
    return PALETTE[number % len(PALETTE)]


def bar_chart(bars: Sequence[Bar], x_title: str) -> Markup:
    """Draw one or more horizontal bars, in the given order from top to bottom. Values may be positive or negative."""

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained")  # makes room for labels of any length
        axes = figure.subplots()
        colors = [color(0) if bar.value >= 0 else color(1) for bar in bars]
        errors = [bar.error for bar in bars] if any(bar.error for bar in bars) else None
        style: dict[Any, Any] = {"ecolor": _TEXT_COLOR, "error_kw": {"linewidth": 0.8}}
        drawn = axes.barh(range(len(bars)), [bar.value for bar in bars], color=colors, height=0.7, xerr=errors, **style)
        axes.bar_label(drawn, [bar.text for bar in bars], padding=4, fontsize=10)
        for number, patch in enumerate(drawn):
            patch.set_gid(_hint_id(number))
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel=x_title, ylim=(len(bars) - 0.4, -0.6))
        axes.margins(x=0.12)
        axes.spines["left"].set_visible(False)
        axes.axvline(0, color=_TEXT_COLOR, linewidth=0.8)
        axes.grid(axis="x")

    return _svg(draw, (860, 52 + 20 * len(bars)), f"{x_title}: {len(bars)} bars", [bar.hint for bar in bars])


def draw_curves(axes: Axes, chart: Chart) -> None:
    """Draw a chart on the axes of any figure. Each point gets an id, so that :func:`_svg` can add its tooltip."""
    number = itertools.count()
    for curve in chart.curves:
        # matplotlib's legend omits labels that start with "_".
        label = f" {curve.name}" if curve.name.startswith("_") else curve.name
        axes.plot(*zip(*curve.points, strict=True), color=color(curve.color), linewidth=1.8, label=label)
        for x, y in curve.points:
            axes.plot(x, y, "o", color=color(curve.color), markersize=5, gid=_hint_id(next(number)))
        if any(low < high for low, high in curve.band):
            across, (low, high) = [x for x, _ in curve.points], zip(*curve.band, strict=True)
            axes.fill_between(across, low, high, color=color(curve.color), alpha=0.15, linewidth=0)
    for label, level in chart.levels.items():
        axes.axhline(level, color=PALETTE[-1], linestyle="--", linewidth=1)
        place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(label, (1, level), (-4, -4), color=PALETTE[-1], fontsize=9, **place)
    axes.set_title(chart.title, loc="left")
    axes.set(xlabel=chart.x_title)
    axes.set_xlim(left=0)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: short_number(value))
    axes.grid(axis="y")


def line_chart(chart: Chart, size: tuple[int, int] = (400, 270)) -> Markup:
    """Draw a chart of ``size`` (width and height in pixels). It has no legend, because all charts of a page share one."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        # Set fixed margins, because matplotlib's layout engine would take as long as the drawing.
        width, height = size
        figure.subplots_adjust(left=50 / width, right=1 - 12 / width, bottom=42 / height, top=1 - 28 / height)
        draw_curves(axes, chart)

    hints = [f"{one.name}: {y:.4g} at {short_number(x)} {chart.x_title}" for one in chart.curves for x, y in one.points]
    return _svg(draw, size, f"{chart.title} over {chart.x_title}", hints)


def short_number(value: float) -> str:
    """Format a number with up to four digits and a letter, such as ``320M`` for 320000000."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _hint_id(number: int) -> str:
    return f"hint-{number}"


def _svg(draw: Callable[[Figure], None], size: tuple[int, int], label: str, hints: Sequence[str]) -> Markup:
    """Draw on an empty figure; return its ``<svg>`` element. ``hints[i]`` is the tooltip of the element ``hint-i``."""
    width, height = size
    stream = io.StringIO()
    # With the label as salt, a chart has the same ids in every run, and other ids than the other charts on the page.
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": label}):
        figure = Figure((width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH))
        draw(figure)
        without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=without)
    svg = stream.getvalue().partition("<svg")[2].replace(_TEXT_COLOR, "currentColor")
    for number, hint in enumerate(hints):
        svg = svg.replace(f'<g id="{_hint_id(number)}">', f"<g><title>{escape(hint)}</title>", 1)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # remove matplotlib's ids, which repeat in every chart
    svg = re.sub(r'="([\d.]+)pt"', r'="\1"', svg, count=2)
    return Markup(f'<svg role="img" aria-label="{escape(label)}"{svg}')
