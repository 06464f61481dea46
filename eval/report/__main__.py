"""Compare evaluated runs in tables and on one HTML page: ``python -m eval.report RESULTS... --output DIR``."""

import argparse
from pathlib import Path

from openclip_ext.diagnostics import command_line
from openclip_ext.files import output_path

from .page import build_page
from .runs import read_runs
from .tables import build_rows, comma_separated, markdown


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="openclip-ext report",
        description="Compare evaluated runs. The report is report.md, report.csv and report.html (one file that needs no "
        "network). The first run is the baseline of the others.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        metavar="[NAME=]PATH",
        help="eval_results.jsonl, a folder with one, or a run folder (all of its checkpoints). Several paths with the "
        "same NAME are repeats of one run, shown as mean and standard deviation",
    )
    parser.add_argument(
        "--output", type=output_path, default=Path("report"), help="folder of the report (default: %(default)s)"
    )
    parser.add_argument("--title", default="Evaluation report", help="title of the page (default: %(default)s)")
    return parser


def main(argv: list[str]) -> None:
    """Write the tables and the page, and print the averages."""
    args = build_parser().parse_args(argv)
    runs = read_runs(args.results)
    rows = build_rows(runs)
    args.output.mkdir(parents=True, exist_ok=True)
    files = {
        "report.md": markdown(runs, rows),
        "report.csv": comma_separated(runs),
        "report.html": build_page(runs, rows, args.title),
    }
    for name, content in files.items():
        (args.output / name).write_text(content, encoding="utf-8")
    print(markdown(runs, [row for row in rows if row.is_group]))
    print(f"Written: {', '.join(str(args.output / name) for name in files)}")


if __name__ == "__main__":
    command_line.run(main)
