"""Evaluate one task: score its data, and reject data that differs from DataComp's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from openclip_ext.evaluation.classification import TaskResult, evaluate_classification, evaluate_faces
from openclip_ext.evaluation.data import DataError
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.retrieval import evaluate_retrieval, evaluate_winogavil
from openclip_ext.evaluation.tasks import Task

# A task fails if the images that do not decode are more than this number and more than this fraction of all images.
MAX_SKIPPED = 10
MAX_SKIPPED_SHARE = 0.01

# Evaluation function by kind of task. Tasks of all other kinds use `evaluate_classification`.
EVALUATORS: dict[str, Callable[[Task, Path, Encoder, bool], TaskResult]] = {
    "faces": evaluate_faces,
    "retrieval": evaluate_retrieval,
    "winogavil": evaluate_winogavil,
}


def evaluate_task(task: Task, data_dir: str | Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score one task, and add its ``main_metric``. ``any_size``: whether the data's size may differ from DataComp's.

    Raise DataError if the data is missing, corrupt or differs from DataComp's, and ValueError for non-finite embeddings.
    """
    evaluate = EVALUATORS.get(task.kind, evaluate_classification)
    result = evaluate(task, Path(data_dir) / task.folder, encoder, any_size)
    skipped, images = len(result.skipped), result.images or result.found
    if skipped > max(MAX_SKIPPED, MAX_SKIPPED_SHARE * images):
        raise DataError(
            f"{skipped} of {images} images do not decode, the first: {result.skipped[0]}. Download the data set again."
        )
    if result.found != task.size and not any_size:
        raise DataError(
            f"expected DataComp's {task.size} samples, found {result.found}. "
            "Download the data set again. openclip-ext evaluate accepts another size with --allow-size-mismatch."
        )
    main_metric = None if task.main_metric is None else result.metrics[task.main_metric]
    return replace(result, metrics={**result.metrics, "main_metric": main_metric})
