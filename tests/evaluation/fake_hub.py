"""Folders in place of the Hugging Face hub, behind the signatures of ``HfApi``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects


class FakeHub:
    """Serves ``repositories[owner/name]``, a folder each.

    Attributes:
        corrupt: path of a file -> how many times to serve it with its first byte changed.
        busy: paths of files that cannot be fetched.
        fetched: paths of the files that were.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.corrupt: Counter[str] = Counter()
        self.busy: set[str] = set()
        self.fetched: list[str] = []
        self.api = create_autospec(HfApi, instance=True)
        self.api.dataset_info.side_effect = self._info
        self.api.snapshot_download.side_effect = self._snapshot
        self.api.verify_repo_checksums.side_effect = self._verify

    def _files(self, repo_id: str) -> dict[str, Path]:
        folder = self.repositories[repo_id]
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def _info(self, repo_id: str, **_: object) -> SimpleNamespace:
        if repo_id not in self.repositories:
            raise HfHubHTTPError("404", response=Mock())
        sizes = {name: path.stat().st_size for name, path in self._files(repo_id).items()}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()])

    def _snapshot(self, repo_id: str, repo_type: str, local_dir: Path, allow_patterns: Sequence[str]) -> None:
        files = self._files(repo_id)
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for name in filter_repo_objects(files, allow_patterns=list(allow_patterns)):
            if (local_dir / name).exists():
                continue
            if name in self.busy:
                raise OSError("503")
            content = files[name].read_bytes()
            self.corrupt[name] -= 1
            (local_dir / name).parent.mkdir(exist_ok=True)
            (local_dir / name).write_bytes(content[::-1] if self.corrupt[name] >= 0 else content)
            self.fetched.append(name)

    def _verify(self, repo_id: str, repo_type: str, local_dir: Path) -> SimpleNamespace:
        local = {name: local_dir / name for name in self._files(repo_id) if (local_dir / name).exists()}
        wrong = [name for name, path in local.items() if path.read_bytes() != self._files(repo_id)[name].read_bytes()]
        return SimpleNamespace(mismatches=[{"path": name} for name in wrong])
