"""Average results over complete groups of tasks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.evaluation.tasks import GROUPS, TASKS


def _names(keys: Sequence[str], most: int = 5) -> str:
    names = ", ".join(TASKS[key].name for key in keys[:most])
    return f"{names} and {len(keys) - most} more" if len(keys) > most else names


def main_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the finite main metrics of the lines of a result file by key; DataComp's own files may contain NaN."""
    scores = {line["key"]: line["metrics"].get("main_metric") for line in lines}
    return {key: value for key, value in scores.items() if value is not None and math.isfinite(value)}


def averages(scores: Mapping[str, float]) -> dict[str, tuple[float | None, tuple[str, ...]]]:
    """Return by a group's title the average of the main metrics, None if some are missing, and the missing keys."""
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
    """Return whether the size of a result's data is not DataComp's (``--allow-size-mismatch``)."""
    task = TASKS.get(line["key"])
    return task is not None and line.get("found", task.size) != task.size


def summary_text(
    lines: Sequence[Mapping[str, Any]], failed: Mapping[str, str], missing: Sequence[str], data_dir: Path
) -> str:
    """Return the final text: the main metric of every task, the averages, and what was not evaluated."""
    by_key = {line["key"]: line for line in lines}
    text = ["", f"{'task':26} {'main metric':22} {'value':>8}"]
    for task in (task for key, task in TASKS.items() if key in by_key):
        value = by_key[task.key]["metrics"].get("main_metric")
        text.append(f"{task.name:26} {task.main_metric or 'none':22} {'-' if value is None else f'{value:.4f}':>8}")
    text.append("")
    for title, (average, lacking) in averages(main_metrics(lines)).items():
        total = len(GROUPS[title])
        partial = f"partial, {total - len(lacking)}/{total}; missing: {_names(lacking)}"
        text.append(f"{title}: {partial if average is None else f'{average:.4f}'}")
    if other := [line["key"] for line in lines if has_other_size(line)]:
        text.append(
            f"\nOther sizes than DataComp's data, so not DataComp's numbers: {len(other)} tasks, {_names(other)}"
        )
    for line in lines:
        if skipped := line.get("skipped"):
            text.append(f"\n{line['dataset']}: {len(skipped)} images do not decode and are excluded:")
            text += [f"  {entry}" for entry in skipped[:10]]
    if failed:
        text.append("\nNot evaluated:")
        text += [f"  {TASKS[key].name}: {reason}" for key, reason in failed.items()]
    if missing:
        command = f"openclip-ext download --data-dir {data_dir}"
        tasks = f" --tasks {' '.join(missing)}" if len(missing) <= 5 else ""
        text.append(f"\nNot in {data_dir} ({len(missing)}): {_names(missing)}. Download with `{command}{tasks}`.")
    return "\n".join(text)
