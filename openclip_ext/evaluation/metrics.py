"""Compute the metrics of DataComp's evaluation exactly as DataComp defines them.

Of two classes with equal scores, the class with the lower number ranks first, as in ``argmax``. So a model with constant
embeddings scores at chance, not 1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.metrics import f1_score, recall_score
from torch import Tensor

Metrics = dict[str, float | int | None]


def target_ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return ``(B,)``: how many classes have larger logits ``(B, C)`` than the target. Equal logits rank by class number."""
    scores = logits.gather(1, targets[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    return ((logits > scores) | ((logits == scores) & earlier)).sum(dim=1)


def classification_metrics(labels: np.ndarray, predictions: np.ndarray, ranks: np.ndarray, num_classes: int) -> Metrics:
    """Compute ``acc1``, ``acc5`` (None for fewer than 5 classes) and ``mean_per_class_recall`` (over classes that occur)."""
    recall = recall_score(labels, predictions, labels=np.unique(labels), average="macro")
    return {
        "acc1": float((ranks == 0).mean()),
        "acc5": float((ranks < 5).mean()) if num_classes >= 5 else None,
        "mean_per_class_recall": float(recall),
    }


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Compute the mean F1 of classes that occur in ``labels``. On iWildCam, a mean over all classes differs by up to 0.15."""
    return float(f1_score(labels, predictions, labels=np.unique(labels), average="macro"))


def group_metrics(
    name: str, correct: np.ndarray, metadata: np.ndarray, columns: Sequence[str], groups: Sequence[str]
) -> Metrics:
    """Return WILDS's metrics: ``{name}_avg``, ``{name}_wg`` (worst group), ``{name}_{group}`` and ``count_{group}``.

    Each combination of values of the columns ``groups``, from 0 to a column's maximum, is a group. The accuracy of an empty
    group is None, and the group is never the worst group.

    Args:
        correct: ``(N,)`` bool; its mean is the accuracy.
        metadata: ``(N, len(columns))`` non-negative integers.
        groups: Names of the columns that define the groups.
    """
    values = metadata[:, [columns.index(group) for group in groups]]
    # As in WILDS, the first column varies fastest in the order of groups.
    sizes = tuple(values.max(axis=0)[::-1] + 1)
    flat = np.ravel_multi_index(tuple(values.T[::-1]), sizes)
    counts = np.bincount(flat, minlength=np.prod(sizes)).tolist()
    hits = np.bincount(flat[correct], minlength=np.prod(sizes)).tolist()
    metrics: Metrics = {f"{name}_avg": float(correct.mean())}
    accuracies = []
    for coordinates, hit, count in zip(np.ndindex(*sizes), hits, counts, strict=True):
        label = "_".join(f"{column}:{value}" for column, value in zip(groups[::-1], coordinates, strict=True))
        metrics[f"{name}_{label}"] = hit / count if count else None
        metrics[f"count_{label}"] = count
        if count:
            accuracies.append(hit / count)
    metrics[f"{name}_wg"] = min(accuracies)
    return metrics
