"""Evaluate a checkpoint on DataComp's 40 tasks: ``python -m eval.datacomp``.

The exit status is 0 if all tasks have a result, 1 if a task failed, and 2 if nothing could be evaluated. A task without data
counts as failed only if ``--tasks`` lists the task. Other tasks without data are only reported.
"""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from openclip_ext import distributed
from openclip_ext.cli import command_line
from openclip_ext.cli.messages import get_logger, mask_logs, say
from openclip_ext.evaluation.command_line import add_model_arguments, load_encoder, model_options, process_group
from openclip_ext.evaluation.data import DataError, fingerprint
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.models import LoadedModel, options_of_run
from openclip_ext.evaluation.results import ResultFile, has_other_data, run_identity, summary, summary_text
from openclip_ext.evaluation.run_folder import label_of
from openclip_ext.evaluation.runner import evaluate_task
from openclip_ext.evaluation.tasks import SUITES, Task, select_tasks
from openclip_ext.files.writing import output_path, write_text

SUMMARY_FILE = "eval_summary.json"
logger = get_logger("eval.datacomp")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="openclip-ext evaluate",
        description="Evaluate a checkpoint on DataComp's 40 tasks (the average is over 38). Several processes under "
        "torchrun share the tasks. The same command continues an interrupted run.",
        epilog="Exit status: 0 if all tasks have a result, 1 if a task failed or data of --tasks are missing, 2 if nothing "
        "could be evaluated.",
    )
    add_model_arguments(parser, takes_run=True)
    folder_help = "folder with the wds_*_test folders (see openclip-ext download)"
    parser.add_argument("--data-dir", type=Path, required=True, help=folder_help)
    tasks_help = f"keys of tasks such as vtab/pets, or suites ({', '.join(SUITES)}); default: all 40 tasks"
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=tasks_help)
    output_help = "folder for the results; default: RUN/datacomp/CHECKPOINT, or datacomp/MODEL-TAG for a pretrained tag"
    parser.add_argument("--output-dir", type=output_path, help=output_help)
    parser.add_argument("--overwrite", action="store_true", help="also evaluate tasks that already have a result")
    sizes_help = (
        "also score data whose number of samples or classes differs from DataComp's; the summary lists such tasks"
    )
    parser.add_argument("--allow-size-mismatch", action="store_true", help=sizes_help)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status. A usage error is reported in one line on stderr."""
    others = [*logging.root.handlers]
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    mask_logs(handler for handler in logging.root.handlers if handler not in others)
    logger.setLevel(logging.INFO)
    args = parse_args(argv)
    try:
        with process_group():
            return evaluate(args)
    except (ValueError, OSError) as error:
        logger.error(error)
        return 2


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate the tasks and print the summary; return the exit status. Raise ValueError if nothing can be evaluated."""
    tasks = select_tasks([name for entry in args.tasks or () for name in entry.split(",")])
    missing = [task.key for task in tasks if not (args.data_dir / task.folder).is_dir()]
    if len(missing) == len(tasks):
        found = sorted(path.name for path in args.data_dir.glob("*"))[:5]
        raise ValueError(
            f"--data-dir {args.data_dir} has none of the {len(tasks)} expected folders, such as {tasks[0].folder}. "
            f"Found: {', '.join(found) or 'nothing'}."
        )
    loaded, encoder = load_encoder(args, show_progress=distributed.is_master())
    own = options_of_run(args.checkpoint)
    other = {name: value for name, value in model_options(args).items() if value not in (None, own.get(name))}
    run = run_identity(loaded, encoder.precision)
    if other:
        run["options"] = " ".join(f"{name}={value}" for name, value in other.items())
        if args.output_dir is None:
            raise ValueError(f"model options differ from the training run's: {run['options']}. Give --output-dir.")
    results = ResultFile(args.output_dir or default_output_dir(loaded), run, loaded.checkpoint)
    given = [task for task in tasks if task.key not in missing]
    todo = distributed.on_master(
        lambda: results.prepare(given, args.data_dir, args.overwrite, args.allow_size_mismatch)
    )
    if distributed.is_master() and len(todo) < len(given):
        logger.info(
            f"{len(given) - len(todo)} of {len(given)} tasks already have results of this model: {results.path}"
        )
    share = share_tasks(todo, distributed.world_size())[distributed.rank()]
    failed: dict[str, str] = {}
    for part in distributed.all_gather_object(evaluate_tasks(share, args, encoder, results)):
        failed.update(part)
    # A task whose data were removed may still have a result.
    lines = results.lines()
    missing = [key for key in missing if key not in {line["key"] for line in lines}]
    if distributed.is_master():
        changed = {line["key"] for line in lines if has_other_data(line, args.data_dir)}
        problems = dict.fromkeys(sorted(changed), "the data have changed since the evaluation. Evaluate them again")
        summarized = summary([line for line in lines if line["key"] not in changed], problems | failed, missing)
        content = json.dumps({"run": results.run, **summarized}, indent=2, allow_nan=False) + "\n"
        path = results.path.with_name(SUMMARY_FILE)
        if not path.is_file() or path.read_text(encoding="utf-8") != content:  # the folder may be read-only
            write_text(path, content)
        say(f"{summary_text(summarized, args.data_dir)}\n\nResults: {results.path}")
    return 1 if failed or (args.tasks and missing) else 0


def evaluate_tasks(
    tasks: Sequence[Task], args: argparse.Namespace, encoder: Encoder, results: ResultFile
) -> dict[str, str]:
    """Evaluate tasks one by one, storing each result immediately; return the errors of failed tasks by key."""
    failed = {}
    bar = tqdm(tasks, desc="tasks", unit="task", position=0, disable=not encoder.show_progress)
    with logging_redirect_tqdm(), bar:
        for task in bar:
            bar.set_postfix_str(task.name)
            started = time.perf_counter()
            try:
                # Computed before the task reads the data, because the files may change during the evaluation.
                data = fingerprint(args.data_dir / task.folder)
                result = evaluate_task(task, args.data_dir, encoder, args.allow_size_mismatch)
                seconds = time.perf_counter() - started
                results.add(task, data, result, seconds)
            except Exception as error:
                known = isinstance(error, DataError)
                failed[task.key] = str(error) if known else f"{type(error).__name__}: {error}"
                logger.error(f"{task.name}: {failed[task.key]}", exc_info=not known)
                continue
            score = result.metrics["main_metric"]
            shown = "no main metric" if score is None else f"{task.main_metric} {score:.4f}"
            logger.info(f"{task.name}: {shown} ({result.samples} samples in {seconds:.1f} s)")
            if result.skipped:
                logger.warning(f"{task.name}: {len(result.skipped)} images do not decode, {result.skipped[0]}")
    return failed


def share_tasks(tasks: Sequence[Task], processes: int) -> list[list[Task]]:
    """Split tasks among processes: from the largest to the smallest, each task goes to the process with the least work.

    Each process then evaluates its smallest tasks first, to report errors early.
    """
    shares: list[list[Task]] = [[] for _ in range(processes)]
    for task in sorted(tasks, key=lambda task: task.size, reverse=True):
        min(shares, key=lambda share: sum(other.size for other in share)).append(task)
    return [share[::-1] for share in shares]


def default_output_dir(loaded: LoadedModel) -> Path:
    """Return ``RUN/datacomp/epoch_K`` for ``RUN/checkpoints/epoch_K.pt``, and ``datacomp/MODEL-TAG`` for a pretrained tag."""
    checkpoint = Path(loaded.checkpoint).absolute()
    if not checkpoint.is_file():
        return Path("datacomp") / f"{loaded.name}-{loaded.checkpoint}".replace("/", "-").replace(":", "-")
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "datacomp" / label_of(checkpoint)


if __name__ == "__main__":
    command_line.run(main)
