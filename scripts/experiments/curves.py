"""Draw the curves of a grid's finished runs: the validation score and the error of the log-normalizers after each epoch.

    python -m scripts.experiments.curves docs/benchmarks/icons/icons-300k-5-epochs.jsonl --figure docs/images/five-epochs.png

A line is the mean over the seeds, and its band is the range. The rows are from one schedule of a grid with
``"estimation_error"``.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.cli import command_line
from openclip_ext.compare.trials import read_results
from openclip_ext.evaluation.report.curves import draw
from openclip_ext.files.writing import output_path
from openclip_ext.pages.charts import Chart, Curve


def charts(rows: Iterable[Mapping[str, Any]]) -> list[Chart]:
    """Return two charts over the samples seen, with a curve for each family of settings."""
    by_family = defaultdict(list)
    for row in rows:
        by_family[row["family"]].append(row)
    scores, errors = [], []
    for number, (family, runs) in enumerate(by_family.items()):
        seen = [samples for samples, *_ in runs[0]["curve"]]
        scores.append(_curve(family, number, seen, [[100 * score for *_, score in run["curve"]] for run in runs]))
        errors.append(_curve(family, number, seen, [_errors(run) for run in runs]))
    return [
        Chart("R@1 and name accuracy, mean in percent", scores),
        Chart("mean squared error of log-normalizers", errors, from_zero=True),
    ]


def _errors(run: Mapping[str, Any]) -> list[float]:
    """Return the errors of the loss's own estimator, or of the mini-batch if the loss has no other estimator."""
    errors = run["estimation_errors"]
    return [error["minibatch"] if error["estimator"] is None else error["estimator"] for error in errors]


def _curve(name: str, color: int, seen: Sequence[int], values: Sequence[Sequence[float]]) -> Curve:
    of_points = list(zip(*values, strict=True))  # the seeds' values at each point
    means = [statistics.fmean(of_seeds) for of_seeds in of_points]
    band = [(min(of_seeds), max(of_seeds)) for of_seeds in of_points]
    return Curve(name, list(zip(seen, means, strict=True)), color, band)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("rows", type=Path, help="JSON lines file of finished runs")
    parser.add_argument("--figure", type=output_path, required=True, help="PNG file for the figure")
    args = parser.parse_args(argv)
    draw(charts(read_results(args.rows).values()), args.figure)


if __name__ == "__main__":
    command_line.run(main)
