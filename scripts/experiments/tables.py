"""Print Markdown tables of a grid's results. The grid may be unfinished.

    python -m scripts.experiments.tables GRID.json --data icons-11k --results runs.jsonl

Each schedule has two tables. The first table has the test results of each family's best setting, with paired differences from
a baseline. The second table has the validation results of all settings.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.cli import command_line
from openclip_ext.compare.trials import Results, read_results
from openclip_ext.evaluation.statistics import format_bound, seeds_interval
from openclip_ext.pages.rendering import markdown_table
from scripts.experiments.grid import Contest, contests, data_digest


def recall(scores: Mapping[str, float]) -> float:
    """Return R@1 in percent, averaged over both directions."""
    return 50 * (scores["image-to-text"] + scores["text-to-image"])


# Columns of the test set's table, in percent.
_SHOWN = {"R@1": recall, "name": lambda scores: 100 * scores["name"]}


def format_tables(grid: Mapping[str, Any], data: str, results: Results, baseline: str | None = None) -> str:
    """Return the tables of each schedule. Families are compared with ``baseline``. None (default) means the first family."""
    parts = []
    for schedule, contest in contests(grid, data).items():
        parts += [f"{schedule}, test sets:", _best_runs(contest, results, baseline or next(iter(contest.families)))]
        parts += [f"{schedule}, validation sets, seed {contest.seeds[0]}:", _tuning(contest, results)]
    return "\n\n".join(parts)


def _best_runs(contest: Contest, results: Results, baseline: str) -> str:
    found = {
        family: {run.seed: results[run.id] for run in contest.best(family, results) if run.id in results}
        for family in contest.families
    }
    table = [["losses", "chosen", *_SHOWN, "R@1, each seed", "τ at the end", "CPU, s"]]
    for family, rows in found.items():
        if not rows:
            table.append([family, "not tuned yet", *[""] * 5])
            continue
        first, every = next(iter(rows.values())), list(rows.values())
        cells = [family, f"{_numbers(first['setting'])}, lr {first['lr']:g}"]
        for shown in _SHOWN.values():
            cells.append(f"{statistics.fmean(shown(row['test']) for row in every):.1f}")
            of_base = found[baseline]
            paired = [
                shown(row["test"]) - shown(of_base[seed]["test"]) for seed, row in rows.items() if seed in of_base
            ]
            if paired and family != baseline:
                cells[-1] += f", {with_interval(paired)}"
        cells.append(" ".join(f"{recall(row['test']):.1f}" for row in every))
        cells.append(f"{statistics.fmean(row['temperature'] for row in every):.3f}")
        cells.append(f"{statistics.fmean(row['cpu_seconds'] for row in every):.0f}")
        table.append(cells)
    return markdown_table(table)


def with_interval(differences: Sequence[float], bold: bool = False) -> str:
    """Format the mean of paired differences. For two or more differences, add the 95 % interval (Student's t).

    With ``bold``, the text is bold if the interval excludes 0.
    """
    text = f"{statistics.fmean(differences):+.1f}"
    if len(differences) > 1:
        low, high = seeds_interval(differences)
        text += f" ({format_bound(low)} to {format_bound(high)})"
        if bold and (low > 0 or high < 0):
            text = f"**{text}**"
    return text.replace("-", "−")


def _tuning(contest: Contest, results: Results) -> str:
    table = [["losses", "setting", "lr", "mean", "name", "τ at the end"]]
    for family, runs in contest.families.items():
        for run in (run for run in runs if run.id in results):
            row = results[run.id]
            scores = (row["val"]["mean"], row["val"]["name"], row["temperature"])
            table.append([family, _numbers(run.setting), f"{run.lr:g}", *(f"{value:.3f}" for value in scores)])
    return markdown_table(table)


def _numbers(setting: Mapping[str, Any]) -> str:
    """Format the numbers in a setting, because settings of a family differ in their numbers."""
    flat = {**setting, **setting.get("options", {})}
    numbers = {key: value for key, value in flat.items() if isinstance(value, float | int) and value is not True}
    return ", ".join(f"{key} {value:g}" for key, value in numbers.items()) or "defaults"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("grid", type=Path, help="JSON file of the grid")
    parser.add_argument("--data", type=Path, required=True, help="data folder of the grid")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines file of finished runs")
    parser.add_argument("--baseline", help="family to compare with (default: the first family)")
    args = parser.parse_args(argv)
    grid = json.loads(args.grid.read_text())
    print(format_tables(grid, data_digest(args.data), read_results(args.results), args.baseline))


if __name__ == "__main__":
    command_line.run(main)
