"""Fetch DataComp's evaluation sets from the Hugging Face hub, and check them: ``python -m eval.download --data-dir DIR``.

``huggingface_hub`` fetches the files, continues after an interruption, and compares them with the hub's checksums. The
``checksums.json`` of each folder holds the SHA-256 of all files, so that ``--verify`` needs no network.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils.sha import sha_fileobj

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import say
from openclip_ext.evaluation.convert import convert_retrieval, convert_winogavil
from openclip_ext.evaluation.data import (
    INSTANCES_FILE,
    DataError,
    SampleFormat,
    find_samples,
    find_shards,
    parse_sample,
    read_classes,
    read_instances,
)
from openclip_ext.evaluation.tasks import Task, select_tasks
from openclip_ext.files.writing import output_path, write_atomically

CHECKSUMS_FILE = "checksums.json"
# Subfolder for the table and the zip of a set until it is converted.
SOURCE_FOLDER = "source"
# Folder in which huggingface_hub notes which files are complete.
HUB_FOLDER = ".cache"
_ATTEMPTS = 3
_DOCUMENTS = ["README*", "LICENSE*"]
# Results of `check_set`. UNPROVEN: complete and of the right size, but without checksums, since another tool fetched it.
OK, UNPROVEN, MISSING, INCOMPLETE, BROKEN = "ok", "ok, no checksums", "missing", "incomplete", "broken"


def is_converted(task: Task) -> bool:
    """Return whether the hub stores the set as a table and a zip of images instead of the local format."""
    return task.kind in ("retrieval", "winogavil")


def repository_of(task: Task) -> str:
    """Return the data set repository of a task, ``owner/name``."""
    return f"nlphuji/{task.key.split('/')[-1]}" if is_converted(task) else f"djghosh/{task.folder}"


def _what_to_fetch(task: Task, data_dir: Path) -> dict[str, Any]:
    """Return the arguments of ``snapshot_download`` for a task."""
    folder = data_dir / task.folder
    patterns = ["*.csv", "*.zip"] if is_converted(task) else ["*.txt", "test/*.tar"]
    return {
        "repo_id": repository_of(task),
        "repo_type": "dataset",
        "local_dir": folder / SOURCE_FOLDER if is_converted(task) else folder,
        "allow_patterns": [*patterns, *_DOCUMENTS],
    }


def fetch_set(task: Task, data_dir: Path, endpoint: str | None = None) -> None:
    """Fetch one data set completely, convert it if needed, and write its checksums.

    Complete files stay for the next call if an exception ends this one. The exceptions of huggingface_hub pass through.

    Raises:
        ValueError: if the checksum of a file stays wrong, or the set to convert is not as expected.
    """
    api, wanted = HfApi(endpoint=endpoint), _what_to_fetch(task, data_dir)
    folder, target = data_dir / task.folder, wanted["local_dir"]
    for _ in range(_ATTEMPTS):
        api.snapshot_download(**wanted)
        found = api.verify_repo_checksums(wanted["repo_id"], repo_type="dataset", local_dir=target)
        wrong = [mismatch["path"] for mismatch in found.mismatches]
        for path in wrong:
            (target / path).unlink()
        if not wrong:
            break
    else:
        raise ValueError(f"{wanted['repo_id']}: the checksum differs from the hub's for {', '.join(wrong)}")
    if is_converted(task):
        (convert_retrieval if task.kind == "retrieval" else convert_winogavil)(target, folder)
        count_items(folder, task, any_size=True)
        for document in (path for pattern in _DOCUMENTS for path in target.glob(pattern)):
            shutil.copy(document, folder)
    for leftover in (folder / SOURCE_FOLDER, folder / HUB_FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)
    records = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != CHECKSUMS_FILE
    }
    content = json.dumps({"repository": wanted["repo_id"], "files": records}, indent=1) + "\n"
    write_atomically(folder / CHECKSUMS_FILE, lambda stream: stream.write(content.encode()))


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return sha_fileobj(stream).hex()


def read_checksums(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return ``size`` and ``sha256`` of a folder's files by name, or None if it has no ``checksums.json``."""
    path = folder / CHECKSUMS_FILE
    return json.loads(path.read_text(encoding="utf-8"))["files"] if path.exists() else None


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_set(data_dir: Path, task: Task, any_size: bool = False) -> tuple[str, list[str]]:
    """Check one data set without a network: its checksums if they are known, and every tar to its end.

    Returns one of `OK`, `UNPROVEN`, `MISSING`, `INCOMPLETE` and `BROKEN`, and a list of faults.
    """
    folder = data_dir / task.folder
    if not folder.is_dir():
        return MISSING, []
    records = read_checksums(folder)
    if records is None and any((folder / name).is_dir() for name in (HUB_FOLDER, SOURCE_FOLDER)):
        return INCOMPLETE, []
    problems = []
    for name, record in (records or {}).items():
        if not (folder / name).is_file():
            problems.append(f"{name} is missing")
        elif not _has_size(folder / name, record["size"]) or _sha256(folder / name) != record["sha256"]:
            problems.append(f"{name} has changed since it was fetched: its size or its SHA-256 differs")
    try:
        samples = count_items(folder, task, any_size)
        if samples != task.size and not any_size:
            problems.append(f"{samples:,} samples, DataComp's has {task.size:,}")
    except DataError as error:
        problems.append(str(error))
    return (BROKEN if problems else UNPROVEN if records is None else OK), problems


def count_items(folder: Path, task: Task, any_size: bool = False) -> int:
    """Read a data set to its end, and return the number of scored items: images, or instances for WinoGAViL."""
    num_classes = None
    if not is_converted(task):
        classnames, _ = read_classes(folder, task, any_size)
        num_classes = None if task.kind == "faces" else len(classnames)
    spec = SampleFormat(num_classes, len(task.metadata), captions=task.kind == "retrieval")
    samples = find_samples(folder)
    for sample in samples:
        parse_sample(sample.read(), spec, f"{sample.file.name}: {sample.key}")
    empty = {path.name for path in find_shards(folder)} - {sample.file.name for sample in samples}
    if empty:
        raise DataError(f"{min(empty)} holds no samples")
    keys = {sample.key for sample in samples}
    if task.kind != "winogavil":
        return len(keys)
    instances = read_instances(folder)
    for number, instance in enumerate(instances, start=1):
        if unknown := [key for key in instance.candidates if key not in keys]:
            raise DataError(f"{INSTANCES_FILE}: line {number} names images that are in no tar: {unknown[:3]}")
    return len(instances)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="openclip-ext download",
        description="Fetch DataComp's evaluation sets from the Hugging Face hub; everything else works offline. "
        "Run the same command again to continue after an interruption.",
    )
    parser.add_argument(
        "--data-dir", type=output_path, required=True, help="folder in which every data set gets a folder"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="keys, names or suites (default: all 40)")
    parser.add_argument("--verify", action="store_true", help="only check the folders, without a network")
    parser.add_argument(
        "--allow-size-mismatch", action="store_true", help="with --verify: accept other sizes than DataComp's"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the sets to fetch and their sizes")
    parser.add_argument("--endpoint", help="address of the hub or a mirror (default: HF_ENDPOINT, or the hub's)")
    return parser


def main(argv: list[str]) -> None:
    """Fetch or check the chosen sets.

    Raises:
        SystemExit: always; the exit status is 0 if every chosen set is there and whole, else 1.
        ValueError: if there is no such task.
        ConnectionError: if the hub does not answer.
    """
    args = build_parser().parse_args(argv)
    raise SystemExit(_verify(args) if args.verify else _download(args))


def _verify(args: argparse.Namespace) -> int:
    usable, tasks = 0, select_tasks(args.tasks)
    for task in tasks:
        state, problems = check_set(args.data_dir, task, args.allow_size_mismatch)
        usable += state in (OK, UNPROVEN)
        say(f"\n{'':<20}".join([f"{state:<17} {task.key}", *problems]))
    print(f"{usable} of {len(tasks)} data sets can be scored.")
    return 0 if usable == len(tasks) else 1


def _sizes(task: Task, args: argparse.Namespace) -> dict[Path, int]:
    """Ask the hub for the sizes of the files to fetch."""
    wanted = _what_to_fetch(task, args.data_dir)
    try:
        info = HfApi(endpoint=args.endpoint).dataset_info(wanted["repo_id"], files_metadata=True, timeout=30.0)
    except HfHubHTTPError:
        raise
    except Exception as error:  # from the HTTP client, which depends on the version
        raise ConnectionError(
            f"The hub does not answer ({error}). Downloading needs a network; for a mirror set --endpoint or HF_ENDPOINT. "
            "--verify works without one."
        ) from error
    names = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return {
        wanted["local_dir"] / name: names[name]
        for name in filter_repo_objects(names, allow_patterns=wanted["allow_patterns"])
    }


def _download(args: argparse.Namespace) -> int:
    tasks, failed, needed = select_tasks(args.tasks), {}, 0
    for task in tasks:
        folder = args.data_dir / task.folder
        records = read_checksums(folder)
        if records is not None and all(_has_size(folder / name, record["size"]) for name, record in records.items()):
            print(f"there       {task.key}")
            continue
        try:
            sizes = _sizes(task, args)
            missing = sum(size for path, size in sizes.items() if not _has_size(path, size))
            # The zip of a converted set is deleted only after its tars are complete.
            needed += missing + (sum(sizes.values()) if is_converted(task) else 0)
            print(f"to fetch    {task.key:<52} {len(sizes):>5} files {missing / 1e9:>7.3f} GB", flush=True)
            if not args.dry_run:
                fetch_set(task, args.data_dir, args.endpoint)
        except ConnectionError:
            raise
        except (
            Exception
        ) as error:  # from the hub, the HTTP client, the disk or the data; other sets can still be fetched
            failed[task.key] = f"{type(error).__name__}: {error}"
    if args.dry_run:
        existing = next(path for path in (args.data_dir, *args.data_dir.resolve().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 1e9
        print(f"{needed / 1e9:.3f} GB of disk to use at most, {free:.3f} GB free in {args.data_dir}.")
    else:
        print(f"{len(tasks) - len(failed)} of {len(tasks)} data sets are complete in {args.data_dir}.")
    for key, reason in failed.items():
        say(f"failed: {key}: {reason}; run the same command again to continue", sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.run(main)
