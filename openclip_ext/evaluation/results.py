"""Store and average the results of evaluations.

``eval_log.jsonl`` is the state of an evaluation. Lines are only appended: one for each started, failed and completed task. A
task's last line decides. ``eval_results.jsonl`` has one line per completed task in DataComp's format, so DataComp's
``aggregate_scores.py`` can read it. It is derived from the log by the command that evaluates, never by a reader. A folder has
the results of only one model.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.tasks import GROUPS, TASKS
from openclip_ext.files import json_lines
from openclip_ext.files.writing import file_lock, write_text

if TYPE_CHECKING:  # at run time, these modules would import OpenCLIP and scikit-learn, which takes seconds
    from openclip_ext.evaluation.models import OpenedModel
    from openclip_ext.evaluation.scoring import Scores, Task

LOG_FILE, RESULTS_FILE, _LOCK_FILE = "eval_log.jsonl", "eval_results.jsonl", ".eval_results.jsonl.lock"
# Change this name whenever a code change may give the same weights different scores on the same data.
PROTOCOL = "datacomp-4"


def config_digest(config: Any) -> str:
    """Return a short digest of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_identity(opened: "OpenedModel", precision: str) -> dict[str, str]:
    """Return the model, precision and protocol. All results in a folder must agree in these."""
    return {
        "model": opened.name,
        "weights": opened.weights_sha256,
        "config": config_digest(opened.config),
        "precision": precision,
        "protocol": PROTOCOL,
    }


class ResultLog:
    """The results of one model (see `run_identity`) in a folder. Several processes can use the folder at the same time.

    Methods raise UsageError if the folder has results of another model. The path ``checkpoint`` is stored, but may differ.
    """

    def __init__(self, folder: str | Path, run: dict[str, str], checkpoint: str):
        self.folder = Path(folder)
        self.path = self.folder / RESULTS_FILE
        self.run = {**run, "checkpoint": checkpoint}
        self._identity = run

    def completed(self) -> dict[str, dict[str, Any]]:
        """Return the lines of completed tasks by task key. Reading changes no file."""
        if self.path.is_file() and not (self.folder / LOG_FILE).is_file():
            raise UsageError(f"{self.path} has no {LOG_FILE}, so another program wrote it: give another --output-dir")
        lines = [line for line in read_log(self.folder) if line["state"] == "done"]
        for line in lines:
            run = line.get("run") or {}
            if other := [name for name, value in self._identity.items() if run.get(name) != value]:
                raise UsageError(
                    f"{self.path} has results with different {', '.join(other)}: give another --output-dir"
                )
        return {line["key"]: line for line in lines}

    def begin(self, keys: Sequence[str]) -> None:
        """Record that tasks are evaluated. From now on, their earlier results do not count."""
        if keys:  # a folder that is not writable must fail before hours of evaluation
            self._append(*({"key": key, "state": "started"} for key in keys))

    def fail(self, key: str, reason: str) -> None:
        """Record that a task failed."""
        self._append({"key": key, "state": "failed", "reason": reason})

    def add(self, key: str, task: "Task", data: str, scores: "Scores", seconds: float) -> None:
        """Record the result of a task. ``data`` is the `fingerprint` of its data."""
        line = {
            "key": key,
            "state": "done",
            "dataset": task.name,
            "metric": task.main_metric,
            "metrics": scores.metrics,
            "half_widths": dict(scores.half_widths),
            "data": data,
            "samples": scores.samples,
            "found": scores.found,
            "classes": scores.classes,
            "skipped": list(scores.skipped),
            "seconds": round(seconds, 3),
        }
        self._append(line)

    def _append(self, *lines: dict[str, Any]) -> None:
        """Append to the log, and derive ``eval_results.jsonl``, under a lock."""
        with file_lock(self.folder, _LOCK_FILE, timeout=-1):
            self.completed()  # another model may have come first
            # The text starts with a line break, because a killed process may have left half a line. `json_lines` writes valid
            # JSON, which cannot contain NaN.
            text = "".join(f"\n{json_lines.dumps({**line, 'run': self.run})}" for line in lines)
            with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
            done = [line for key, line in self.completed().items() if key in TASKS]
            shown = [{name: value for name, value in line.items() if name != "state"} for line in done]
            write_text(self.path, "".join(f"{json_lines.dumps(line)}\n" for line in shown))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of each task in a folder's log."""
    lines = {
        line["key"]: line
        for line in json_lines.read(folder / LOG_FILE)
        if isinstance(line.get("key"), str) and isinstance(line.get("state"), str)
    }
    return [*lines.values()]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in a folder of this package, or in a result file of this package or of DataComp's harness."""
    lines = json_lines.read(path)
    if path.name == RESULTS_FILE and (path.parent / LOG_FILE).is_file():
        lines = [line for line in read_log(path.parent) if line["state"] == "done"]
    return [line for line in lines if isinstance(line.get("key"), str) and isinstance(line.get("metrics"), dict)]


def _names(keys: Sequence[str], most: int = 5) -> str:
    names = ", ".join(name_of(key) for key in keys[:most])
    return f"{names} and {len(keys) - most} more" if len(keys) > most else names


def name_of(key: str) -> str:
    """Return the name of one of DataComp's tasks; another key, such as a group's title, is returned unchanged."""
    return TASKS[key].name if key in TASKS else key


def main_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the main metrics of result lines, by task key. Missing and NaN values (as in DataComp's files) are omitted."""
    scores = {line["key"]: line["metrics"].get("main_metric") for line in lines}
    return {key: value for key, value in scores.items() if value is not None and math.isfinite(value)}


def main_value(line: Mapping[str, Any]) -> str:
    """Return the main metric of a result line as text, with half the width of its interval if it has one."""
    value, half = line["metrics"].get("main_metric"), line.get("half_widths", {}).get(line["metric"])
    return "-" if value is None else f"{value:.4f}" + (f" ± {half:.4f}" if half is not None else "")


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


def has_other_size(line: Mapping[str, Any]) -> bool:
    """Return whether the size of a result's data differs from DataComp's (``--allow-size-mismatch``)."""
    task = TASKS.get(line["key"])
    return task is not None and any(
        (line.get(name) or expected) != expected for name, expected in (("found", task.size), ("classes", task.classes))
    )


def summary_text(found: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], data_dir: Path | None) -> str:
    """Return a `summary` as text: the main metric of each task, the averages, and the tasks without a result."""
    by_key = {line["key"]: line for line in lines}
    text = ["", f"{'task':26} {'main metric':22} {'value':>8}"]
    for key in sorted(by_key, key=lambda key: [*TASKS].index(key) if key in TASKS else len(TASKS)):
        text += _task_lines(key, by_key[key])
    text.append("")
    if any(key in TASKS for key in by_key):
        for title, average in found["averages"].items():
            value, total, lacking = average["value"], average["tasks"], average["missing"]
            partial = f"partial, {total - len(lacking)}/{total}; missing: {_names(lacking)}"
            text.append(f"{title}: {partial if value is None else f'{value:.4f}'}")
    if other := found["other_sizes"]:
        text.append(
            f"\nSizes of {len(other)} data sets differ from DataComp's, so scores are not comparable: {_names(other)}"
        )
    for key, skipped in found["skipped_images"].items():
        text.append(f"\n{name_of(key)}: {len(skipped)} images do not decode and are excluded:")
        text += [f"  {entry}" for entry in skipped[:10]]
    if found["problems"]:
        text.append("\nNot evaluated:")
        text += [f"  {name_of(key)}: {reason}" for key, reason in found["problems"].items()]
    if missing := found["missing"]:
        command = f"openclip-ext download --data-dir {shlex.quote(str(data_dir))}"
        tasks = f" --tasks {' '.join(missing)}" if len(missing) <= 5 else ""
        text.append(f"\nNot in {data_dir} ({len(missing)}): {_names(missing)}. Download with `{command}{tasks}`.")
    return "\n".join(text)


def _task_lines(key: str, line: Mapping[str, Any]) -> Iterator[str]:
    """Yield the main metric of a task. For a task of the user's own, also yield its other metrics, with their intervals."""
    values, widths = line["metrics"], line.get("half_widths", {})
    if key in TASKS:
        value, metric = values.get("main_metric"), TASKS[key].main_metric
        yield f"{TASKS[key].name:26} {metric or 'none':22} {'-' if value is None else f'{value:.4f}':>8}"
        return
    for metric, value in values.items():
        if metric != "main_metric" and value is not None:
            spread = f" ± {widths[metric]:.4f}" if metric in widths else ""
            yield f"{key:26} {metric:22} {value:>8.4f}{spread}"
