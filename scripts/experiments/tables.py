"""Print the tables of a grid of runs, finished or not, as Markdown.

    python -m scripts.experiments.tables GRID.json --data icons-11k --results runs.jsonl

Each schedule has two tables: the chosen runs of every family on the test sets, with paired differences to a baseline, and
all settings on the validation sets.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.cli import command_line
from openclip_ext.compare.runs import Contest, Results, read_results
from openclip_ext.evaluation.statistics import seeds_interval
from openclip_ext.pages.rendering import markdown_table
from scripts.experiments.grid import contests, data_digest

# Columns of the table of the test sets, in percent.
_SHOWN = {
    "R@1": lambda scores: 50 * (scores["image-to-text"] + scores["text-to-image"]),
    "name": lambda scores: 100 * scores["name"],
}


def with_interval(differences: Sequence[float]) -> str:
    """Format the mean of paired differences; two or more also get their 95 % interval (Student's t)."""
    text = f"{statistics.fmean(differences):+.1f}"
    if len(differences) > 1:
        low, high = seeds_interval(differences)
        text += f" ({low:.1f} to {high:.1f})"
    return text.replace("-", "−")


def format_tables(grid: Mapping[str, Any], data: str, results: Results, baseline: str | None = None) -> str:
    """Format the tables of each schedule: the best runs of every family, and the validation scores of all settings.

    Differences are to the family ``baseline``, by default the first.
    """
    baseline = baseline or next(iter(grid["families"]))
    return "\n\n".join(
        f"{schedule}, test sets:\n\n{_format_best(contest, results, baseline)}"
        f"\n\n{schedule}, validation sets, seed {grid['seeds'][0]}:\n\n{_format_tuning(contest, results)}"
        for schedule, contest in contests(grid, data).items()
    )


def _format_best(contest: Contest, results: Results, baseline: str) -> str:
    of_family = {
        family: {run.seed: results[run.id] for run in contest.best(family, results) if run.id in results}
        for family in contest.families
    }
    rows = [["losses", "chosen", *_SHOWN, "R@1, each seed", "τ at the end", "CPU, s"]]
    for family, found in of_family.items():
        if not found:
            rows.append([family, "not tuned yet", *[""] * 5])
            continue
        lines = list(found.values())
        cells = [f"{_numbers(lines[0]['setting'])}, lr {lines[0]['lr']:g}"]
        for shown in _SHOWN.values():
            cell = f"{statistics.fmean(shown(line['test']) for line in lines):.1f}"
            reference = of_family[baseline]
            paired = [
                shown(found[seed]["test"]) - shown(reference[seed]["test"]) for seed in found if seed in reference
            ]
            cells.append(cell if family == baseline or not paired else f"{cell}, {with_interval(paired)}")
        cells.append(" ".join(f"{_SHOWN['R@1'](line['test']):.1f}" for line in lines))
        cells.append(f"{statistics.fmean(line['temperature'] for line in lines):.3f}")
        cells.append(f"{statistics.fmean(line['cpu_seconds'] for line in lines):.0f}")
        rows.append([family, *cells])
    return markdown_table(rows)


def _format_tuning(contest: Contest, results: Results) -> str:
    rows = [
        [
            *(family, _numbers(run.setting), f"{run.lr:g}"),
            *(f"{line['val']['mean']:.3f}", f"{line['val']['name']:.3f}", f"{line['temperature']:.3f}"),
        ]
        for family, runs in contest.families.items()
        for run in runs
        if (line := results.get(run.id)) is not None
    ]
    return markdown_table([["losses", "setting", "lr", "mean", "name", "τ at the end"], *rows])


def _numbers(setting: Mapping[str, Any]) -> str:
    """Format the numbers of a setting, which are what differs within a family."""
    flat = {key: value for key, value in setting.items() if key not in ("loss", "options")} | setting.get("options", {})
    numbers = {key: value for key, value in flat.items() if isinstance(value, float | int) and value is not True}
    return ", ".join(f"{key} {value:g}" for key, value in numbers.items()) or "defaults"


def main(argv: list[str]) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.experiments.tables", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("grid", type=Path, help="the grid's file")
    parser.add_argument("--data", type=Path, required=True, help="the grid's data folder")
    parser.add_argument("--results", type=Path, required=True, help="the grid's file of finished runs")
    parser.add_argument("--baseline", help="family to compare with (default: the first)")
    args = parser.parse_args(argv)
    grid = json.loads(args.grid.read_text())
    print(format_tables(grid, data_digest(args.data), read_results(args.results), args.baseline))


if __name__ == "__main__":
    command_line.run(main)
