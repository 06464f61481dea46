"""Compute the metrics of DataComp's evaluation exactly as DataComp defines them.

Rankings break ties by the lower index, so a model whose embeddings are all equal scores chance instead of 1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.metrics import f1_score, recall_score
from torch import Tensor

Metrics = dict[str, float | int | None]


def target_ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Count in logits ``(B, C)`` the classes before each right one; equal logits rank in the order of the classes."""
    scores = logits.gather(1, targets[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    return ((logits > scores) | ((logits == scores) & earlier)).sum(dim=1)


def classification_metrics(labels: np.ndarray, predictions: np.ndarray, ranks: np.ndarray, num_classes: int) -> Metrics:
    """Compute ``acc1``, ``acc5`` (None under five classes) and ``mean_per_class_recall``."""
    recall = recall_score(labels, predictions, labels=np.unique(labels), average="macro")  # of the classes that occur
    return {
        "acc1": float((ranks == 0).mean()),
        "acc5": float((ranks < 5).mean()) if num_classes >= 5 else None,
        "mean_per_class_recall": float(recall),
    }


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Compute the mean F1 of the classes that occur in ``labels``; over all classes, iWildCam is off by up to 0.15."""
    return float(f1_score(labels, predictions, labels=np.unique(labels), average="macro"))


def group_metrics(
    name: str, correct: np.ndarray, metadata: np.ndarray, columns: Sequence[str], groups: Sequence[str]
) -> Metrics:
    """Compute the accuracy overall, in every group and in the worst group, under WILDS' names.

    As in WILDS, groups are all combinations of the values from 0 to the largest that occurs. An empty group has the count 0
    and no accuracy, and cannot be the worst.

    Args:
        name: prefix of the metrics, for example ``acc``.
        correct: ``(N,)`` bool.
        metadata: ``(N, len(columns))`` integers from 0.
        columns: names of the metadata's columns.
        groups: names of the columns to group by.

    Returns:
        ``{name}_avg``, ``{name}_{group}`` and ``count_{group}`` for every group, ``{name}_wg``.
    """
    indices = [columns.index(group) for group in groups]
    values = metadata[:, indices]
    sizes = values.max(axis=0) + 1
    # In WILDS the first column varies fastest.
    flat = np.ravel_multi_index(tuple(values.T[::-1]), tuple(sizes[::-1]))
    counts = np.bincount(flat, minlength=int(sizes.prod()))
    hits = np.bincount(flat[correct], minlength=int(sizes.prod()))
    metrics: Metrics = {f"{name}_avg": float(correct.mean())}
    accuracies = []
    for group, (hit, count) in enumerate(zip(hits.tolist(), counts.tolist(), strict=True)):
        coordinates = np.unravel_index(group, tuple(sizes[::-1]))
        label = "_".join(f"{column}:{value}" for column, value in zip(groups[::-1], coordinates, strict=True))
        metrics[f"{name}_{label}"] = hit / count if count else None
        metrics[f"count_{label}"] = count
        if count:
            accuracies.append(hit / count)
    metrics[f"{name}_wg"] = min(accuracies)
    return metrics
