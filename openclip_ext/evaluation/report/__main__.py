"""Compare runs in tables and on one HTML page: ``openclip-ext report RUN RUN ... --output FOLDER``."""

import argparse
from pathlib import Path

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import echo
from openclip_ext.evaluation.report.curves import plot
from openclip_ext.evaluation.report.page import build_page
from openclip_ext.evaluation.report.runs import read_runs
from openclip_ext.evaluation.report.tables import build_rows, comma_separated, markdown
from openclip_ext.evaluation.report.training import training_tables
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.pages.rendering import markdown_table

CURVES = "curves.png"


def build_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="openclip-ext report",
        description="Compare runs side by side: settings that differ, training time, curves, validation, and DataComp's tasks "
        "if they were evaluated. Writes report.md, curves.png, report.html (one file that needs no network), and after an "
        "evaluation, report.csv. Differences are relative to the first run.",
    )
    results_help = (
        "a run folder (LOGS/NAME), eval_results.jsonl, or a folder with this file. Several paths with the same NAME are "
        "repeats of one run, shown as mean and standard deviation. If two runs have repeats with the same seeds, the "
        "difference in a validation metric has a 95 %% interval"
    )
    parser.add_argument("results", nargs="+", metavar="[NAME=]PATH", help=results_help)
    output_help = "folder of the report (default: %(default)s)"
    parser.add_argument("--output", type=output_path, default=Path("report"), help=output_help)
    parser.add_argument("--title", default="Evaluation report", help="title of the page (default: %(default)s)")
    return parser


def main(argv: list[str]) -> None:
    """Write the tables and the page; print the tables of the training logs and the group averages."""
    args = build_parser().parse_args(argv)
    runs = read_runs(args.results)
    evaluated = [run for run in runs if run.checkpoints]
    rows = build_rows(evaluated) if evaluated else []
    args.output.mkdir(parents=True, exist_ok=True)
    training = training_tables([run for run in runs if run.logs])
    tables = [markdown_table(table) + "\n" for table in training]
    files = {"report.html": build_page(runs, training, rows, args.title)}
    if evaluated:
        tables.append(markdown(evaluated, rows))
        files["report.csv"] = comma_separated(evaluated)
    files["report.md"] = "\n".join(tables)
    for name, content in files.items():
        write_text(args.output / name, content)
    if logs := {run.name: run.logs for run in runs if any(log.steps for log in run.logs)}:
        plot(logs, args.output / CURVES)
        files[CURVES] = ""
    if evaluated:
        tables[-1] = markdown(evaluated, [row for row in rows if row.is_group])
    echo("\n".join(tables))
    print(f"Written: {', '.join(str(args.output / name) for name in sorted(files))}")


if __name__ == "__main__":
    command_line.run(main)
