"""Listing and fetching data set files from the Hugging Face hub: resumable, checksummed.

The listing goes through ``huggingface_hub``; the bytes are streamed here, because ``hf_hub_download`` does not keep a
partial file (huggingface_hub 2.4: "do not keep a partial file around"), and a set is up to tens of gigabytes.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import requests

from eval.download.manifest import FileRecord
from eval.download.sources import Source

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_CHUNK = 1 << 17  # also what an interruption costs at most
_TIMEOUT_S = 30.0
_ATTEMPTS = 6  # without progress; every received byte starts the count again
PART_SUFFIX = ".part"


class HubUnreachableError(ConnectionError):
    """The hub did not answer at all: no network, offline mode, or a wrong endpoint."""


class DownloadError(RuntimeError):
    """The hub answered, and the file cannot be had, or is not what it should be."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub.

    Attributes:
        path: where in the repository, and below the data set's folder.
        size: in bytes.
        sha256: of the content, for files in the hub's large-file storage, else None.
        blob_id: git's id of the content (SHA-1 over a header and the bytes), for the other files.
    """

    path: str
    size: int
    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class RemoteSet:
    """The needed files of a data set repository at one commit."""

    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


class Hub:
    """The hub at one endpoint.

    Args:
        endpoint: its address; None means ``HF_ENDPOINT`` or huggingface.co.
        sleep: waits between attempts, in seconds.
    """

    def __init__(self, endpoint: str | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi(endpoint=endpoint)
        self.endpoint = self._api.endpoint
        self._sleep = sleep

    def list_files(self, source: Source) -> RemoteSet:
        """The needed files of a repository, with sizes and checksums.

        Raises:
            HubUnreachableError: if there is no answer.
            DownloadError: if the hub refuses, or has nothing of use there.
        """
        from huggingface_hub.utils import HfHubHTTPError

        try:
            info = self._api.repo_info(source.repository, repo_type="dataset", files_metadata=True, timeout=_TIMEOUT_S)
        except HfHubHTTPError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DownloadError(f"the hub refused {source.repository}: {reason}") from error
        except Exception as error:  # the HTTP client behind huggingface_hub differs by version, and so its exceptions
            raise HubUnreachableError(
                f"The hub at {self.endpoint} does not answer ({type(error).__name__}: {error}). Downloading needs a "
                "network; for a mirror set --endpoint or HF_ENDPOINT. --verify works without one."
            ) from error
        files = tuple(_remote_file(entry) for entry in info.siblings or () if source.wants(entry.rfilename))
        if not files:
            raise DownloadError(f"{source.repository} has none of the expected files")
        return RemoteSet(source.repository, info.sha, files)

    def fetch(
        self, remote: RemoteSet, file: RemoteFile, destination: Path, progress: Callable[[int], object]
    ) -> FileRecord:
        """Fetch one file, going on where an earlier attempt stopped.

        The bytes so far lie in ``destination.part``; the file gets its name only after its checksum was found right.

        Args:
            progress: called with the number of bytes that arrived (or were there already), negative when they turn
                out useless. What it raises stops the download.

        Raises:
            DownloadError: if the hub refuses, the connection keeps breaking, or the checksum is wrong twice.
            OSError: if the disk refuses; the partial file stays.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(
            remote.repository, file.path, repo_type="dataset", revision=remote.revision, endpoint=self.endpoint
        )
        destination.parent.mkdir(parents=True, exist_ok=True)
        part = destination.with_name(destination.name + PART_SUFFIX)
        for _ in range(2):
            self._complete_part(url, file, part, progress)
            record, right = _check(part, file)
            if right:
                os.replace(part, destination)
                return record
            part.unlink()
            progress(-record.size)
        raise DownloadError(
            f"{remote.repository}/{file.path}: wrong checksum twice; the hub promises {file.sha256 or file.blob_id}, "
            f"the bytes received have SHA-256 {record.sha256}"
        )

    def _complete_part(self, url: str, file: RemoteFile, part: Path, progress: Callable[[int], object]) -> None:
        """Append to ``part`` until it has the file's size."""
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        part.touch()
        have = part.stat().st_size
        progress(have)
        failures = 0
        while have < file.size:
            try:
                self._append(url, part, file.size, progress)
                failure = "the connection closed early"
            except requests.RequestException as error:
                failure = str(error)
            failures = failures + 1 if part.stat().st_size <= have else 1
            have = part.stat().st_size
            if have < file.size:
                if failures >= _ATTEMPTS:
                    raise DownloadError(
                        f"{file.path}: gave up after {_ATTEMPTS} attempts at byte {have:,} of {file.size:,} "
                        f"({failure}); run the same command again to go on from there"
                    )
                self._sleep(min(2.0**failures, 30.0))

    def _append(self, url: str, part: Path, size: int, progress: Callable[[int], object]) -> None:
        """One request for the rest of the file."""
        from huggingface_hub.utils import build_hf_headers

        have = part.stat().st_size
        headers = {**build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
            if response.status_code in (429, 500, 502, 503, 504):
                raise requests.ConnectionError(f"the hub answers {response.status_code}")
            if response.status_code not in (200, 206):
                raise DownloadError(f"the hub answers {response.status_code} {response.reason} for {url}")
            appending = response.status_code == 206
            if not appending:  # no ranges there: the answer is the whole file
                progress(-have)
            with open(part, "ab" if appending else "wb") as stream:
                room = size - (have if appending else 0)
                for chunk in response.iter_content(_CHUNK):
                    stream.write(chunk[:room])
                    progress(len(chunk[:room]))
                    room -= len(chunk[:room])


def _remote_file(entry: "RepoSibling") -> RemoteFile:
    path = PurePosixPath(entry.rfilename)
    if path.is_absolute() or ".." in path.parts:
        raise DownloadError(f"the hub lists a file outside the repository: {entry.rfilename}")
    return RemoteFile(str(path), entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)


def _check(path: Path, file: RemoteFile) -> tuple[FileRecord, bool]:
    """What the bytes are, and whether that is what the hub promised."""
    size = path.stat().st_size
    sha256, git_sha1 = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            sha256.update(chunk)
            git_sha1.update(chunk)
    right = size == file.size and (
        sha256.hexdigest() == file.sha256 if file.sha256 else git_sha1.hexdigest() == file.blob_id
    )
    return FileRecord(size, sha256.hexdigest()), right
