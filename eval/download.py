"""Fetch DataComp's evaluation sets from the Hugging Face hub, and check them: ``python -m eval.download --data-dir DIR``.

``huggingface_hub`` fetches the files and goes on after an interruption. It compares their sizes only, so the checksums are
compared here, and kept in ``checksums.json`` of each folder: ``--verify`` needs no network.
"""

import argparse
import glob
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import DatasetInfo, RepoSibling
from huggingface_hub.utils import HfHubHTTPError
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from openclip_ext.files import write_atomically

from .command_line import run_command
from .convert import convert_retrieval, convert_winogavil
from .data import (
    DataError,
    MissingDataError,
    SampleFormat,
    UniqueKeys,
    find_shards,
    parse_sample,
    read_classes,
    read_shard,
    task_folder,
)
from .retrieval import INSTANCES_FILE, read_instances
from .tasks import TASKS, Task, select_tasks

CHECKSUMS_FILE = "checksums.json"
# Subfolder for the table and the zip of a set that is still to be converted.
SOURCE_FOLDER = "source"
# Where huggingface_hub notes which files of a folder are complete.
HUB_FOLDER = ".cache"
# Left free on the disk: file system overhead, and the logs and results of whoever works there.
SPARE_BYTES = 256 << 20
_TIMEOUT_S = 30.0
_ATTEMPTS = 3
# What `check_set` finds. UNPROVEN: whole and of the right size, but not fetched by this tool, so without checksums.
OK, UNPROVEN, MISSING, INCOMPLETE, BROKEN = "ok", "ok, no checksums", "missing", "incomplete", "broken"


class HubUnreachableError(ConnectionError):
    """The hub did not answer at all: no network, offline mode, or a wrong endpoint."""


class DownloadError(RuntimeError):
    """The hub answered, but does not give a file, or its checksum is wrong."""


def is_converted(task: Task) -> bool:
    """Return whether the hub has a table and a zip of images instead of the local format."""
    return task.kind in ("retrieval", "winogavil")


def repository_of(task: Task) -> str:
    """Return the data set repository of a task, ``owner/name``."""
    return f"nlphuji/{task.key.split('/')[-1]}" if is_converted(task) else f"djghosh/{task.folder}"


def _is_document(path: str) -> bool:
    return path.lower().startswith(("readme", "license"))


def _is_needed(path: str, task: Task) -> bool:
    """Return whether a task needs a file of its repository, or it is a readme or a license."""
    folder, _, name = path.rpartition("/")
    if folder == "":
        return _is_document(name) or name.endswith((".csv", ".zip") if is_converted(task) else ".txt")
    return folder == "test" and not is_converted(task) and name.endswith((".tar", ".txt"))


def list_files(task: Task, endpoint: str | None = None) -> DatasetInfo:
    """Ask the hub for a task's repository; ``siblings`` are the needed files, with sizes and checksums.

    Raises:
        HubUnreachableError: if there is no answer.
        DownloadError: if the hub refuses, or has nothing of use there.
    """
    api, repository = HfApi(endpoint=endpoint), repository_of(task)
    try:
        info = api.dataset_info(repository, files_metadata=True, timeout=_TIMEOUT_S)
    except HfHubHTTPError as error:
        raise DownloadError(f"the hub refused {repository}: {str(error).strip().splitlines()[-1]}") from error
    except Exception as error:  # the HTTP client behind huggingface_hub differs by version, and so its exceptions
        raise HubUnreachableError(
            f"The hub at {api.endpoint} does not answer ({type(error).__name__}: {error}). Downloading needs a "
            "network; for a mirror set --endpoint or HF_ENDPOINT. --verify works without one."
        ) from error
    info.siblings = [file for file in info.siblings or () if _is_needed(file.rfilename, task)]
    if not info.siblings:
        raise DownloadError(f"{repository} has none of the expected files")
    return info


def fetch_set(task: Task, info: DatasetInfo, data_dir: Path, connections: int = 4, endpoint: str | None = None) -> None:
    """Fetch one data set completely, convert it if needed, and write its checksums.

    Args:
        task: the task that needs the data set.
        info: as `list_files` returns it.
        data_dir: folder of all data sets.
        connections: files fetched at a time.
        endpoint: address of the hub; None: its usual one.

    Raises:
        DownloadError: if a file cannot be fetched, or its checksum stays wrong. Complete files stay for the next time.
        ValueError: if the set to convert is not as expected.
    """
    folder, files = data_dir / task.folder, info.siblings or []
    source = folder / SOURCE_FOLDER
    if is_converted(task):
        _fetch_files(info, source, connections, endpoint)
        (convert_retrieval if task.kind == "retrieval" else convert_winogavil)(source, folder)
        for file in files:
            if _is_document(file.rfilename):
                shutil.copy(source / file.rfilename, folder)
        paths = [path for path in folder.rglob("*") if path.is_file() and source not in path.parents]
        sha256 = {}
    else:
        _fetch_files(info, folder, connections, endpoint)
        paths = [folder / file.rfilename for file in files]
        sha256 = {folder / file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
    records = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256.get(path) or _sha256(path)}
        for path in sorted(paths)
        if path.name != CHECKSUMS_FILE
    }
    content = json.dumps({"repository": info.id, "revision": info.sha, "files": records}, indent=1) + "\n"
    write_atomically(folder / CHECKSUMS_FILE, lambda stream: stream.write(content.encode()))
    for leftover in (source, folder / HUB_FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)


def _fetch_files(info: DatasetInfo, folder: Path, connections: int, endpoint: str | None) -> None:
    """Fetch what is missing or differs from the hub's checksums; try again after a broken connection or a busy hub."""
    problem, files = "", info.siblings or []
    for attempt in range(_ATTEMPTS):
        time.sleep(2.0**attempt if problem else 0)
        try:
            snapshot_download(
                info.id,
                repo_type="dataset",
                revision=info.sha,
                local_dir=folder,
                allow_patterns=[glob.escape(file.rfilename) for file in files],
                max_workers=connections,
                endpoint=endpoint,
            )
        except Exception as error:  # of the HTTP client, of the hub, of the disk
            problem = f"{type(error).__name__}: {error}"
            continue
        wrong = [file.rfilename for file in files if not _is_the_hubs(folder / file.rfilename, file)]
        if not wrong:
            return
        for name in wrong:
            (folder / name).unlink(missing_ok=True)
        problem = f"missing, or of another checksum than the hub's: {', '.join(wrong)}"
    raise DownloadError(f"{info.id}: {problem}; run the same command again to go on")


def _is_the_hubs(path: Path, file: RepoSibling) -> bool:
    """Return whether a file has the checksum that the hub states: SHA-256 for large ones, git's SHA-1 for the others."""
    if not path.is_file():
        return False
    return _sha256(path) == file.lfs.sha256 if file.lfs is not None else git_hash(path.read_bytes()) == file.blob_id


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return sha_fileobj(stream).hex()


def read_checksums(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return ``size`` and ``sha256`` of a folder's files by name; None if it has no ``checksums.json``.

    Raises:
        ValueError: if the file is there and unreadable.
    """
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: {"size": int(record["size"]), "sha256": record["sha256"]} for name, record in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a checksum list ({error}); delete it and download again") from error


def is_complete(folder: Path) -> bool:
    """Return whether every file of ``checksums.json`` is there with its size; ``--verify`` compares the contents."""
    try:
        records = read_checksums(folder)
    except ValueError:  # unreadable: the files are compared with the hub's checksums again
        return False
    return records is not None and all(_has_size(folder / name, record["size"]) for name, record in records.items())


def _has_size(path: Path, size: int | None) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_set(data_dir: Path, task: Task, any_size: bool = False) -> tuple[str, list[str]]:
    """Check one data set without a network: its checksums if they are known, then every tar to its end.

    Args:
        data_dir: folder of all data sets.
        task: the task whose data to check.
        any_size: accept numbers of samples and classes other than DataComp's.

    Returns:
        One of `OK`, `UNPROVEN`, `MISSING`, `INCOMPLETE`, `BROKEN`, and an entry for every fault.
    """
    try:
        folder = task_folder(task, data_dir)
        records = read_checksums(folder)
    except MissingDataError:
        return MISSING, []
    except ValueError as error:
        return BROKEN, [str(error)]
    if records is None and any((folder / name).is_dir() for name in (HUB_FOLDER, SOURCE_FOLDER)):
        return INCOMPLETE, []
    problems = []
    for name, record in (records or {}).items():
        if not (folder / name).is_file():
            problems.append(f"{name} is missing")
        elif not _has_size(folder / name, record["size"]) or _sha256(folder / name) != record["sha256"]:
            problems.append(f"{name} is not what was fetched: its size or its SHA-256 has changed")
    try:
        samples = count_items(folder, task, any_size)
        if samples != task.size and not any_size:
            problems.append(f"{samples:,} samples, DataComp's has {task.size:,}")
    except DataError as error:
        problems.append(str(error))
    return (BROKEN if problems else UNPROVEN if records is None else OK), problems


def count_items(folder: Path, task: Task, any_size: bool = False) -> int:
    """Read a data set to its end, and return the number of scored items: images, or instances for WinoGAViL.

    Raises:
        DataError: for the first thing that would make a score wrong.
    """
    num_classes = None
    if not is_converted(task):
        classnames, _ = read_classes(folder, task, any_size)
        num_classes = None if task.kind == "faces" else len(classnames)
    spec = SampleFormat(num_classes, len(task.metadata), captions=task.kind == "retrieval")
    keys = UniqueKeys()
    for shard in find_shards(folder):
        before = len(keys)
        for key, fields in read_shard(shard):
            parse_sample(fields, spec, f"{shard.name}: {key}")
            keys.add(key, shard.name)
        if len(keys) == before:
            raise DataError(f"{shard.name} holds no samples")
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
        prog=f"python -m {__package__}.download",
        description="Fetch DataComp's evaluation sets from the Hugging Face hub, once; everything else works offline. "
        "Run the same command again to go on after an interruption.",
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that gets a folder a data set")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="keys, names or suites (default: all 40)")
    parser.add_argument("--verify", action="store_true", help="only check the folders, without a network")
    parser.add_argument(
        "--allow-size-mismatch", action="store_true", help="with --verify: accept other sizes than DataComp's"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the sets to fetch, and the space they take")
    parser.add_argument("--connections", type=int, default=4, help="files fetched at a time (default: %(default)s)")
    parser.add_argument("--endpoint", help="address of the hub or a mirror (default: HF_ENDPOINT, or the hub's)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 when every chosen set is there and whole."""
    args = build_parser().parse_args(argv)
    try:
        return run_command(_verify if args.verify else _download, args)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        return 130


def _verify(args: argparse.Namespace) -> int:
    usable, tasks = 0, select_tasks(args.tasks)
    for task in tasks:
        state, problems = check_set(args.data_dir, task, args.allow_size_mismatch)
        usable += state in (OK, UNPROVEN)
        print(f"{state:<17} {task.key}", *problems, sep=f"\n{'':<20}", flush=True)
    print(f"{usable} of {len(tasks)} data sets can be scored.")
    return 0 if usable == len(tasks) else 1


def _download(args: argparse.Namespace) -> int:
    tasks, remote, failed, needed = select_tasks(args.tasks), {}, {}, 0
    for task in tasks:
        folder = args.data_dir / task.folder
        if is_complete(folder):
            print(f"there       {task.key}")
            continue
        try:
            info = remote[task.key] = list_files(task, args.endpoint)
        except DownloadError as error:
            failed[task.key] = str(error)
            continue
        target = folder / SOURCE_FOLDER if is_converted(task) else folder
        files = {target / file.rfilename: file.size or 0 for file in info.siblings or ()}
        missing = sum(size for path, size in files.items() if not _has_size(path, size))
        # The zip of a converted set is deleted only after its tars are complete.
        needed += missing + (sum(files.values()) if is_converted(task) else 0)
        print(f"to fetch    {task.key:<52} {len(files):>5} files {_gigabytes(missing):>10}")
    existing = next(path for path in (args.data_dir, *args.data_dir.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    print(f"{_gigabytes(needed)} of disk to use at most, {_gigabytes(free)} free in {args.data_dir}.", flush=True)
    if needed and needed + SPARE_BYTES > free and not args.dry_run:
        raise OSError(
            f"{args.data_dir} has {_gigabytes(free)} free, and {_gigabytes(needed + SPARE_BYTES)} are needed. Free some "
            "space, choose another --data-dir, or fetch fewer sets with --tasks."
        )
    for key, info in {} if args.dry_run else remote.items():
        try:
            fetch_set(TASKS[key], info, args.data_dir, args.connections, args.endpoint)
        except (DownloadError, ValueError) as error:
            failed[key] = str(error)
    if not args.dry_run:
        print(f"{len(tasks) - len(failed)} of {len(tasks)} data sets are complete in {args.data_dir}.")
    for key, reason in failed.items():
        print(f"failed: {key}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


if __name__ == "__main__":
    sys.exit(main())
