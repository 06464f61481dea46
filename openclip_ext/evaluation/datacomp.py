"""Evaluate a model on DataComp's 40 tasks and on the user's own: ``openclip-ext evaluate``, ``python -m eval.datacomp``.

The exit status is 0 if all tasks have a result, 1 if a task failed, and 2 if nothing could be evaluated. A task without data
counts as failed only if ``--tasks`` lists the task. Other tasks without data are only reported.
"""

import argparse
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from openclip_ext import distributed
from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo, get_logger, mask_logs
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.command_line import (
    add_columns,
    add_model_arguments,
    given_columns,
    load_encoder,
    model_options,
    process_group,
)
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.mixes import chosen_mix, mixes, shares
from openclip_ext.evaluation.models import OpenedModel, data_flags, flags_of_ref, options_of_run
from openclip_ext.evaluation.open_tasks import FORMATS, datacomp_task, own_task, retrieval
from openclip_ext.evaluation.results import (
    ResultLog,
    has_other_size,
    main_value,
    name_of,
    run_identity,
    summary,
    summary_text,
)
from openclip_ext.evaluation.run_folder import label_of
from openclip_ext.evaluation.samples import TEMPLATES_FILE, DataError, fingerprint
from openclip_ext.evaluation.scoring import Classification, Task
from openclip_ext.evaluation.tasks import SUITES, TASKS, select_tasks
from openclip_ext.files.writing import output_path, write_text

SUMMARY_FILE = "eval_summary.json"
logger = get_logger("eval.datacomp")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="openclip-ext evaluate",
        description="Evaluate a model on your own data, or on DataComp's 40 tasks (the average is over 38). Several processes "
        "under torchrun share the tasks. The same command continues an interrupted run.",
        epilog="Exit status: 0 if all tasks have a result, 1 if a task failed or data of --tasks are missing, 2 if nothing "
        "could be evaluated.",
    )
    add_model_arguments(parser, takes_run=True)
    tasks_help = (
        "your own data: class folders, a table of labels or of image-caption pairs, or a folder in DataComp's layout. Or, "
        f"with --data-dir, keys of DataComp's tasks such as vtab/pets, or suites ({', '.join(SUITES)}). Default: all tasks in "
        "--data-dir"
    )
    parser.add_argument("--tasks", nargs="+", metavar="PATH|TASK", help=tasks_help)
    folder_help = "folder with the wds_*_test folders of DataComp's tasks (see openclip-ext download)"
    parser.add_argument("--data-dir", type=Path, help=folder_help)
    parser.add_argument("--val-data", help="image-caption pairs for retrieval, in any format of training's --val-data")
    add_columns(parser)
    template_help = (
        "prompt for your own classes, with {} for the class name (default: the data's, else the --caption-template of the "
        "model's run, else a photo of a {})"
    )
    parser.add_argument("--template", help=template_help)
    output_help = "folder for the results; default: RUN/datacomp/CHECKPOINT, or datacomp/MODEL-TAG for a pretrained tag"
    parser.add_argument("--output-dir", type=output_path, help=output_help)
    parser.add_argument("--overwrite", action="store_true", help="also evaluate tasks that already have a result")
    mixes_help = (
        "instead of the model, evaluate its mixes with the weights of the run's --pretrained, and print a table. α is the "
        "weight of the trained weights, such as 0,0.25,0.5,0.75,1"
    )
    parser.add_argument("--interpolate", type=shares, metavar="α,...", help=mixes_help)
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
    tasks = find_tasks(args)
    opened, encoder = load_encoder(args, show_progress=distributed.is_rank0())
    folder = args.output_dir or default_output_dir(opened)
    if args.interpolate is None:
        evaluated = evaluate_model(args, tasks, opened, encoder, folder)
        if distributed.is_rank0():
            echo(f"{evaluated.text}\n\nResults: {folder}")
            if better := chosen_mix(Path(opened.checkpoint), "evaluate"):
                echo(f"{better} (all mixes: --interpolate 0,0.25,0.5,0.75,1)")
        return evaluated.status
    found: dict[float, Evaluated] = {}
    for weight, mix in zip(args.interpolate, mixes(opened, args.interpolate), strict=True):
        # A new encoder, because an encoder caches the embeddings of classes.
        found[weight] = evaluate_model(args, tasks, mix, replace(encoder), folder / f"alpha-{weight:g}")
    if distributed.is_rank0():
        echo(f"{_curve(found)}\n\nResults: {folder}/alpha-*")
    return max(evaluated.status for evaluated in found.values())


class Evaluated(NamedTuple):
    """Result of a model: exit status, the summary as text (on rank 0), and the lines of all tasks with a result, by key."""

    status: int
    text: str
    lines: Mapping[str, Mapping[str, Any]]


def evaluate_model(
    args: argparse.Namespace, tasks: Mapping[str, Task], opened: OpenedModel, encoder: Encoder, folder: Path
) -> Evaluated:
    """Evaluate the tasks that have no result in the folder. ``encoder`` encodes with the model ``opened``. Collective."""
    own = options_of_run(opened.checkpoint)
    other = {name: value for name, value in model_options(args).items() if value not in (None, own.get(name))}
    run = run_identity(opened, encoder.autocast)
    if other:
        run["options"] = " ".join(f"{name}={value}" for name, value in other.items())
        if args.output_dir is None:
            raise ValueError(f"model options differ from the training run's: {run['options']}. Give a new --output-dir")
    log = ResultLog(folder, run, opened.checkpoint)
    given = {key: task for key, task in tasks.items() if not _is_missing(key, task)}
    todo = distributed.on_rank0(lambda: _begin(log, given, args))
    if distributed.is_rank0() and len(todo) < len(given):
        logger.info(f"{len(given) - len(todo)} of {len(given)} tasks already have results of this model: {log.path}")
    share = share_tasks(todo, distributed.world_size())[distributed.rank()]
    failed: dict[str, str] = {}
    for part in distributed.all_gather_object(evaluate_tasks({key: given[key] for key in share}, encoder, log)):
        failed.update(part)
    # A task whose data were removed may still have a result.
    lines = log.completed()
    missing = [key for key in tasks if key not in given and key not in lines]
    text = _summarize(args, log, lines, failed, missing) if distributed.is_rank0() else ""
    return Evaluated(1 if failed or (args.tasks and missing) else 0, text, lines)


def _curve(found: Mapping[float, Evaluated]) -> str:
    """Return a table: the main metric of each task (columns) for each weight α of the trained weights (rows)."""
    keys = list(dict.fromkeys(key for evaluated in found.values() for key in evaluated.lines))
    rows = [["α", *(name_of(key) for key in keys)]]
    for weight, evaluated in found.items():
        lines = (evaluated.lines.get(key) for key in keys)
        rows.append([f"{weight:g}", *("-" if line is None else main_value(line) for line in lines)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*table, "Main metrics; α is the weight of the trained weights."])


def find_tasks(args: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks that the arguments select; raise ValueError if there are none, or if all data are missing."""
    names = [name for entry in args.tasks or () for name in ([entry] if os.path.exists(entry) else entry.split(","))]
    known = {name for entry in TASKS.values() for name in (entry.key, entry.name, entry.folder)} | SUITES.keys()
    paths = [name for name in names if name not in known and _is_path(name)]
    flags = {**flags_of_ref(args.run or args.checkpoint), **given_columns(args)}
    fields = {name.replace("img", "image"): value for name, value in data_flags(flags).items()}

    def pairs(place: str) -> DataSpec:
        return DataSpec(place, **fields)

    # As during training, --keep-tasks do not have the prompt and the columns of the run's own data.
    kept = [Path(place) for place in (flags.get("keep_tasks") or "").split("::")]
    own = [
        own_task(
            place, args.template, None if Path(place) in kept else pairs(place), labels_first=args.template is not None
        )
        for place in paths
    ]
    if args.val_data is not None:
        own.append(retrieval("val-data", pairs(args.val_data)))
    _refuse_unused(args.template, own)
    # A result with the key of one of DataComp's tasks would count in DataComp's averages.
    own = [replace(task, name=f"own/{task.name}") if task.name in TASKS else task for task in own]
    tasks = {task.name: task for task in own}
    if len(tasks) < len(own):
        raise ValueError("--tasks: two data sets have the same name: give them in folders with different names")
    names = [name for name in names if name not in paths]
    if not names and own:
        return tasks
    if args.data_dir is None:
        select_tasks(names)  # a wrong name is the likelier mistake
        raise ValueError(
            "no data to evaluate on: give the folder of DataComp's tasks with --data-dir, or your own class folders, table or "
            "image-caption pairs with --tasks"
        )
    entries = select_tasks(names)
    found = {entry.key: datacomp_task(entry, args.data_dir, args.allow_size_mismatch) for entry in entries}
    if not own and all(_is_missing(key, task) for key, task in found.items()):
        content = sorted(path.name for path in args.data_dir.glob("*"))[:5]
        raise ValueError(
            f"--data-dir {args.data_dir} has none of the {len(found)} expected folders, such as {entries[0].folder}. "
            f"Found: {', '.join(content) or 'nothing'}. Your own data are --tasks PATH: {FORMATS}"
        )
    return tasks | found


def _refuse_unused(template: str | None, own: Sequence[Task]) -> None:
    """Raise ValueError if ``--template`` has no effect on some of the user's classes, or if there are none."""
    classes = [task for task in own if isinstance(task, Classification)]
    if template is not None and (not classes or any(task.template is None for task in classes)):
        raise ValueError(
            "--template is for class folders and tables of labels in --tasks: remove it. A folder in DataComp's layout has "
            f"its prompts in {TEMPLATES_FILE}"
        )


def _is_missing(key: str, task: Task) -> bool:
    """Return whether the folder of one of DataComp's tasks does not exist."""
    return key in TASKS and task.path is not None and not task.path.is_dir()


def _is_path(name: str) -> bool:
    is_of_files = name.endswith((".csv", ".tsv", ".parquet", ".jsonl", ".tar"))
    return os.path.exists(name) or is_of_files or "://" in name or name.startswith((".", "/"))


def _begin(log: ResultLog, tasks: Mapping[str, Task], args: argparse.Namespace) -> list[str]:
    """Return the keys of tasks to evaluate: without a result, with changed data or refused size, or all (``--overwrite``)."""
    lines = log.completed()

    def is_old(key: str, task: Task) -> bool:
        if args.overwrite or key not in lines or has_other_data(lines[key], task):
            return True
        return has_other_size(lines[key]) and not args.allow_size_mismatch

    todo = [key for key, task in tasks.items() if is_old(key, task)]
    log.begin(todo)
    return todo


def has_other_data(line: Mapping[str, Any], task: Task) -> bool:
    """Return whether a task's data or prompt have changed since the result in ``line``."""
    return task.path is not None and line["data"] != _data_digest(task)


def _data_digest(task: Task) -> str:
    """Return a digest of a task's data and prompt; an empty text for data without a place of their own."""
    if task.path is None:
        return ""
    data = fingerprint(task.path) if task.digest is None else task.digest()
    return f"{data} {task.template or ''}".strip()


def evaluate_tasks(tasks: Mapping[str, Task], encoder: Encoder, log: ResultLog) -> dict[str, str]:
    """Evaluate tasks one by one, storing each result immediately; return the errors of failed tasks by key."""
    failed = {}
    bar = tqdm(tasks.items(), desc="tasks", unit="task", position=0, disable=not encoder.show_progress)
    with logging_redirect_tqdm(), bar:
        for key, task in bar:
            bar.set_postfix_str(task.name)
            started = time.perf_counter()
            try:
                # Computed before the task reads the data, because the files may change during the evaluation.
                data = _data_digest(task)
                scores = task.score(encoder)
                seconds = time.perf_counter() - started
                log.add(key, task, data, scores, seconds)
            except Exception as error:
                known = isinstance(error, DataError)
                failed[key] = str(error) if known else f"{type(error).__name__}: {error}"
                logger.error(f"{task.name}: {failed[key]}", exc_info=not known)
                with contextlib.suppress(
                    UsageError, OSError
                ):  # all processes later report that the folder is not usable
                    log.fail(key, failed[key])
                continue
            value = scores.metrics["main_metric"]
            shown = "no main metric" if value is None else f"{task.main_metric} {value:.4f}"
            logger.info(f"{task.name}: {shown} ({scores.samples} samples in {seconds:.1f} s)")
            if scores.notes:
                logger.info(f"{task.name}: {scores.notes}")
            if scores.skipped:
                logger.warning(
                    f"{task.name}: {len(scores.skipped)} images do not decode, the first: {scores.skipped[0]}"
                )
    return failed


def _summarize(
    args: argparse.Namespace,
    log: ResultLog,
    lines: dict[str, dict[str, Any]],
    failed: dict[str, str],
    missing: list[str],
) -> str:
    """Write the summary of all results in the folder; return it as text."""
    places = (
        {}
        if args.data_dir is None
        else {key: datacomp_task(TASKS[key], args.data_dir) for key in lines if key in TASKS}
    )
    changed = {key for key, task in places.items() if not _is_missing(key, task) and has_other_data(lines[key], task)}
    problems = dict.fromkeys(sorted(changed), "the data have changed since the evaluation. Evaluate them again")
    kept = [line for key, line in lines.items() if key not in changed]
    summarized = summary(kept, problems | failed, missing)
    content = json.dumps({"run": log.run, **summarized}, indent=2, allow_nan=False) + "\n"
    path = log.folder / SUMMARY_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != content:  # the folder may be read-only
        write_text(path, content)
    return summary_text(summarized, kept, args.data_dir)


def share_tasks(keys: Iterable[str], processes: int) -> list[list[str]]:
    """Split tasks among processes: from the largest to the smallest, each task goes to the process with the least work.

    Each process then evaluates its smallest tasks first, to report errors early.
    """
    sizes = {key: TASKS[key].size if key in TASKS else 1000 for key in keys}
    shares: list[list[str]] = [[] for _ in range(processes)]
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        min(shares, key=lambda share: sum(sizes[other] for other in share)).append(key)
    return [share[::-1] for share in shares]


def default_output_dir(opened: OpenedModel) -> Path:
    """Return ``RUN/datacomp/epoch_K`` for ``RUN/checkpoints/epoch_K.pt``, and ``datacomp/MODEL-TAG`` for a pretrained tag."""
    checkpoint = Path(opened.checkpoint).absolute()
    if not checkpoint.is_file():
        return Path("datacomp") / f"{opened.name}-{opened.checkpoint}".replace("/", "-").replace(":", "-")
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "datacomp" / label_of(checkpoint)


if __name__ == "__main__":
    command_line.run(main)
