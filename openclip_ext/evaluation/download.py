"""Download DataComp's evaluation sets from the Hugging Face hub, and check them: ``python -m eval.download --data-dir DIR``.

``huggingface_hub`` downloads the files, continues interrupted downloads, and compares the files with the hub's checksums.
``--verify`` reads all files to their ends, without a network.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import echo
from openclip_ext.evaluation import samples as reading
from openclip_ext.evaluation.convert import convert_retrieval, convert_winogavil
from openclip_ext.evaluation.tasks import Entry, select_tasks
from openclip_ext.files.writing import output_path

# Subfolder for a set's CSV table and zip. It is deleted after the conversion.
SOURCE_FOLDER = "source"
# Folder in which huggingface_hub records complete files. It is removed when all files of the set are complete.
HUB_FOLDER = ".cache"
_ATTEMPTS = 3
_DOCUMENTS = ["README*", "LICENSE*"]
# Results of `check_set`.
OK, MISSING, INCOMPLETE, BROKEN = "ok", "missing", "incomplete", "broken"


def _is_converted(task: Entry) -> bool:
    """Return whether the hub stores a task's data as a CSV table and a zip of images, which must be converted to tars."""
    return task.kind in ("retrieval", "winogavil")


def repository_of(task: Entry) -> str:
    """Return the hub's data set repository of a task, as ``owner/name``."""
    return f"nlphuji/{task.key.split('/')[-1]}" if _is_converted(task) else f"djghosh/{task.folder}"


def _snapshot_arguments(task: Entry, folder: Path) -> dict[str, Any]:
    patterns = ["*.csv", "*.zip"] if _is_converted(task) else ["*.txt", "test/*.tar"]
    return {
        "repo_id": repository_of(task),
        "repo_type": "dataset",
        "local_dir": folder / SOURCE_FOLDER if _is_converted(task) else folder,
        "allow_patterns": [*patterns, *_DOCUMENTS],
    }


def fetch_set(task: Entry, data_dir: Path, endpoint: str | None = None) -> None:
    """Download one data set completely, compare it with the hub's checksums, and convert it if needed.

    After an error, the next call reuses complete files. Raise ValueError if a checksum is still wrong after three attempts, or
    if the set cannot be converted.
    """
    folder = data_dir / task.folder
    api, wanted = HfApi(endpoint=endpoint), _snapshot_arguments(task, folder)
    target = wanted["local_dir"]
    for _ in range(_ATTEMPTS):
        api.snapshot_download(**wanted)
        found = api.verify_repo_checksums(wanted["repo_id"], repo_type="dataset", local_dir=target)
        wrong = [mismatch["path"] for mismatch in found.mismatches]
        for path in wrong:
            (target / path).unlink()
        if not wrong:
            break
    else:
        raise ValueError(
            f"{wanted['repo_id']}: after {_ATTEMPTS} downloads, checksums still differ from the hub's: {', '.join(wrong)}. "
            "Run the command again later, or give another --endpoint"
        )
    if _is_converted(task):
        (convert_retrieval if task.kind == "retrieval" else convert_winogavil)(target, folder)
        count_items(folder, task, any_size=True)
        for document in (path for pattern in _DOCUMENTS for path in target.glob(pattern)):
            shutil.copy(document, folder)
    for leftover in (folder / SOURCE_FOLDER, folder / HUB_FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)


def is_complete(folder: Path, task: Entry) -> bool:
    """Return whether a folder has all files of a data set. Their contents are not read."""
    if any((folder / name).is_dir() for name in (HUB_FOLDER, SOURCE_FOLDER)):
        return False
    texts = {"winogavil": [reading.INSTANCES_FILE], "retrieval": []}
    names = texts.get(task.kind, [reading.CLASSNAMES_FILE, reading.TEMPLATES_FILE])
    try:
        reading.find_shards(folder)
    except reading.DataError:
        return False
    return all((folder / name).is_file() for name in names)


def check_set(data_dir: Path, task: Entry, any_size: bool = False) -> tuple[str, list[str]]:
    """Check one data set without a network: read every tar to its end, and all labels, captions and metadata.

    Returns `OK`, `MISSING`, `INCOMPLETE` or `BROKEN`, and a list of faults.
    """
    folder = data_dir / task.folder
    if not folder.is_dir():
        return MISSING, []
    if not is_complete(folder, task):
        return INCOMPLETE, []
    try:
        samples = count_items(folder, task, any_size)
    except reading.DataError as error:
        return BROKEN, [str(error)]
    if samples != task.size and not any_size:
        return BROKEN, [f"found {samples:,} samples, but DataComp's data set has {task.size:,}"]
    return OK, []


def count_items(folder: Path, task: Entry, any_size: bool = False) -> int:
    """Read a data set completely; return the number of items to score: images, or instances for WinoGAViL."""
    num_classes = None
    if not _is_converted(task):
        classnames, _ = reading.read_classes(folder, None if any_size else task.classes)
        num_classes = None if task.kind == "faces" else len(classnames)
    wanted = reading.SampleFormat(num_classes, len(task.metadata), captions=task.kind == "retrieval")
    samples = reading.shard_samples(folder, wanted)
    for sample in samples.stored:
        sample.parse(wanted)
    if task.kind == "winogavil":
        return len(reading.read_instances(folder, {sample.key for sample in samples.stored}))
    return len(samples)


def build_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="openclip-ext download",
        description="Download DataComp's evaluation sets from the Hugging Face hub, to evaluate models offline. "
        "Run the same command again to continue after an interruption.",
    )
    parser.add_argument(
        "--data-dir", type=output_path, required=True, help="folder that contains one folder per data set"
    )
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="keys or names of tasks, or suites (default: all 40)"
    )
    parser.add_argument("--verify", action="store_true", help="only check the folders, without a network")
    sizes_help = "with --verify: accept data whose size differs from DataComp's"
    parser.add_argument("--allow-size-mismatch", action="store_true", help=sizes_help)
    checksums_help = "also compare complete sets with the hub's checksums, and download files that differ again"
    parser.add_argument("--checksums", action="store_true", help=checksums_help)
    parser.add_argument("--dry-run", action="store_true", help="only list the data sets to download and their sizes")
    parser.add_argument("--endpoint", help="address of the hub or a mirror (default: $HF_ENDPOINT, or the public hub)")
    return parser


def main(argv: list[str]) -> None:
    """Download or check the chosen data sets, then exit with status 0 if all of them are complete, otherwise 1.

    Raise ValueError if a task is unknown, and ConnectionError if the hub does not answer.
    """
    args = build_parser().parse_args(argv)
    raise SystemExit(_verify(args) if args.verify else _download(args))


def _verify(args: argparse.Namespace) -> int:
    usable, tasks = 0, select_tasks(args.tasks)
    for task in tasks:
        state, problems = check_set(args.data_dir, task, args.allow_size_mismatch)
        usable += state == OK
        echo(f"\n{'':<20}".join([f"{state:<17} {task.key}", *problems]))
    print(f"{usable} of {len(tasks)} data sets can be scored.")
    return 0 if usable == len(tasks) else 1


def _sizes(task: Entry, args: argparse.Namespace) -> dict[Path, int]:
    """Return the size in bytes of each file to download, as the hub reports it."""
    wanted = _snapshot_arguments(task, args.data_dir / task.folder)
    try:
        info = HfApi(endpoint=args.endpoint).dataset_info(wanted["repo_id"], files_metadata=True, timeout=30.0)
    except HfHubHTTPError:
        raise
    except Exception as error:  # the exception's type depends on huggingface_hub's HTTP client
        raise ConnectionError(
            f"The hub does not answer ({error}). Downloading needs a network. To use a mirror, set --endpoint or HF_ENDPOINT. "
            "--verify works without a network."
        ) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = filter_repo_objects(sizes, allow_patterns=wanted["allow_patterns"])
    return {wanted["local_dir"] / name: sizes[name] for name in names}


def _download(args: argparse.Namespace) -> int:
    tasks, failed, needed = select_tasks(args.tasks), {}, 0
    for task in tasks:
        folder = args.data_dir / task.folder
        if is_complete(folder, task) and not args.checksums:
            print(f"complete    {task.key}")
            continue
        try:
            sizes = _sizes(task, args)
            missing = sum(size for path, size in sizes.items() if not (path.is_file() and path.stat().st_size == size))
            # During the conversion of a set, both its zip and its tars are on the disk.
            needed += missing + (sum(sizes.values()) if _is_converted(task) else 0)
            print(f"to download {task.key:<52} {len(sizes):>5} files {missing / 1e9:>7.3f} GB", flush=True)
            if not args.dry_run:
                fetch_set(task, args.data_dir, args.endpoint)
        except ConnectionError:
            raise
        except Exception as error:  # after any failure (hub, network, disk, data), other sets may succeed
            failed[task.key] = f"{type(error).__name__}: {error}"
    if args.dry_run:
        existing = next(path for path in (args.data_dir, *args.data_dir.resolve().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 1e9
        print(f"Disk space: up to {needed / 1e9:.3f} GB needed, {free:.3f} GB free in {args.data_dir}.")
    else:
        print(f"{len(tasks) - len(failed)} of {len(tasks)} data sets are complete in {args.data_dir}.")
    for key, reason in failed.items():
        echo(f"failed: {key}: {reason}; run the same command again to continue", sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.run(main)
