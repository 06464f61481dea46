"""The report as one HTML page without external resources: tables, and learning curves as inline SVG."""

from openclip_ext.experiments.compare.report import Report, lines, tables
from openclip_ext.pages import charts
from openclip_ext.pages.charts import Curve, line_chart
from openclip_ext.pages.rendering import render_page


def render(report: Report) -> str:
    """Return the page of a report."""
    command = next((one.command for one in report.results if one.loss == report.recommended), None)
    over_samples, over_time = _curves(report)
    drawn = [
        line_chart(curves, label, "R@1", from_zero=True, size=(520, 300))
        for curves, label in ((over_samples, "samples seen"), (over_time, "seconds of training"))
        if curves
    ]
    legend = [(charts.color(number), one.loss) for number, one in enumerate(report.results)]
    return render_page(
        "compare.html",
        "Which loss?",
        report=report,
        command=command,
        curves=drawn,
        legend=legend,
        tables=tables(report),
        lines=lines(report),
    )


def _curves(report: Report) -> tuple[list[Curve], list[Curve]]:
    """Return each loss's R@1 in percent over samples and over seconds: means over the seeds that all losses have."""
    common = min((len(one.curves) for one in report.results), default=0)
    over_samples, over_time = [], []
    for number, one in enumerate(report.results):
        # Seeds have the same points in samples; their times are averaged.
        points = [
            tuple(sum(values) / len(values) for values in zip(*seeds, strict=True))
            for seeds in zip(*one.curves[:common], strict=False)
        ]
        over_samples.append(Curve(one.loss, [(samples, 100 * score) for samples, _, score in points], number))
        over_time.append(Curve(one.loss, [(seconds, 100 * score) for _, seconds, score in points], number))
    return over_samples, over_time
