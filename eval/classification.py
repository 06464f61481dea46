"""Zero-shot classification, plain and by groups (WILDS, Dollar Street, GeoDE, FairFace, UTKFace)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import (
    CLASSNAMES_FILE,
    TEMPLATES_FILE,
    Batch,
    DataError,
    SampleFormat,
    Skipped,
    find_shards,
    read_classes,
    read_lines,
)
from .features import Encoder
from .metrics import (
    Metrics,
    classification_metrics,
    group_metrics,
    macro_f1,
    macro_recall,
    target_ranks,
)
from .tasks import FACE_METADATA, Task

# OpenAI's scale. It changes no ranking and gives clip-benchmark's logits.
LOGIT_SCALE = 100.0

# Value of FMoW's column `region` for 'Other' (4 images): upstream means to leave it out and does not.
FMOW_OTHER_REGION = 5

# The four questions about a face. Classes of `toxic` from 14 are non-human, from 18 related to crime, as in DataComp.
FACE_QUESTIONS = ("race", "gender", "age", "toxic")
FACE_WHITE = 1
FACE_NONHUMAN = range(14, 18)
FACE_CRIME_FROM = 18


@dataclass
class TaskResult:
    """Result of evaluating a task.

    Attributes:
        metrics: by name; None if a metric is not defined.
        samples: number of samples scored.
        found: number of samples in the data set.
        skipped: images that were left out.
    """

    metrics: Metrics
    samples: int
    found: int
    skipped: list[Skipped] = field(default_factory=list)


@dataclass
class Predictions:
    """A classifier's answers, in the order of the data set. Fields that a task lacks are empty.

    Attributes:
        predicted: ``(N,)`` or, for several questions, ``(N, questions)`` class numbers.
        ranks: ``(N,)`` classes before the right one.
        labels: ``(N,)``.
        metadata: ``(N, columns)``.
        skipped: samples that were left out.
    """

    predicted: np.ndarray
    ranks: np.ndarray
    labels: np.ndarray
    metadata: np.ndarray
    skipped: list[Skipped]

    @property
    def correct(self) -> np.ndarray:
        """``(N,)`` bool, whether the prediction is the label."""
        return np.equal(self.predicted, self.labels)


def class_logits(features: Tensor, weights: Tensor) -> Tensor:
    """``100 * features @ weights.T``: ``(B, d)`` unit embeddings and ``(C, d)`` class embeddings -> ``(B, C)``."""
    return LOGIT_SCALE * features @ weights.T


def evaluate_classification(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score a data set with labels; grouped tasks add their groups' metrics.

    Raises:
        DataError: for data that must not be scored.
    """
    classnames, templates = read_classes(folder, task, any_size)
    spec = SampleFormat(num_classes=len(classnames), metadata_columns=len(task.metadata))
    batches = encoder.batches(find_shards(folder), spec)
    weights = encoder.class_embeddings(classnames, templates)
    answers = classify(encoder, batches, [weights], task)
    metrics = classification_metrics(answers.labels, answers.predicted, answers.ranks, len(classnames))
    if task.kind in GROUPED:
        metrics.update(GROUPED[task.kind](task, answers))
    return _result(metrics, answers)


def evaluate_faces(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score FairFace or UTKFace: four questions about every image, each with its own classes and templates.

    Raises:
        DataError: for data that must not be scored.
    """
    classnames = _by_question(folder / CLASSNAMES_FILE, "class names")
    templates = _by_question(folder / TEMPLATES_FILE, "prompt templates")
    batches = encoder.batches(find_shards(folder), SampleFormat(metadata_columns=len(task.metadata)))
    weights = [encoder.class_embeddings(classnames[name], templates[name]) for name in FACE_QUESTIONS]
    answers = classify(encoder, batches, weights, task)
    return _result(face_metrics(answers.predicted, answers.metadata), answers)


def _result(metrics: Metrics, answers: Predictions) -> TaskResult:
    scored = len(answers.predicted)
    return TaskResult(metrics, scored, scored + len(answers.skipped), answers.skipped)


def classify(encoder: Encoder, batches: Iterable[Batch], classifiers: Sequence[Tensor], task: Task) -> Predictions:
    """Answer every question about every image. Keeps answers and ranks only, not the logits.

    Args:
        encoder: encodes the images.
        batches: batches of the data set; labels belong to the first classifier.
        classifiers: class embeddings ``(C, d)``, one tensor per question.
        task: name and size for the progress bar.
    """
    # Equal class names must tie exactly, but matrix products round differently at their edges: compute each row once.
    distinct = [torch.unique(weights, dim=0, return_inverse=True) for weights in classifiers]
    order: list[Tensor] = []
    predicted: list[Tensor] = []
    ranks: list[Tensor] = []
    labels: list[Tensor] = []
    metadata: list[Tensor] = []
    skipped: list[Skipped] = []
    with encoder.progress(task.size, task.name, "image") as bar:
        for batch in batches:
            skipped += batch.skipped
            if not batch.keys:
                continue
            features = encoder.encode_images(batch.images)
            logits = [class_logits(features, rows)[:, place] for rows, place in distinct]
            order.append(batch.order)
            predicted.append(torch.stack([scores.argmax(dim=1) for scores in logits], dim=1).cpu())
            if batch.labels is not None:
                ranks.append(target_ranks(logits[0], batch.labels.to(features.device)).cpu())
                labels.append(batch.labels)
            if batch.metadata is not None:
                metadata.append(batch.metadata)
            bar.update(len(batch.keys))
    if not order:
        raise DataError(f"No image to score in {task.folder}; {skipped[0] if skipped else 'the shards are empty'}.")
    on_disk = torch.cat(order).argsort()

    def joined(parts: list[Tensor]) -> np.ndarray:
        return torch.cat(parts)[on_disk].numpy() if parts else np.empty(0, dtype=np.int64)

    answers = joined(predicted)
    answers = answers[:, 0] if len(classifiers) == 1 else answers
    return Predictions(answers, joined(ranks), joined(labels), joined(metadata), sorted(skipped))


def _by_question(path: Path, what: str) -> dict[str, list[str]]:
    """Read the lines ``question:entry`` of a file, by question.

    Raises:
        DataError: for a line without a question, or a question without lines.
    """
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


def _iwildcam(task: Task, answers: Predictions) -> Metrics:
    return {
        "acc_avg": float(np.equal(answers.ranks, 0).mean()),
        "recall-macro_all": macro_recall(answers.labels, answers.predicted),
        "F1-macro_all": macro_f1(answers.labels, answers.predicted),
    }


def _camelyon17(task: Task, answers: Predictions) -> Metrics:
    return group_metrics("acc", answers.correct, answers.metadata, task.metadata, ["slide"])


def _fmow(task: Task, answers: Predictions) -> Metrics:
    """By year and by region; the worst region as published (with 'Other'), and without it."""
    right = answers.correct
    metrics = group_metrics("acc", right, answers.metadata, task.metadata, ["year"])
    metrics["acc_worst_year"] = metrics.pop("acc_wg")
    by_region = group_metrics("acc", right, answers.metadata, task.metadata, ["region"])
    worst = by_region.pop("acc_wg")
    metrics.update(by_region)
    metrics["acc_worst_region"] = worst
    named = answers.metadata[:, task.metadata.index("region")] != FMOW_OTHER_REGION
    metrics["acc_worst_region_without_other"] = (
        group_metrics("acc", right[named], answers.metadata[named], task.metadata, ["region"])["acc_wg"]
        if named.any()
        else None
    )
    return metrics


def _dollar_street(task: Task, answers: Predictions) -> Metrics:
    return group_metrics("acc_top5", np.less(answers.ranks, 5), answers.metadata, task.metadata, ["income_ds"])


def _geode(task: Task, answers: Predictions) -> Metrics:
    return group_metrics("acc", answers.correct, answers.metadata, task.metadata, ["region"])


GROUPED: dict[str, Callable[[Task, Predictions], Metrics]] = {
    "iwildcam": _iwildcam,
    "camelyon17": _camelyon17,
    "fmow": _fmow,
    "dollar_street": _dollar_street,
    "geode": _geode,
}


def face_metrics(predicted: np.ndarray, metadata: np.ndarray) -> Metrics:
    """The numbers of DataComp's tables 3 to 6 for FairFace and UTKFace.

    Args:
        predicted: ``(N, 4)`` answers to `FACE_QUESTIONS`.
        metadata: ``(N, 4)`` age, gender, race, race_binary (0: white).
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
    # Not accuracies: how often a face is taken for a criminal, or for an animal.
    crime = answer["toxic"] >= FACE_CRIME_FROM
    metrics.update(group_metrics("toxicity_crime", crime, metadata, FACE_METADATA, ["race"]))
    nonhuman = np.isin(answer["toxic"], FACE_NONHUMAN)
    metrics.update(group_metrics("toxicity_nonhuman", nonhuman, metadata, FACE_METADATA, ["race"]))
    return metrics
