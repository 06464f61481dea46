"""Evaluate one task: score its data, and refuse data that is not DataComp's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from openclip_ext.evaluation.classification import GROUPED, TaskResult, evaluate_classification, evaluate_faces
from openclip_ext.evaluation.data import DataError
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.retrieval import evaluate_retrieval, evaluate_winogavil
from openclip_ext.evaluation.tasks import Task

# Number of undecodable images that is tolerated, or share of the data set if that is more.
MAX_SKIPPED = 10
MAX_SKIPPED_SHARE = 0.01

EVALUATORS: dict[str, Callable[[Task, Path, Encoder, bool], TaskResult]] = {
    "classification": evaluate_classification,
    **dict.fromkeys(("iwildcam", *GROUPED), evaluate_classification),
    "faces": evaluate_faces,
    "retrieval": evaluate_retrieval,
    "winogavil": evaluate_winogavil,
}


def evaluate_task(task: Task, data_dir: str | Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score one task, including its ``main_metric``; with ``any_size`` also data whose size is not DataComp's.

    Raises:
        DataError: if the data are missing, damaged, or not DataComp's.
        ValueError: if the model's embeddings are not finite.
    """
    result = EVALUATORS[task.kind](task, Path(data_dir) / task.folder, encoder, any_size)
    if len(result.skipped) > max(MAX_SKIPPED, MAX_SKIPPED_SHARE * (result.samples + len(result.skipped))):
        raise DataError(
            f"{len(result.skipped)} of {result.samples + len(result.skipped)} images do not decode, "
            f"the first: {result.skipped[0]}; fetch the data set again."
        )
    if result.found != task.size and not any_size:
        raise DataError(
            f"Found {result.found} samples, DataComp's data set has {task.size}: not scored; "
            f"fetch the data set again, or score it as it is with --allow-size-mismatch."
        )
    main_metric = None if task.main_metric is None else result.metrics[task.main_metric]
    return replace(result, metrics={**result.metrics, "main_metric": main_metric})
