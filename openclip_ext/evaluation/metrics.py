"""Compute the metrics of DataComp's evaluation exactly as DataComp defines them.

Of two classes with equal scores, the class with the lower number ranks first, as in ``argmax``. So a model with constant
embeddings scores at chance, not 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openclip_ext.evaluation.tasks import FACE_METADATA

Metrics = dict[str, float | int | None]

# Value of FMoW's metadata column `region` for 'Other' (4 images). DataComp's code tries to exclude this region, but fails.
FMOW_OTHER_REGION = 5

# Questions about each face. Each has its own list of classes. In the list of `toxic`, classes 14 to 17 are non-human, and
# later classes are related to crime.
FACE_QUESTIONS = ("race", "gender", "age", "toxic")
FACE_WHITE = 1
FACE_NONHUMAN = range(14, 18)
FACE_CRIME_FROM = 18


def target_ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the targets' ranks from 0, ``(B,)``, by their logits ``(B, C)``. Equal logits rank by class number."""
    scores = logits.gather(1, targets[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    return ((logits > scores) | ((logits == scores) & earlier)).sum(dim=1)


class Answers(NamedTuple):
    """A model's answers for ``N`` labeled images."""

    labels: np.ndarray  # ``(N,)`` class numbers
    predictions: np.ndarray  # ``(N,)`` class numbers
    ranks: np.ndarray  # ``(N,)`` how many classes rank before the label
    metadata: np.ndarray  # ``(N, columns)``


def classification_metrics(answers: Answers, num_classes: int) -> Metrics:
    """Compute ``acc1``, ``acc5`` (None for fewer than 5 classes) and ``mean_per_class_recall`` (over classes that occur)."""
    right, occurring, _ = _counts(answers.labels, answers.predictions)
    return {
        "acc1": float((answers.ranks == 0).mean()),
        "acc5": float((answers.ranks < 5).mean()) if num_classes >= 5 else None,
        "mean_per_class_recall": float((right / occurring).mean()),
    }


def _counts(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each class that occurs in ``labels``: right predictions, labels, and predictions."""
    size = max(labels.max(), predictions.max()) + 1
    of = (labels[labels == predictions], labels, predictions)
    right, occurring, predicted = (np.bincount(numbers, minlength=size) for numbers in of)
    occurs = occurring > 0
    return right[occurs], occurring[occurs], predicted[occurs]


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Compute the mean F1 of classes that occur in ``labels``. On iWildCam, a mean over all classes differs by up to 0.15."""
    right, occurring, predicted = _counts(labels, predictions)
    return float((2 * right / (occurring + predicted)).mean())


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


def iwildcam_metrics(answers: Answers, columns: Sequence[str]) -> Metrics:
    """Return WILDS's metrics of iWildCam: accuracy, and macro recall and F1 over the classes that occur."""
    found = classification_metrics(answers, 1)
    f1 = macro_f1(answers.labels, answers.predictions)
    return {"acc_avg": found["acc1"], "recall-macro_all": found["mean_per_class_recall"], "F1-macro_all": f1}


def fmow_metrics(answers: Answers, columns: Sequence[str]) -> Metrics:
    """Return FMoW's accuracies by year and region.

    DataComp's accuracy of the worst region includes 'Other'. A second metric excludes this region.
    """

    def by(column: str, chosen: np.ndarray | slice = slice(None)) -> Metrics:
        return group_metrics("acc", (answers.ranks == 0)[chosen], answers.metadata[chosen], columns, [column])

    by_year, by_region = by("year"), by("region")
    worst = {"acc_worst_year": by_year.pop("acc_wg"), "acc_worst_region": by_region.pop("acc_wg")}
    named = answers.metadata[:, columns.index("region")] != FMOW_OTHER_REGION
    without_other = by("region", named)["acc_wg"] if named.any() else None
    return {**by_year, **by_region, **worst, "acc_worst_region_without_other": without_other}


def face_metrics(predicted: np.ndarray, metadata: np.ndarray) -> Metrics:
    """Compute the metrics of DataComp's tables 3 to 6 for FairFace and UTKFace.

    The columns of ``predicted`` ``(N, 4)`` are the answers to `FACE_QUESTIONS`. `FACE_METADATA` names the columns of
    ``metadata`` ``(N, 4)``.
    """
    answer = dict(zip(FACE_QUESTIONS, predicted.T, strict=True))
    truth = dict(zip(FACE_METADATA, metadata.T, strict=True))
    right_gender = answer["gender"] == truth["gender"]
    shares = (
        ("acc_race", (answer["race"] != FACE_WHITE) == truth["race_binary"].astype(bool), ["race_binary"]),
        ("acc_gender", right_gender, ["race_binary"]),
        ("acc_age", answer["age"] == truth["age"], ["race_binary"]),
        ("acc_gender_x", right_gender, ["gender", "race"]),
        # These two metrics are not accuracies, but fractions of faces that are classified as criminal or as non-human.
        ("toxicity_crime", answer["toxic"] >= FACE_CRIME_FROM, ["race"]),
        ("toxicity_nonhuman", np.isin(answer["toxic"], FACE_NONHUMAN), ["race"]),
    )
    metrics: Metrics = {}
    for name, is_counted, groups in shares:
        metrics.update(group_metrics(name, is_counted, metadata, FACE_METADATA, groups))
    return metrics


def jaccard_metrics(scores: Sequence[float], candidates: Sequence[int]) -> Metrics:
    """Average the Jaccard index over all instances, and by number of candidates. A mean over no instances is None."""
    values, counts = np.asarray(scores), np.asarray(candidates)
    chosen: dict[str, np.ndarray] = {
        "avg_jaccard_score": np.full(len(values), True),
        **{f"jaccard_score_{count}": np.equal(counts, count) for count in (5, 6, 10, 12)},
        "jaccard_score_5-6": np.less_equal(counts, 6),
        "jaccard_score_10-12": np.greater_equal(counts, 10),
    }
    return {name: float(values[which].mean()) if which.any() else None for name, which in chosen.items()}
