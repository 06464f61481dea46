"""Store and average the results of evaluations.

Each line of ``eval_results.jsonl`` is one task's result in DataComp's format, so DataComp's ``aggregate_scores.py`` can read
the file. The file contains the results of only one run, so results of two models are never mixed.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.data import fingerprint
from openclip_ext.evaluation.tasks import GROUPS, TASKS, Task
from openclip_ext.files import json_lines
from openclip_ext.files.writing import held, write_text

if TYPE_CHECKING:  # at run time, these modules would import OpenCLIP and scikit-learn, which takes seconds
    from openclip_ext.evaluation.classification import TaskResult
    from openclip_ext.evaluation.models import LoadedModel

RESULTS_FILE, _LOCK_FILE = "eval_results.jsonl", ".eval_results.jsonl.lock"
# Change this name whenever a code change may give the same weights different scores on the same data.
PROTOCOL = "datacomp-3"


def config_digest(config: Any) -> str:
    """Return a short digest of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_identity(loaded: "LoadedModel", precision: str) -> dict[str, str]:
    """Return the model, precision and protocol. All results in a file must have the same."""
    return {
        "model": loaded.name,
        "weights": loaded.weights_sha256,
        "config": config_digest(loaded.config),
        "precision": precision,
        "protocol": PROTOCOL,
    }


class ResultFile:
    """The results of one run (see `run_identity`) in a folder. Several processes can use the folder at the same time.

    Every change writes a new file under a lock and renames the new file, so a killed process leaves the old file intact, and
    reading needs neither a lock nor a writable folder. Methods raise UsageError if the folder has results
    of another run. The path ``checkpoint`` is stored, but may differ.
    """

    def __init__(self, folder: str | Path, run: dict[str, str], checkpoint: str):
        self.path = Path(folder) / RESULTS_FILE
        self.run = {**run, "checkpoint": checkpoint}
        self._identity = run

    def prepare(self, tasks: Sequence[Task], data_dir: Path, overwrite: bool, any_size: bool) -> list[Task]:
        """Return the tasks to evaluate, and delete their old results.

        They are the tasks without a result and the tasks whose data have changed, or all tasks if ``overwrite``. Results of
        data that do not have DataComp's size are kept only if ``any_size``.
        """
        lines = self._read()

        def is_old(line: dict[str, Any]) -> bool:
            return overwrite or has_other_data(line, data_dir) or (has_other_size(line) and not any_size)

        todo = [task for task in tasks if task.key not in lines or is_old(lines[task.key])]
        if todo:  # also without old results, because a folder that is not writable must fail before hours of evaluation
            with self._changed() as lines:
                for task in todo:
                    lines.pop(task.key, None)  # if the evaluation fails, the old result must not be reported
        return todo

    def add(self, task: Task, data: str, result: "TaskResult", seconds: float) -> None:
        """Store the result of a task, replacing an earlier one. ``data``: the `fingerprint` of its data."""
        line = {
            "key": task.key,
            "dataset": task.name,
            "metrics": result.metrics,
            "run": self.run,
            "data": data,
            "samples": result.samples,
            "found": result.found,
            "classes": result.classes,
            "skipped": result.skipped,
            "seconds": round(seconds, 3),
        }
        with self._changed() as lines:
            lines[task.key] = line

    def lines(self) -> list[dict[str, Any]]:
        """Return the result lines of this run."""
        return list(self._read().values())

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the lines by task key."""
        lines = {line["key"]: line for line in read_results(self.path)}
        for line in lines.values():
            run = line.get("run", {})
            if other := [name for name, value in self._identity.items() if run.get(name) != value]:
                raise UsageError(
                    f"{self.path} has results of another run ({', '.join(other)}): give another --output-dir"
                )
        return lines

    @contextmanager
    def _changed(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Lock the folder, yield the lines by task key, and write them back. After an exception, the file is unchanged."""
        with held(self.path.parent, _LOCK_FILE, timeout=-1):
            lines = self._read()
            yield lines
            # `json_lines` writes valid JSON, which cannot contain NaN.
            content = "".join(json_lines.dumps(line) + "\n" for line in lines.values())
            write_text(self.path, content)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file of this package or of DataComp's harness."""
    return [
        line
        for line in json_lines.read(path)
        if isinstance(line.get("key"), str) and isinstance(line.get("metrics"), dict)
    ]


def _names(keys: Sequence[str], most: int = 5) -> str:
    names = ", ".join(TASKS[key].name for key in keys[:most])
    return f"{names} and {len(keys) - most} more" if len(keys) > most else names


def main_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the main metrics of result lines, by task key. Missing and NaN values (as in DataComp's files) are omitted."""
    scores = {line["key"]: line["metrics"].get("main_metric") for line in lines}
    return {key: value for key, value in scores.items() if value is not None and math.isfinite(value)}


def averages(scores: Mapping[str, float]) -> dict[str, tuple[float | None, tuple[str, ...]]]:
    """Return, by group title, the average main metric (None if a task is missing) and the keys of missing tasks."""
    found = {}
    for title, keys in GROUPS.items():
        missing = tuple(key for key in keys if key not in scores)
        found[title] = None if missing else sum(scores[key] for key in keys) / len(keys), missing
    return found


def summary(lines: Sequence[Mapping[str, Any]], failed: Mapping[str, str], missing: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``eval_summary.json``."""
    return {
        "averages": {
            title: {"value": value, "tasks": len(GROUPS[title]), "missing": list(missing)}
            for title, (value, missing) in averages(main_metrics(lines)).items()
        },
        "main_metrics": {line["key"]: line["metrics"].get("main_metric") for line in lines},
        "problems": dict(failed),
        "missing": list(missing),
        "other_sizes": [line["key"] for line in lines if has_other_size(line)],
        "skipped_images": {line["key"]: line["skipped"] for line in lines if line.get("skipped")},
    }


def has_other_data(line: Mapping[str, Any], data_dir: Path) -> bool:
    """Return whether the task's data in ``data_dir`` differ from the data of the result; False if the data are missing."""
    folder = data_dir / TASKS[line["key"]].folder if line["key"] in TASKS else None
    return folder is not None and folder.is_dir() and line.get("data") != fingerprint(folder)


def has_other_size(line: Mapping[str, Any]) -> bool:
    """Return whether the size of a result's data differs from DataComp's (``--allow-size-mismatch``)."""
    task = TASKS.get(line["key"])
    return task is not None and any(
        (line.get(name) or expected) != expected for name, expected in (("found", task.size), ("classes", task.classes))
    )


def summary_text(found: Mapping[str, Any], data_dir: Path) -> str:
    """Return a `summary` as text: the main metric of each task, the averages, and the tasks without a result."""
    values = found["main_metrics"]
    text = ["", f"{'task':26} {'main metric':22} {'value':>8}"]
    for task in (task for key, task in TASKS.items() if key in values):
        value = values[task.key]
        text.append(f"{task.name:26} {task.main_metric or 'none':22} {'-' if value is None else f'{value:.4f}':>8}")
    text.append("")
    for title, average in found["averages"].items():
        value, total, lacking = average["value"], average["tasks"], average["missing"]
        partial = f"partial, {total - len(lacking)}/{total}; missing: {_names(lacking)}"
        text.append(f"{title}: {partial if value is None else f'{value:.4f}'}")
    if other := found["other_sizes"]:
        text.append(
            f"\nSizes of {len(other)} data sets differ from DataComp's, so scores are not comparable: {_names(other)}"
        )
    for key, skipped in found["skipped_images"].items():
        text.append(f"\n{TASKS[key].name}: {len(skipped)} images do not decode and are excluded:")
        text += [f"  {entry}" for entry in skipped[:10]]
    if found["problems"]:
        text.append("\nNot evaluated:")
        text += [f"  {TASKS[key].name}: {reason}" for key, reason in found["problems"].items()]
    if missing := found["missing"]:
        command = f"openclip-ext download --data-dir {data_dir}"
        tasks = f" --tasks {' '.join(missing)}" if len(missing) <= 5 else ""
        text.append(f"\nNot in {data_dir} ({len(missing)}): {_names(missing)}. Download with `{command}{tasks}`.")
    return "\n".join(text)
