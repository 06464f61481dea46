"""Print the tables of a grid of runs, finished or not, as Markdown.

    .venv/bin/python -m scripts.experiments.grid_tables GRID.json --data icons-11k --results runs.jsonl

For each schedule: every family's chosen run on the test sets, with paired differences to a baseline; and what was tried,
on the validation sets.
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from openclip_ext.diagnostics.compare.statistics import student_t
from scripts.experiments.run_grid import Run, best_run, data_digest, read_results, stages

# What the table of the test sets shows, in percent.
_SHOWN = {
    "R@1": lambda scores: 50 * (scores["image-to-text"] + scores["text-to-image"]),
    "name": lambda scores: 100 * scores["name"],
}


def format_tables(
    grid: dict[str, Any], data: str, results: dict[str, dict[str, Any]], baseline: str | None = None
) -> str:
    """Markdown: for each schedule every family's best run, and its score on the validation sets for all that was tried."""
    return "\n\n".join(
        f"{schedule}, test sets:\n\n{_format_best(grid, schedule, data, results, baseline or next(iter(grid['families'])))}"
        f"\n\n{schedule}, validation sets, seed {grid['seeds'][0]}:\n\n{_format_tuning(grid, schedule, data, results)}"
        for schedule in grid["schedules"]
    )


def _format_best(grid: dict, schedule: str, data: str, results: dict, baseline: str) -> str:
    rows = [
        "| losses | chosen | R@1 | name | R@1, each seed | τ at the end | CPU, s |",
        "|---|---|---|---|---|---|---|",
    ]
    reference = _finalists(grid, schedule, baseline, data, results)
    for family in grid["families"]:
        found = _finalists(grid, schedule, family, data, results)
        if not found:
            rows.append(f"| {family} | not tuned yet |" + " |" * 5)
            continue
        lines = list(found.values())
        cells = [f"{_short(lines[0]['setting'])}, lr {lines[0]['lr']:g}"]
        for shown in _SHOWN.values():
            cell = f"{statistics.fmean(shown(line['test']) for line in lines):.1f}"
            paired = [
                shown(found[seed]["test"]) - shown(reference[seed]["test"]) for seed in found if seed in reference
            ]
            cells.append(cell if family == baseline or not paired else f"{cell}, {_with_interval(paired)}")
        cells.append(" ".join(f"{_SHOWN['R@1'](line['test']):.1f}" for line in lines))
        cells.append(f"{statistics.fmean(line['temperature'] for line in lines):.3f}")
        cells.append(f"{statistics.fmean(line['cpu_seconds'] for line in lines):.0f}")
        rows.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _format_tuning(grid: dict, schedule: str, data: str, results: dict) -> str:
    rows = ["| losses | setting | lr | mean | name | τ at the end |", "|---|---|---|---|---|---|"]
    for family in grid["families"]:
        for run in _tried(grid, schedule, family, data, results):
            if run.id in results:
                line = results[run.id]
                rows.append(
                    f"| {family} | {_short(run.setting)} | {run.lr:g} | {line['val']['mean']:.3f} | "
                    f"{line['val']['name']:.3f} | {line['temperature']:.3f} |"
                )
    return "\n".join(rows)


def _tried(grid: dict, schedule: str, family: str, data: str, results: dict) -> list[Run]:
    """The runs of the first two stages, as far as they are decided."""
    return list(itertools.chain.from_iterable(list(stages(grid, schedule, family, data, results))[:2]))


def _finalists(grid: dict, schedule: str, family: str, data: str, results: dict) -> dict[int, dict[str, Any]]:
    """Finished lines of a family's chosen run by seed; empty before it is chosen."""
    found = list(stages(grid, schedule, family, data, results))
    if len(found) < 3:
        return {}
    chosen = [best_run([*found[0], *found[1]], results), *found[2]]
    return {run.seed: results[run.id] for run in chosen if run.id in results}


def _short(setting: dict[str, Any]) -> str:
    """The numbers of a setting: what differs within a family."""
    flat = {key: value for key, value in setting.items() if key not in ("loss", "options")} | setting.get("options", {})
    numbers = {key: value for key, value in flat.items() if isinstance(value, float | int) and value is not True}
    return ", ".join(f"{key} {value:g}" for key, value in numbers.items()) or "defaults"


def _with_interval(differences: list[float]) -> str:
    """Mean of paired differences with its 95 % interval (Student's t), where there are two or more."""
    mean = statistics.fmean(differences)
    text = f"{mean:+.1f}"
    if len(differences) > 1:
        half = student_t(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" ({mean - half:.1f} to {mean + half:.1f})"
    return text.replace("-", "−")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.experiments.grid_tables", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("grid", type=Path, help="as for run_grid")
    parser.add_argument("--data", type=Path, required=True, help="as for run_grid")
    parser.add_argument("--results", type=Path, required=True, help="as for run_grid")
    parser.add_argument("--baseline", help="family to compare with (default: the first)")
    args = parser.parse_args(argv)
    grid = json.loads(args.grid.read_text())
    print(format_tables(grid, data_digest(args.data), read_results(args.results), args.baseline))


if __name__ == "__main__":
    main()
