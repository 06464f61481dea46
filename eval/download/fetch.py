"""Planning and running a download: what is there already, what it will take, then one data set after the other."""

import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from eval.download.convert import convert_retrieval, convert_winogavil
from eval.download.hub import PART_SUFFIX, DownloadError, Hub, RemoteFile, RemoteSet
from eval.download.manifest import MANIFEST_NAME, Manifest, describe_file
from eval.download.sources import SOURCE_FOLDER, Source, is_document, source_of
from eval.tasks import Task

# Left free on the disk: file system overhead, and the logs and results of whoever works there.
SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class PlannedSet:
    """A data set to fetch.

    Attributes:
        task: whose data it is.
        folder: where it goes.
        source: where it comes from.
        remote: its files on the hub.
        missing: bytes to fetch.
        needed: bytes of disk to have free for it, at the peak.
    """

    task: Task
    folder: Path
    source: Source
    remote: RemoteSet
    missing: int
    needed: int

    @property
    def download_folder(self) -> Path:
        """Where the files of the repository go; those to convert stay out of the data set proper."""
        return self.folder / SOURCE_FOLDER if self.source.converted else self.folder


@dataclass
class Plan:
    """What a download will do.

    Attributes:
        present: tasks whose data is complete already.
        sets: what to fetch.
        refused: task key -> why the hub does not give it.
    """

    present: list[Task]
    sets: list[PlannedSet]
    refused: dict[str, str]


def make_plan(hub: Hub, data_dir: Path, tasks: Iterable[Task]) -> Plan:
    """Compare the disk with the hub; the hub is asked only about sets that are not complete.

    Raises:
        HubUnreachableError: if it must be asked and does not answer.
    """
    plan = Plan([], [], {})
    for task in tasks:
        folder = data_dir / task.folder
        manifest = _usable_manifest(folder)
        if manifest is not None and manifest.is_complete():
            plan.present.append(task)
            continue
        source = source_of(task)
        try:
            remote = hub.list_files(source)
        except DownloadError as error:
            plan.refused[task.key] = str(error)
            continue
        plan.sets.append(_plan_set(task, folder, source, remote))
    return plan


def check_space(data_dir: Path, plan: Plan) -> None:
    """Make sure the disk can take the plan.

    Raises:
        OSError: if it cannot, with the numbers.
    """
    needed = sum(planned.needed for planned in plan.sets)
    free = free_bytes(data_dir)
    if needed and needed + SPARE_BYTES > free:
        raise OSError(
            f"{data_dir} has {format_bytes(free)} free, and {format_bytes(needed + SPARE_BYTES)} are needed. Free some "
            "space, choose another --data-dir, or fetch fewer sets with --tasks."
        )


def fetch_set(hub: Hub, planned: PlannedSet, connections: int = 4, keep_source: bool = False) -> None:
    """Fetch one data set completely, convert it where needed, and write down its checksums.

    Args:
        connections: files fetched at a time.
        keep_source: keep the hub's table and zip after converting them.

    Raises:
        DownloadError, OSError: as `Hub.fetch` does; what was fetched stays, for the next attempt.
        ValueError: if the set to convert is not as expected.
    """
    planned.download_folder.mkdir(parents=True, exist_ok=True)
    manifest = _fetch_files(hub, planned, connections)
    if planned.source.converted:
        convert = convert_retrieval if planned.task.kind == "retrieval" else convert_winogavil
        convert(planned.download_folder, planned.folder)
        manifest = Manifest(planned.folder, planned.remote.repository, planned.remote.revision)
        for path in sorted(planned.folder.rglob("*")):
            inside = path.relative_to(planned.folder)
            if path.is_file() and inside.parts[0] not in (SOURCE_FOLDER, MANIFEST_NAME):
                manifest.files[inside.as_posix()] = describe_file(path)
    manifest.complete = True
    manifest.save()
    if planned.source.converted and not keep_source:
        for path in planned.download_folder.iterdir():
            if is_document(path.name):
                path.replace(planned.folder / path.name)
        shutil.rmtree(planned.download_folder)


def free_bytes(folder: Path) -> int:
    """Free space where a folder is, or will be."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def format_bytes(count: int) -> str:
    """``12.3 GB``; powers of 1000, as disks are sold."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _usable_manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.load(folder)
    except ValueError:
        return None  # unreadable: as if there were none, so every file is compared with the hub's checksum again


def _plan_set(task: Task, folder: Path, source: Source, remote: RemoteSet) -> PlannedSet:
    target = folder / SOURCE_FOLDER if source.converted else folder
    missing = sum(file.size - _bytes_present(target / file.path, file) for file in remote.files)
    # The tars of a converted set lie beside the zip until they are complete.
    converted = sum(file.size for file in remote.files) if source.converted else 0
    return PlannedSet(task, folder, source, remote, missing, missing + converted)


def _bytes_present(path: Path, file: RemoteFile) -> int:
    if path.is_file() and path.stat().st_size == file.size:
        return file.size
    part = path.with_name(path.name + PART_SUFFIX)
    return min(part.stat().st_size, file.size) if part.is_file() else 0


def _fetch_files(hub: Hub, planned: PlannedSet, connections: int) -> Manifest:
    """All files of the repository, several at a time; a file that is there is compared, not fetched."""
    folder, remote = planned.download_folder, planned.remote
    manifest = _usable_manifest(folder)
    if manifest is None or manifest.revision != remote.revision:
        manifest = Manifest(folder, remote.repository, remote.revision)
    total = sum(file.size for file in remote.files)
    stop = threading.Event()
    with (
        tqdm(total=total, desc=planned.task.name, unit="B", unit_scale=True) as bar,
        ThreadPoolExecutor(connections) as pool,
    ):

        def progress(count: int) -> None:
            if stop.is_set():
                raise DownloadError("stopped, because another file failed")
            bar.update(count)

        fetches = [pool.submit(_fetch_file, hub, remote, file, manifest, progress) for file in remote.files]
        try:
            for future in as_completed(fetches):
                future.result()
        except BaseException:  # Ctrl-C, too: the other connections must not go on for gigabytes
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return manifest


def _fetch_file(
    hub: Hub, remote: RemoteSet, file: RemoteFile, manifest: Manifest, progress: Callable[[int], object]
) -> None:
    path = manifest.folder / file.path
    if manifest.has(file.path, file.size):
        progress(file.size)
        return
    if path.is_file() and path.stat().st_size == file.size:
        # Left by another tool, or by a run that was killed between renaming and writing it down: prove it.
        path.replace(path.with_name(path.name + PART_SUFFIX))
    manifest.record(file.path, hub.fetch(remote, file, path, progress))
