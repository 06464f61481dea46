"""``python -m eval.download --data-dir DIR [--tasks ...] [--verify]``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..tasks import Task, select_tasks
from .fetch import (
    DownloadError,
    FetchOptions,
    Plan,
    check_space,
    fetch_set,
    format_bytes,
    free_bytes,
    make_plan,
)
from .verify import verify_set


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Fetch DataComp's evaluation sets from the Hugging Face hub, once; everything else works offline. "
        "Run the same command again to go on after an interruption.",
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that gets a folder a data set")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="keys, names or suites (default: all 40)")
    parser.add_argument("--verify", action="store_true", help="only check the folders, without a network")
    parser.add_argument(
        "--allow-size-mismatch", action="store_true", help="with --verify: accept other sizes than DataComp's"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the files to fetch, and the space they take")
    parser.add_argument("--connections", type=int, default=4, help="files fetched at a time (default: %(default)s)")
    parser.add_argument("--endpoint", help="address of the hub or a mirror (default: HF_ENDPOINT, or the hub's)")
    parser.add_argument(
        "--keep-source", action="store_true", help="keep the zip and table of sets that had to be converted"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 when every chosen set is there and whole."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.connections < 1:
        parser.error(f"--connections is {args.connections}: expected at least 1")
    try:
        tasks = select_tasks(args.tasks)
    except ValueError as error:
        parser.error(str(error))
    if args.verify:
        return _verify(args.data_dir, tasks, args.allow_size_mismatch)
    try:
        plan = make_plan(args.data_dir, tasks, args.endpoint)
        _print_plan(args.data_dir, plan)
        if args.dry_run:
            return 1 if plan.refused else 0
        check_space(args.data_dir, plan)
        return _download(args.data_dir, tasks, plan, FetchOptions(args.connections, args.keep_source, args.endpoint))
    except OSError as error:  # no network, no space
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        return 130


def _verify(data_dir: Path, tasks: Sequence[Task], any_size: bool) -> int:
    usable = 0
    for task in tasks:
        verdict = verify_set(data_dir, task, any_size)
        usable += verdict.usable
        samples = "" if verdict.samples is None else f"{verdict.samples:,} samples"
        print(f"{verdict.status:<17} {task.key:<52} {samples}", flush=True)
        for problem in verdict.problems:
            print(f"{'':<17}   {problem}", flush=True)
    print(f"{usable} of {len(tasks)} data sets can be scored.")
    return 0 if usable == len(tasks) else 1


def _download(data_dir: Path, tasks: Sequence[Task], plan: Plan, options: FetchOptions) -> int:
    failed = dict(plan.refused)
    for planned in plan.sets:
        try:
            fetch_set(planned, options)
        except (DownloadError, ValueError) as error:
            failed[planned.task.key] = str(error)
    print(f"{len(tasks) - len(failed)} of {len(tasks)} data sets are complete in {data_dir}.")
    for key, reason in failed.items():
        print(f"failed: {key}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _print_plan(data_dir: Path, plan: Plan) -> None:
    for task in plan.present:
        print(f"there       {task.key}")
    for planned in plan.sets:
        size = format_bytes(planned.missing)
        print(f"to fetch    {planned.task.key:<52} {len(planned.remote.files):>5} files {size:>10}")
    for key, reason in plan.refused.items():
        print(f"refused     {key}: {reason}")
    missing = format_bytes(sum(planned.missing for planned in plan.sets))
    needed = format_bytes(sum(planned.needed for planned in plan.sets))
    free = format_bytes(free_bytes(data_dir))
    print(f"{missing} to fetch, {needed} of disk to use at most, {free} free in {data_dir}.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
