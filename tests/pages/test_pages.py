"""Report pages and charts: no external resources, escaped texts, and colors for a light and a dark theme."""

import re
from xml.etree import ElementTree

import jinja2
import pytest

from openclip_ext.pages import charts
from openclip_ext.pages.charts import Bar, Chart, Curve, bar_chart, line_chart
from openclip_ext.pages.rendering import render_page

SVG = "{http://www.w3.org/2000/svg}"
COMPARE = {"command": "<b>&", "curves": [], "legend": [], "tables": {"<i>": [["a", "<u>"], ["&", "$x$"]]}, "lines": []}


def parse(svg: str) -> ElementTree.Element:
    """Parse a chart and return its root. Assert that all its references are to its own elements."""
    assert not re.search(r"@import|<image|<a ", svg)
    assert {name[0] for name in re.findall(r'(?:href="|url\()([^")]+)', svg)} <= {"#"}
    return ElementTree.fromstring(svg)


def texts(chart: ElementTree.Element, tag: str) -> list[str]:
    return [element.text or "" for element in chart.iter(SVG + tag)]


def test_a_page_is_escaped_and_fetches_nothing():
    report = {"sentence": "<script>alert(1)</script>", "text_of_judgement": "a < b"}
    page = render_page("compare.html", "<title>", report=report, **COMPARE)
    with pytest.raises(jinja2.UndefinedError, match="report"):
        render_page("compare.html", "title", **COMPARE)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert page.count("<title>") == 1 and "<td>&amp;</td><td>$x$</td>" in page and "<th>&lt;u&gt;</th>" in page
    assert not re.search(r"https?:|<link|@import|url\(|src=", page)


def test_bars_have_their_hints_and_texts():
    bars = [Bar("a<b>", 2.0, "+2", "1 & 2"), Bar("$same$", -1.0, "−1", "below"), Bar("$same$", 0.5, "+0.5", "again")]
    chart = parse(bar_chart(bars, "points"))
    assert texts(chart, "title") == ["1 & 2", "below", "again"]
    assert {"a<b>", "$same$", "+2", "−1", "points"} <= set(texts(chart, "text"))
    assert texts(chart, "text").count("$same$") == 2
    assert chart.attrib["aria-label"] == "points: 3 bars"


def test_points_have_their_values_as_hints():
    curves = [Curve("a", [(0.0, 1.0), (2000.0, 3.25)], 0), Curve("b", [(1000.0, 2.0)], 9)]
    chart = parse(line_chart(Chart("R@1 of <x>", curves, "samples")))
    assert texts(chart, "title") == ["a: 1 at 0 samples", "a: 3.25 at 2k samples", "b: 2 at 1k samples"]
    assert "R@1 of <x>" in texts(chart, "text")


@pytest.mark.parametrize("points", [[(0.0, 1.0)], [(1.0, 2.0), (2.0, 2.0)], [(0.0, -1e9), (3e9, 1e9)], [(0.0, 0.0)]])
def test_odd_values_can_be_drawn(points):
    parse(line_chart(Chart("y", [Curve("a", points, band=points)], from_zero=True, levels={"of <guessing>": 1.0})))
    parse(bar_chart([Bar("a", value, "", "") for _, value in points], "x"))


def test_charts_have_no_color_of_one_theme_and_are_equal_each_time():
    points = [(0.0, 1.0), (1.0, 2.0)]
    drawn, again = (line_chart(Chart("y", [Curve("a", points, 3, band=points)])) for _ in range(2))
    assert drawn == again
    # Apart from the palette, a chart uses only the text color of the page.
    assert set(re.findall(r"(?:fill|stroke): ([#\w]+)", drawn)) == {"none", "currentColor", charts.color(3)}
