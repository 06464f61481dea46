"""``python -m eval.datacomp``: DataComp's 40 tasks on a checkpoint.

Exit status: 0, everything asked for has a result (without ``--tasks``, data sets that are not in ``--data-dir`` are
reported as missing and do not count); 1, a task failed or a task named with ``--tasks`` is missing; 2, nothing could be
evaluated.
"""

import argparse
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from eval.data import DataError, MissingDataError, task_folder
from eval.features import PRECISIONS, Encoder, resolve_precision
from eval.models import MODEL_OPTIONS, LoadedModel, load_model
from eval.results import ResultFile, Run
from eval.runner import evaluate_task
from eval.summary import summary, summary_text
from eval.tasks import SUITES, Task, select_tasks
from openclip_ext import distributed

SUMMARY_FILE = "eval_summary.json"
logger = logging.getLogger("eval.datacomp")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.datacomp",
        description="Evaluate a checkpoint on DataComp's 40 tasks (the average is over 38). One process, or several "
        "under torchrun that share the tasks. A second run goes on where the first stopped.",
        epilog="Exit status: 0 all done; 1 a task failed, or one named with --tasks is missing; 2 nothing evaluated.",
    )
    add_model_arguments(parser)
    parser.add_argument("--data-dir", required=True, help="folder with the wds_*_test folders (see eval.download)")
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help=f"keys such as vtab/pets, or {', '.join(SUITES)}; default: all 40"
    )
    parser.add_argument("--output-dir", help="where results go; default: RUN/datacomp/CHECKPOINT beside the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="evaluate again what has a result already")
    parser.add_argument(
        "--allow-size-mismatch",
        action="store_true",
        help="score data whose number of samples or classes is not DataComp's; the summary says so",
    )
    return parser.parse_args(argv)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to run it."""
    parser.add_argument("--model", required=True, help="OpenCLIP's name of the model, hf-hub: and local-dir: too")
    parser.add_argument("--checkpoint", help="checkpoint file, or one of the model's pretrained tags")
    parser.add_argument("--batch-size", type=_at_least(1), default=256, help="images, and texts, in a batch")
    parser.add_argument(
        "--workers",
        type=_at_least(0),
        default=default_workers(),
        help="images that are decoded at a time, in processes, never more than shards, and threads of theirs; "
        "default: one a core (here %(default)s), at most 16",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="datacomp",
        help="datacomp: as DataComp's harness on CUDA (texts, and in retrieval images too, in autocast), float32 on "
        "CPU; fp32: float32 everywhere; amp: autocast everywhere (CUDA)",
    )
    group = parser.add_argument_group("model options", "as in training with OpenCLIP, for checkpoints that need them")
    group.add_argument("--model-config", help="JSON of a model that OpenCLIP does not ship")
    group.add_argument("--force-quick-gelu", action="store_true", default=None)
    group.add_argument("--force-custom-text", action="store_true", default=None)
    group.add_argument("--force-image-size", type=int)
    group.add_argument("--force-context-length", type=int)
    group.add_argument("--image-mean", type=float, nargs=3)
    group.add_argument("--image-std", type=float, nargs=3)
    group.add_argument("--image-interpolation", choices=("bicubic", "bilinear", "random"))
    group.add_argument("--image-resize-mode", choices=("shortest", "longest", "squash"))


def default_workers() -> int:
    """One for each core that this process may use; the processes of torchrun on one machine share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _at_least(lowest: int) -> Callable[[str], int]:
    """An argument type: integers from ``lowest``."""

    def integer(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return int(text)

    return integer


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; returns the exit status. What the user can mend is one line on stderr."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    args = parse_args(argv)
    try:
        _init_processes()
        return run(args)
    except (ValueError, OSError) as error:
        logger.error(error)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: argparse.Namespace) -> int:
    """Evaluate what the arguments ask for and print the summary.

    Raises:
        ValueError: if nothing can be evaluated: unknown task, wrong folder, no such model or checkpoint.
    """
    tasks = select_tasks([name for entry in args.tasks or () for name in entry.split(",")])
    problems = _missing(tasks, args.data_dir)
    if len(problems) == len(tasks):
        raise ValueError(_wrong_folder(tasks, args.data_dir))
    device = select_device(args.device)
    precision = resolve_precision(args.precision, device)
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    loaded = load_model(args.model, args.checkpoint, device, args.model_config, **options)
    identity = Run.of(loaded, precision, args.allow_size_mismatch)
    results = ResultFile(args.output_dir or default_output_dir(loaded), identity, loaded.checkpoint)
    todo = [task for task in tasks if task.key not in problems]
    todo = distributed.broadcast_object(_without_results(todo, results, args) if distributed.is_master() else None)
    encoder = Encoder(
        loaded.model,
        loaded.preprocess,
        loaded.tokenizer,
        device,
        precision,
        args.batch_size,
        args.workers,
        show_progress=distributed.is_master(),
    )
    share = share_tasks(todo, distributed.world_size())[distributed.rank()]
    failed = {}
    for part in distributed.all_gather_object(evaluate_tasks(share, args, encoder, results)):
        failed.update(part)
    # Evaluated earlier, and the data removed since.
    problems = {key: reason for key, reason in problems.items() if key not in {line["key"] for line in results.lines()}}
    if distributed.is_master():
        _report(results, {**problems, **failed})
    return 1 if failed or (args.tasks and problems) else 0


def evaluate_tasks(
    tasks: Sequence[Task], args: argparse.Namespace, encoder: Encoder, results: ResultFile
) -> dict[str, str]:
    """Evaluate tasks one after another and store each result at once; a task that fails stops no other.

    Returns:
        Reasons by key of the tasks that failed.
    """
    failed = {}
    with (
        logging_redirect_tqdm(),
        tqdm(tasks, desc="tasks", unit="task", position=0, disable=not encoder.show_progress) as bar,
    ):
        for task in bar:
            bar.set_postfix_str(task.name)
            started = time.perf_counter()
            try:
                result = evaluate_task(task, args.data_dir, encoder, args.allow_size_mismatch)
                seconds = time.perf_counter() - started
                results.add(task, task_folder(task, args.data_dir), result, seconds)
            except DataError as error:
                failed[task.key] = str(error)
                logger.error(f"{task.name}: {error}")
            except Exception as error:
                failed[task.key] = f"{type(error).__name__}: {error}"
                logger.exception(f"{task.name} failed")
            else:
                score = result.metrics["main_metric"]
                shown = "no main metric" if score is None else f"{task.main_metric} {score:.4f}"
                logger.info(f"{task.name}: {shown} ({result.samples} samples in {seconds:.1f} s)")
                if result.skipped:
                    logger.warning(f"{task.name}: {len(result.skipped)} images do not decode, {result.skipped[0]}")
    return failed


def share_tasks(tasks: Sequence[Task], processes: int) -> list[list[Task]]:
    """Splits tasks among processes so that the largest share is small: the largest first, each to the least loaded.

    Within a share the small ones come first, so that whatever is wrong shows early.
    """
    shares: list[list[Task]] = [[] for _ in range(processes)]
    for task in sorted(tasks, key=lambda task: task.size, reverse=True):
        min(shares, key=lambda share: sum(other.size for other in share)).append(task)
    return [share[::-1] for share in shares]


def default_output_dir(loaded: LoadedModel) -> Path:
    """``RUN/datacomp/epoch_K`` for ``RUN/checkpoints/epoch_K.pt``; a folder named after model and tag for a tag."""
    checkpoint = Path(loaded.checkpoint)
    if not checkpoint.is_file():
        return Path("datacomp") / f"{loaded.name}-{loaded.checkpoint}".replace("/", "-").replace(":", "-")
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "datacomp" / checkpoint.stem


def _init_processes() -> None:
    """Under torchrun, joins the processes; they exchange only task lists and failures, so gloo does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A process waits for the others' last tasks, which may take hours.
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))


def select_device(requested: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one; under torchrun each process takes its own GPU.

    Raises:
        ValueError: for CUDA where there is none, or what is no device.
    """
    try:
        device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {requested}: expected cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {device}: this machine, or this build of torch, has no CUDA device.")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _missing(tasks: Sequence[Task], data_dir: str) -> dict[str, str]:
    missing = {}
    for task in tasks:
        try:
            task_folder(task, data_dir)
        except MissingDataError as error:
            missing[task.key] = str(error)
    return missing


def _wrong_folder(tasks: Sequence[Task], data_dir: str) -> str:
    if not Path(data_dir).is_dir():
        return f"--data-dir {data_dir} is no folder."
    found = sorted(path.name for path in Path(data_dir).iterdir())
    shown = ", ".join(found[:5]) or "nothing"
    return f"--data-dir {data_dir} has none of the {len(tasks)} tasks, such as {tasks[0].folder}; in it: {shown}."


def _without_results(tasks: Sequence[Task], results: ResultFile, args: argparse.Namespace) -> list[Task]:
    results.open()
    done = set() if args.overwrite else results.completed(tasks, args.data_dir)
    if done:
        logger.info(f"{len(done)} of {len(tasks)} tasks have results of this model already: {results.path}")
    todo = [task for task in tasks if task.key not in done]
    # Should an evaluation fail, then no number of other data, or of an earlier attempt, stands in for it.
    results.discard(task.key for task in todo)
    return todo


def _report(results: ResultFile, problems: dict[str, str]) -> None:
    lines = results.lines()
    content = json.dumps(summary(lines, problems), indent=2, allow_nan=False)
    temporary = results.folder / f"{SUMMARY_FILE}.tmp"
    temporary.write_text(content + "\n", encoding="utf-8")
    temporary.replace(results.folder / SUMMARY_FILE)
    print(summary_text(lines, problems), f"\nResults: {results.path}", sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
