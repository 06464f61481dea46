"""Store results in ``eval_results.jsonl``: one line for each task in DataComp's format, and only one run's lines.

So DataComp's ``aggregate_scores.py`` can read the file, and the numbers of two models never mix. Lines of other runs move to
``eval_results.RUN.jsonl`` in the same folder, and return when that run continues.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext.evaluation.data import fingerprint
from openclip_ext.evaluation.tasks import Task
from openclip_ext.files import json_lines
from openclip_ext.files.writing import held, write_atomically

if TYPE_CHECKING:  # whoever reads results needs neither OpenCLIP nor scikit-learn, which take seconds to import
    from openclip_ext.evaluation.classification import TaskResult
    from openclip_ext.evaluation.models import LoadedModel

RESULTS_FILE = "eval_results.jsonl"
# Stands for the digest of lines that do not say which run they belong to.
UNKNOWN_RUN = "unknown"
# Must change whenever the same weights may get other numbers on the same data.
PROTOCOL = "datacomp-2"


def config_digest(config: Any) -> str:
    """Return a short digest of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EvaluationIdentity:
    """Identifies an evaluation apart from its data; a result counts for a run only if everything here agrees.

    ``weights`` is the SHA-256 of the weights, ``config`` the digest of architecture and preprocessing.
    """

    model: str
    weights: str
    config: str
    precision: str
    protocol: str = PROTOCOL

    @classmethod
    def of(cls, loaded: "LoadedModel", precision: str, any_size: bool = False) -> "EvaluationIdentity":
        """Identify the evaluation of a model; with ``any_size``, the data may have other sizes than DataComp's."""
        protocol = f"{PROTOCOL}-any-size" if any_size else PROTOCOL
        return cls(loaded.name, loaded.weights_sha256, config_digest(loaded.config), precision, protocol)

    @property
    def id(self) -> str:
        """Return a short name of the run for file names."""
        return config_digest(asdict(self))[:8]


class ResultFile:
    """Stores the results of one run in a folder, also for several processes at a time.

    Every change writes a new file under a lock and renames it into place, so a killed process leaves the old file and never
    half a line. ``checkpoint`` is for information only, and not part of the run's identity.
    """

    def __init__(self, folder: str | Path, run: EvaluationIdentity, checkpoint: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / RESULTS_FILE
        self.run = run
        self.checkpoint = checkpoint

    def open(self) -> None:
        """Move the lines of other runs out of the result file, and earlier lines of this run into it."""
        with self._locked():
            lines: dict[str, list[dict[str, Any]]] = {self.run.id: []}
            for line in read_results(self.path):
                lines.setdefault(_run_of(line), []).append(line)
            own = lines.pop(self.run.id)
            for run_id, foreign in lines.items():
                _write(self._aside(run_id), read_results(self._aside(run_id)) + foreign)
            aside = self._aside(self.run.id)
            _write(self.path, read_results(aside) + own)
            aside.unlink(missing_ok=True)
        for run_id, foreign in lines.items():
            owner = "that name no model, as DataComp's own" if run_id == UNKNOWN_RUN else "of another model or protocol"
            logging.warning(f"{self.path} held {len(foreign)} results {owner}: moved to {self._aside(run_id).name}.")

    def completed(self, tasks: Sequence[Task], data_dir: str | Path) -> set[str]:
        """Return the keys that have a result of this run whose data has not changed since, except by being removed."""
        known = {line["key"]: line.get("data") for line in self.lines()}
        folders = {task.key: Path(data_dir) / task.folder for task in tasks if task.key in known}
        return {key for key, path in folders.items() if not path.is_dir() or fingerprint(path) == known[key]}

    def discard(self, keys: Iterable[str]) -> None:
        """Remove this run's results for some tasks."""
        unwanted = set(keys)
        with self._locked():
            lines = read_results(self.path)
            _write(self.path, [line for line in lines if line["key"] not in unwanted or not self._is_own(line)])

    def add(self, task: Task, folder: Path, result: "TaskResult", seconds: float) -> None:
        """Store the result of a task, replacing an earlier one."""
        line = {
            "key": task.key,
            "dataset": task.name,
            "metrics": result.metrics,
            "run": {**asdict(self.run), "checkpoint": self.checkpoint},
            "data": fingerprint(folder),
            "samples": result.samples,
            "found": result.found,
            "skipped": [str(entry) for entry in result.skipped],
            "seconds": round(seconds, 3),
        }
        with self._locked():
            # If another run has taken over the file in the meantime, our results go where `open` finds them again.
            taken = any(not self._is_own(other) for other in read_results(self.path))
            path = self._aside(self.run.id) if taken else self.path
            kept = [other for other in read_results(path) if other["key"] != task.key]
            _write(path, [*kept, line])

    def lines(self) -> list[dict[str, Any]]:
        """Return this run's results."""
        lines = read_results(self._aside(self.run.id)) + read_results(self.path)
        return list({line["key"]: line for line in lines if self._is_own(line)}.values())

    def _is_own(self, line: dict[str, Any]) -> bool:
        return _run_of(line) == self.run.id

    def _aside(self, run_id: str) -> Path:
        return self.path.with_suffix(f".{run_id}.jsonl")

    def _locked(self) -> AbstractContextManager[None]:
        return held(self.folder, f".{RESULTS_FILE}.lock", timeout=-1)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the results in a file of ours or of DataComp's harness, without lines of other kinds."""
    return [line for line in json_lines.read(path) if isinstance(line.get("key"), str) and "metrics" in line]


def _run_of(line: dict[str, Any]) -> str:
    """Return the identity of a line's run, as `EvaluationIdentity.id` gives it."""
    run = {name: value for name, value in line.get("run", {}).items() if name != "checkpoint"}
    return config_digest(run)[:8] if run else UNKNOWN_RUN


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    # DataComp's own harness writes NaN, which is not JSON.
    content = "".join(json_lines.dumps(line) + "\n" for line in lines)
    write_atomically(path, lambda stream: stream.write(content.encode()))
