"""Plan a download from the files on disk and on the hub, then fetch one data set after the other.

``huggingface_hub`` lists the files, fetches them several at a time and skips files that are complete. It compares
sizes only, so the checksums are compared here.
"""

import glob
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.utils import HfHubHTTPError
from huggingface_hub.utils.sha import git_hash

from ..tasks import Task
from .convert import convert_retrieval, convert_winogavil
from .manifest import MANIFEST_NAME, FileRecord, Manifest, describe_file
from .sources import SOURCE_FOLDER, Source, is_document, source_of

# Left free on the disk: file system overhead, and the logs and results of whoever works there.
SPARE_BYTES = 256 << 20
# Where huggingface_hub notes which files of a folder are complete.
HUB_FOLDER = ".cache"
_TIMEOUT_S = 30.0
_ATTEMPTS = 3


class HubUnreachableError(ConnectionError):
    """The hub did not answer at all: no network, offline mode, or a wrong endpoint."""


class DownloadError(RuntimeError):
    """The hub answered, but does not give a file, or its checksum is wrong."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub.

    Attributes:
        path: path in the repository, and below the data set's folder.
        size: in bytes.
        sha256: of the content, for files in the hub's large-file storage, else None.
        blob_id: git's id of the content (SHA-1 over a header and the bytes), for the other files.
    """

    path: str
    size: int
    sha256: str | None
    blob_id: str | None

    def accepts(self, path: Path, record: FileRecord) -> bool:
        """Whether the file at ``path``, described by ``record``, has the checksum that the hub promised."""
        if self.sha256 is not None:
            return record.sha256 == self.sha256
        return git_hash(path.read_bytes()) == self.blob_id


@dataclass(frozen=True)
class RemoteSet:
    """The needed files of a data set repository at one commit."""

    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class PlannedSet:
    """A data set to fetch.

    Attributes:
        task: the task that needs it.
        folder: its folder on disk.
        source: its repository.
        remote: its files on the hub.
        missing: bytes to fetch.
        needed: free bytes needed on disk, at the peak.
    """

    task: Task
    folder: Path
    source: Source
    remote: RemoteSet
    missing: int
    needed: int

    @property
    def download_folder(self) -> Path:
        """Folder for the files of the repository; those to convert stay out of the data set proper."""
        return self.folder / SOURCE_FOLDER if self.source.converted else self.folder


@dataclass(frozen=True)
class FetchOptions:
    """How to fetch.

    Attributes:
        connections: files fetched at a time.
        keep_source: keep the hub's table and zip after converting them.
        endpoint: address of the hub; None means ``HF_ENDPOINT`` or huggingface.co.
    """

    connections: int = 4
    keep_source: bool = False
    endpoint: str | None = None


@dataclass(frozen=True)
class Plan:
    """Plan of a download.

    Attributes:
        present: tasks whose data is complete already.
        sets: data sets to fetch.
        refused: task key -> reason of the hub for refusing it.
    """

    present: list[Task]
    sets: list[PlannedSet]
    refused: dict[str, str]


def list_files(source: Source, endpoint: str | None = None) -> RemoteSet:
    """The needed files of a repository, with sizes and checksums.

    Args:
        source: the repository.
        endpoint: address of the hub; None means ``HF_ENDPOINT`` or huggingface.co.

    Raises:
        HubUnreachableError: if there is no answer.
        DownloadError: if the hub refuses, or has nothing of use there.
    """
    api = HfApi(endpoint=endpoint)
    try:
        info = api.dataset_info(source.repository, files_metadata=True, timeout=_TIMEOUT_S)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DownloadError(f"the hub refused {source.repository}: {reason}") from error
    except Exception as error:  # the HTTP client behind huggingface_hub differs by version, and so its exceptions
        raise HubUnreachableError(
            f"The hub at {api.endpoint} does not answer ({type(error).__name__}: {error}). Downloading needs a "
            "network; for a mirror set --endpoint or HF_ENDPOINT. --verify works without one."
        ) from error
    files = [
        _remote_file(entry.rfilename, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in info.siblings or ()
        if source.wants(entry.rfilename)
    ]
    if not files or info.sha is None:
        raise DownloadError(f"{source.repository} has none of the expected files")
    return RemoteSet(source.repository, info.sha, tuple(files))


def _remote_file(name: str, size: int | None, sha256: str | None, blob_id: str | None) -> RemoteFile:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DownloadError(f"the hub lists a file outside the repository: {name}")
    return RemoteFile(str(path), size or 0, sha256, blob_id)


def make_plan(data_dir: Path, tasks: Iterable[Task], endpoint: str | None = None) -> Plan:
    """Compare the disk with the hub; the hub is asked only about sets that are not complete.

    Raises:
        HubUnreachableError: if it must be asked and does not answer.
    """
    plan = Plan([], [], {})
    for task in tasks:
        folder = data_dir / task.folder
        if _is_complete(folder):
            plan.present.append(task)
            continue
        source = source_of(task)
        try:
            remote = list_files(source, endpoint)
        except DownloadError as error:
            plan.refused[task.key] = str(error)
            continue
        plan.sets.append(_plan_set(task, folder, source, remote))
    return plan


def _is_complete(folder: Path) -> bool:
    try:
        manifest = Manifest.load(folder)
    except ValueError:  # unreadable: the files are compared with the hub's checksums again
        return False
    return manifest is not None and manifest.is_complete(folder)


def _plan_set(task: Task, folder: Path, source: Source, remote: RemoteSet) -> PlannedSet:
    target = folder / SOURCE_FOLDER if source.converted else folder
    missing = sum(file.size for file in remote.files if not _has_size(target / file.path, file.size))
    # The zip of a converted set is deleted only after its tars are complete.
    converted = sum(file.size for file in remote.files) if source.converted else 0
    return PlannedSet(task, folder, source, remote, missing, missing + converted)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_space(data_dir: Path, plan: Plan) -> None:
    """Make sure that the disk can take the plan.

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


def fetch_set(planned: PlannedSet, options: FetchOptions) -> None:
    """Fetch one data set completely, convert it if needed, and write its checksums.

    Raises:
        DownloadError: if a file cannot be fetched, or its checksum is wrong twice. Complete files stay for the next
            attempt.
        ValueError: if the set to convert is not as expected.
    """
    folder, remote = planned.folder, planned.remote
    manifest = _fetch_files(remote, planned.download_folder, options)
    if planned.source.converted:
        convert = convert_retrieval if planned.task.kind == "retrieval" else convert_winogavil
        convert(planned.download_folder, folder)
        manifest = Manifest.of(remote.repository, remote.revision, folder, _converted_files(folder))
    manifest.save(folder)
    if planned.source.converted and not options.keep_source:
        for path in planned.download_folder.iterdir():
            if is_document(path.name):
                path.replace(folder / path.name)
        shutil.rmtree(planned.download_folder)
    shutil.rmtree(planned.download_folder / HUB_FOLDER, ignore_errors=True)


def _fetch_files(remote: RemoteSet, folder: Path, options: FetchOptions) -> Manifest:
    """Fetch missing files and compare all with the hub's checksums; fetch a wrong one once more."""
    patterns = [glob.escape(file.path) for file in remote.files]
    location: dict[str, Any] = {
        "repo_id": remote.repository,
        "repo_type": "dataset",
        "revision": remote.revision,
        "local_dir": folder,
        "endpoint": options.endpoint,
    }
    try:
        _persist(partial(snapshot_download, **location, allow_patterns=patterns, max_workers=options.connections))
        records = {file.path: _checked(file, folder, location) for file in remote.files}
    except DownloadError:
        raise
    except Exception as error:  # of the HTTP client, of the hub, of the disk
        raise DownloadError(
            f"{remote.repository}: {type(error).__name__}: {error}; run the same command again to go on"
        ) from error
    return Manifest(remote.repository, remote.revision, records)


def _persist(fetch: Callable[[], object]) -> None:
    """Repeat a fetch after a broken connection or a busy hub; complete files are not fetched again."""
    for attempt in range(_ATTEMPTS):
        try:
            fetch()
            return
        except Exception:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(2.0**attempt)


def _checked(file: RemoteFile, folder: Path, location: dict[str, Any]) -> FileRecord:
    path = folder / file.path
    if path.is_file() and file.accepts(path, record := describe_file(path)):
        return record
    hf_hub_download(**location, filename=file.path, force_download=True)
    record = describe_file(path)
    if not file.accepts(path, record):
        path.unlink()
        raise DownloadError(
            f"{location['repo_id']}/{file.path}: wrong checksum twice; the hub promises "
            f"{file.sha256 or file.blob_id}, the bytes received have SHA-256 {record.sha256}"
        )
    return record


def _converted_files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path.as_posix() for path in paths if path.parts[0] not in (SOURCE_FOLDER, MANIFEST_NAME, HUB_FOLDER)]


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder that exists or will be made."""
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
