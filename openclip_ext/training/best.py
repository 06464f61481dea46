"""The best model of a run (``--keep-best METRIC``), by what its evaluations wrote down: a resume needs no state."""

import logging
import math
from pathlib import Path

from openclip_ext import json_lines

BEST = "best.pt"
_LESS_IS_BETTER = ("loss", "rank")


def is_best(metrics: dict[str, float], metric: str, folder: Path, epoch: int) -> bool:
    """Whether an evaluation is better than all earlier ones of the run, or the first.

    Args:
        metrics: of the evaluation; without any, the answer is no.
        metric: which of them decides. Of losses and ranks the least is the best, of others the largest.
        folder: the run's ``checkpoints/``, with its ``results.jsonl``.
        epoch: number of completed epochs.
    """
    if not metrics:
        return False
    if metric not in metrics:
        logging.warning(f"--keep-best {metric}: this evaluation has no such metric, but {', '.join(metrics)}")
        return False
    sign = -1 if any(word in metric for word in _LESS_IS_BETTER) else 1
    lines = [line for line in json_lines.read(folder / "results.jsonl") if line.get("epoch", epoch) < epoch]
    earlier = [sign * line[metric] for line in lines if isinstance(line.get(metric), int | float)]
    value = sign * metrics[metric]
    return not math.isnan(value) and all(value > other or math.isnan(other) for other in earlier)
