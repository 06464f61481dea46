"""Score zero-shot classification, plain and by groups (WILDS, Dollar Street, GeoDE, FairFace, UTKFace)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openclip_ext.evaluation.data import (
    CLASSNAMES_FILE,
    TEMPLATES_FILE,
    DataError,
    SampleFormat,
    Samples,
    Skipped,
    find_samples,
    read_classes,
    read_lines,
)
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.metrics import Metrics, classification_metrics, group_metrics, macro_f1, target_ranks
from openclip_ext.evaluation.tasks import FACE_METADATA, Task

# OpenAI's scale, which changes no ranking and makes the logits equal to clip-benchmark's.
LOGIT_SCALE = 100.0

# Value of FMoW's column `region` for 'Other' (4 images), which upstream intends to leave out but does not.
FMOW_OTHER_REGION = 5

# The four questions about a face. Classes of `toxic` from 14 are non-human, from 18 related to crime, as in DataComp.
FACE_QUESTIONS = ("race", "gender", "age", "toxic")
FACE_WHITE = 1
FACE_NONHUMAN = range(14, 18)
FACE_CRIME_FROM = 18

# Kinds of tasks with groups -> prefix of the metrics, number of best classes among which the right one counts, group column.
GROUPED = {
    "camelyon17": ("acc", 1, "slide"),
    "fmow": ("acc", 1, "region"),
    "dollar_street": ("acc_top5", 5, "income_ds"),
    "geode": ("acc", 1, "region"),
}


@dataclass
class TaskResult:
    """Holds the result of a task; a metric that is not defined is None, and ``found`` counts the data set's samples."""

    metrics: Metrics
    samples: int
    found: int
    skipped: list[Skipped] = field(default_factory=list)


def evaluate_classification(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score a data set with labels; grouped tasks add the metrics of their groups.

    Raises:
        DataError: if the data must not be scored.
    """
    classnames, templates = read_classes(folder, task, any_size)
    spec = SampleFormat(num_classes=len(classnames), metadata_columns=len(task.metadata))
    batches = encoder.batches(find_samples(folder), spec)
    weights = encoder.class_embeddings(classnames, templates)
    answers = classify(encoder, batches, [weights], task)
    labels, predicted, ranks = (answers.values[name].numpy() for name in ("label", "predicted", "rank"))
    metrics = classification_metrics(labels, predicted[:, 0], ranks, len(classnames))
    if task.kind == "iwildcam":
        metrics["acc_avg"] = metrics["acc1"]
        metrics["recall-macro_all"] = metrics["mean_per_class_recall"]
        metrics["F1-macro_all"] = macro_f1(labels, predicted[:, 0])
    elif task.kind in GROUPED:
        metrics.update(_grouped_metrics(task, ranks, answers.values["metadata"].numpy()))
    return _result(metrics, answers)


def evaluate_faces(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score FairFace or UTKFace, which ask four questions about every image, each with its own classes and templates."""
    classnames = _by_question(folder / CLASSNAMES_FILE, "class names")
    templates = _by_question(folder / TEMPLATES_FILE, "prompt templates")
    batches = encoder.batches(find_samples(folder), SampleFormat(metadata_columns=len(task.metadata)))
    weights = [encoder.class_embeddings(classnames[name], templates[name]) for name in FACE_QUESTIONS]
    answers = classify(encoder, batches, weights, task)
    values = answers.values
    return _result(face_metrics(values["predicted"].numpy(), values["metadata"].numpy()), answers)


def _result(metrics: Metrics, found: Samples) -> TaskResult:
    return TaskResult(metrics, len(found.keys), len(found.keys) + len(found.skipped), found.skipped)


def classify(encoder: Encoder, batches: Iterator[Samples], classifiers: Sequence[Tensor], task: Task) -> Samples:
    """Answer every question about every image, without keeping the logits.

    Args:
        batches: batches of the data set; labels belong to the first classifier.
        classifiers: class embeddings ``(C, d)``, one tensor for each question.

    Returns:
        ``predicted`` ``(N, questions)`` class numbers. If the data set has labels, also ``label`` ``(N,)`` and ``rank``
        ``(N,)``, the number of classes before the right one. If it has metadata, also ``metadata`` ``(N, columns)``.
    """
    # Equal class names must tie exactly, but matrix products round differently at their edges. So each row is computed once.
    distinct = [torch.unique(weights, dim=0, return_inverse=True) for weights in classifiers]

    def compute(batch: Samples) -> dict[str, Tensor]:
        features = encoder.encode_images(batch.values["image"])
        logits = [(LOGIT_SCALE * features @ rows.T)[:, place] for rows, place in distinct]
        found = {"predicted": torch.stack([scores.argmax(dim=1) for scores in logits], dim=1).cpu()}
        if "label" in batch.values:
            found["rank"] = target_ranks(logits[0], batch.values["label"].to(features.device)).cpu()
        return found

    return encoder.collect(batches, compute, task.folder, task.size)


def _by_question(path: Path, what: str) -> dict[str, list[str]]:
    """Read the lines ``question:entry`` of a file, by question."""
    entries: dict[str, list[str]] = {question: [] for question in FACE_QUESTIONS}
    for line in read_lines(path, what):
        question, colon, entry = line.partition(":")
        if not colon or question not in entries:
            raise DataError(
                f"{path}: {line!r} does not begin with one of {', '.join(f'{q}:' for q in FACE_QUESTIONS)}."
            )
        entries[question].append(entry)
    empty = [question for question, lines in entries.items() if not lines]
    if empty:
        raise DataError(f"{path}: no {what} for {', '.join(empty)}.")
    return entries


def _grouped_metrics(task: Task, ranks: np.ndarray, metadata: np.ndarray) -> Metrics:
    """Compute the metrics that a task with groups adds, from ranks ``(N,)`` and metadata ``(N, columns)``."""
    name, best, column = GROUPED[task.kind]

    def by(column: str, chosen: np.ndarray | slice = slice(None)) -> Metrics:
        return group_metrics(name, np.less(ranks, best)[chosen], metadata[chosen], task.metadata, [column])

    if task.kind != "fmow":
        return by(column)
    # By year and by region; the worst region as published (with 'Other'), and without it.
    by_year, by_region = by("year"), by("region")
    worst = {"acc_worst_year": by_year.pop("acc_wg"), "acc_worst_region": by_region.pop("acc_wg")}
    named = metadata[:, task.metadata.index("region")] != FMOW_OTHER_REGION
    without_other = by("region", named)["acc_wg"] if named.any() else None
    return {**by_year, **by_region, **worst, "acc_worst_region_without_other": without_other}


def face_metrics(predicted: np.ndarray, metadata: np.ndarray) -> Metrics:
    """Compute the numbers of DataComp's tables 3 to 6 for FairFace and UTKFace.

    ``predicted`` ``(N, 4)`` holds the answers to `FACE_QUESTIONS`, ``metadata`` ``(N, 4)`` the columns of `FACE_METADATA`.
    """
    answer = {question: predicted[:, index] for index, question in enumerate(FACE_QUESTIONS)}
    truth = {column: metadata[:, index] for index, column in enumerate(FACE_METADATA)}
    right = {
        "acc_race": (answer["race"] != FACE_WHITE) == truth["race_binary"].astype(bool),
        "acc_gender": answer["gender"] == truth["gender"],
        "acc_age": answer["age"] == truth["age"],
    }
    metrics: Metrics = {}
    for name, correct in right.items():
        metrics.update(group_metrics(name, correct, metadata, FACE_METADATA, ["race_binary"]))
    metrics.update(group_metrics("acc_gender_x", right["acc_gender"], metadata, FACE_METADATA, ["gender", "race"]))
    # These are not accuracies, but how often a face is taken for a criminal or for an animal.
    crime = answer["toxic"] >= FACE_CRIME_FROM
    metrics.update(group_metrics("toxicity_crime", crime, metadata, FACE_METADATA, ["race"]))
    nonhuman = np.isin(answer["toxic"], FACE_NONHUMAN)
    metrics.update(group_metrics("toxicity_nonhuman", nonhuman, metadata, FACE_METADATA, ["race"]))
    return metrics
