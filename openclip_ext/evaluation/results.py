"""Store results in ``eval_results.jsonl``: one line for each task in DataComp's format, and only one run's lines.

So DataComp's ``aggregate_scores.py`` can read the file, and the numbers of two models never mix. Lines of other runs move to
``eval_results.RUN.jsonl`` in the same folder, and return when that run continues.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext.evaluation.data import fingerprint
from openclip_ext.evaluation.tasks import Task
from openclip_ext.files import json_lines
from openclip_ext.files.writing import held, write_atomically

if TYPE_CHECKING:  # reading results needs neither OpenCLIP nor scikit-learn, which take seconds to import
    from openclip_ext.evaluation.classification import TaskResult
    from openclip_ext.evaluation.models import LoadedModel

RESULTS_FILE = "eval_results.jsonl"
# Stands for the digest of lines without a run.
UNKNOWN_RUN = "unknown"
# Must change whenever the same weights may get other numbers on the same data.
PROTOCOL = "datacomp-2"


def config_digest(config: Any) -> str:
    """Return a short digest of any JSON content."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_identity(loaded: "LoadedModel", precision: str, any_size: bool = False) -> dict[str, str]:
    """Return what a result depends on except its data; with ``any_size``, the data may have other sizes than DataComp's."""
    return {
        "model": loaded.name,
        "weights": loaded.weights_sha256,
        "config": config_digest(loaded.config),
        "precision": precision,
        "protocol": f"{PROTOCOL}-any-size" if any_size else PROTOCOL,
    }


class ResultFile:
    """The results of one run (see `run_identity`) in a folder, also for several processes at a time.

    Every change writes a new file under a lock and renames it into place, so a killed process leaves the old file.
    ``checkpoint`` is for information only.
    """

    def __init__(self, folder: str | Path, run: dict[str, str], checkpoint: str):
        self.folder = Path(folder)
        self.path = self.folder / RESULTS_FILE
        self._run = {**run, "checkpoint": checkpoint}
        self._run_id = _run_id({"run": run})

    def open(self) -> None:
        """Move the lines of other runs out of the result file, and earlier lines of this run into it."""
        with self._locked():
            by_run: dict[str, list[dict[str, Any]]] = {self._run_id: []}
            for line in read_results(self.path):
                by_run.setdefault(_run_id(line), []).append(line)
            by_run = {run_id: read_results(self._aside(run_id)) + lines for run_id, lines in by_run.items()}
            for run_id, lines in by_run.items():
                _write(self.path if run_id == self._run_id else self._aside(run_id), lines)
            self._aside(self._run_id).unlink(missing_ok=True)
        del by_run[self._run_id]
        for run_id in by_run:
            owner = (
                "without a model, as DataComp writes them" if run_id == UNKNOWN_RUN else "of another model or protocol"
            )
            logging.warning(f"{self.path} held results {owner}: moved to {self._aside(run_id).name}.")

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
            "run": self._run,
            "data": fingerprint(folder),
            "samples": result.samples,
            "found": result.found,
            "skipped": result.skipped,
            "seconds": round(seconds, 3),
        }
        with self._locked():
            # If another run has taken over the file in the meantime, the result goes where `open` finds it.
            is_own = all(map(self._is_own, read_results(self.path)))
            path = self.path if is_own else self._aside(self._run_id)
            _write(path, [*(other for other in read_results(path) if other["key"] != task.key), line])

    def lines(self) -> list[dict[str, Any]]:
        """Return this run's results."""
        lines = read_results(self._aside(self._run_id)) + read_results(self.path)
        return list({line["key"]: line for line in lines if self._is_own(line)}.values())

    def _is_own(self, line: dict[str, Any]) -> bool:
        return _run_id(line) == self._run_id

    def _aside(self, run_id: str) -> Path:
        return self.path.with_suffix(f".{run_id}.jsonl")

    def _locked(self) -> AbstractContextManager[None]:
        return held(self.folder, f".{RESULTS_FILE}.lock", timeout=-1)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file of this package or of DataComp's harness."""
    return [line for line in json_lines.read(path) if isinstance(line.get("key"), str) and "metrics" in line]


def _run_id(line: dict[str, Any]) -> str:
    """Return the short name of a line's run for file names."""
    run = {name: value for name, value in line.get("run", {}).items() if name != "checkpoint"}
    return config_digest(run)[:8] if run else UNKNOWN_RUN


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    # DataComp's own harness writes NaN, which is not JSON.
    content = "".join(json_lines.dumps(line) + "\n" for line in lines)
    write_atomically(path, lambda stream: stream.write(content.encode()))
