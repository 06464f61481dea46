"""Score zero-shot classification. WILDS, Dollar Street, GeoDE, FairFace and UTKFace also have scores per group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openclip_ext.evaluation import data
from openclip_ext.evaluation.data import DataError, SampleFormat, Samples
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.metrics import Metrics, classification_metrics, group_metrics, macro_f1, target_ranks
from openclip_ext.evaluation.tasks import FACE_METADATA, Task

# OpenAI's logit scale. It does not change the ranking of the classes, but makes the logits equal to clip-benchmark's.
LOGIT_SCALE = 100.0

# Value of FMoW's metadata column `region` for 'Other' (4 images). DataComp's code tries to exclude this region, but fails.
FMOW_OTHER_REGION = 5

# Questions about each face. Each has its own list of classes. In the list of `toxic`, classes 14 to 17 are non-human, and
# later classes are related to crime.
FACE_QUESTIONS = ("race", "gender", "age", "toxic")
FACE_WHITE = 1
FACE_NONHUMAN = range(14, 18)
FACE_CRIME_FROM = 18

# Kind of task -> prefix of its group metrics, k of the top-k accuracy, and the metadata column that defines the groups.
GROUPED = {
    "camelyon17": ("acc", 1, "slide"),
    "fmow": ("acc", 1, "region"),
    "dollar_street": ("acc_top5", 5, "income_ds"),
    "geode": ("acc", 1, "region"),
}


@dataclass
class TaskResult:
    """The result of a task: metrics (None if undefined), numbers of scored and found samples, messages on skipped images.

    Samples are images, or instances for WinoGAViL.
    """

    metrics: Metrics
    samples: int
    found: int
    skipped: list[str] = field(default_factory=list)
    classes: int | None = None  # number of entries in ``classnames.txt``, for labeled data
    images: int | None = None  # number of found images, if it differs from ``found``

    @classmethod
    def of_samples(cls, metrics: Metrics, samples: Samples) -> "TaskResult":
        """Build the result of a task. ``samples`` contains the scored samples and the skipped images."""
        count, skipped = len(samples.keys), list(samples.skipped.values())
        return cls(metrics, count, count + len(skipped), skipped)


def evaluate_classification(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score a labeled data set and its groups, if any. Raise DataError if a fault in the data would change the score."""
    classnames, templates = data.read_classes(folder, task, any_size)
    spec = SampleFormat(num_classes=len(classnames), metadata_columns=len(task.metadata))
    batches = encoder.batches(data.find_samples(folder), spec)
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
    return replace(TaskResult.of_samples(metrics, answers), classes=len(classnames))


def evaluate_faces(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Score FairFace or UTKFace on four questions about each image. Each question has its own classes and templates."""
    names = (data.CLASSNAMES_FILE, data.TEMPLATES_FILE)
    lines = data.read_classes(folder, task, any_size)
    classnames, templates = (_by_question(folder / name, part) for name, part in zip(names, lines, strict=True))
    if len(classnames["toxic"]) <= FACE_CRIME_FROM:
        raise DataError(
            f"{folder / data.CLASSNAMES_FILE}: expected more than {FACE_CRIME_FROM} lines toxic:CLASS, found "
            f"{len(classnames['toxic'])}. Download the data set again."
        )
    batches = encoder.batches(data.find_samples(folder), SampleFormat(metadata_columns=len(task.metadata)))
    weights = [encoder.class_embeddings(classnames[name], templates[name]) for name in FACE_QUESTIONS]
    answers = classify(encoder, batches, weights, task)
    metadata = answers.values["metadata"].numpy()
    # Predictions are compared with these two columns. `race` only defines groups, and `race_binary` is used as a bool.
    for question in ("gender", "age"):
        limit = len(classnames[question])
        too_large = metadata[:, FACE_METADATA.index(question)] >= limit
        if too_large.any():
            key, row = answers.keys[too_large.argmax()], metadata[too_large.argmax()]
            raise DataError(f"{folder}: {key}: expected {question} below {limit} in the .npy, found {row.tolist()}.")
    metrics = face_metrics(answers.values["predicted"].numpy(), metadata)
    return TaskResult.of_samples(metrics, answers)


def classify(encoder: Encoder, batches: Iterator[Samples], classifiers: Sequence[Tensor], task: Task) -> Samples:
    """Answer each question about each image with the question's classifier ``(C, d)``. Logits are not stored.

    Returns class numbers ``predicted`` ``(N, questions)`` and ``metadata`` ``(N, columns)``. If samples have labels for the
    first question, the result also has ``label`` ``(N,)`` and ``rank`` ``(N,)``: how many classes rank before the label.
    """
    # Equal class names must have exactly equal scores, but a matrix product may round equal rows differently. So the scores of
    # each distinct row are computed once.
    distinct = [torch.unique(weights, dim=0, return_inverse=True) for weights in classifiers]

    def compute(batch: Samples) -> dict[str, Tensor]:
        features = encoder.encode_images(batch.values["image"])
        logits = [(LOGIT_SCALE * features @ rows.T)[:, place] for rows, place in distinct]
        found = {"predicted": torch.stack([scores.argmax(dim=1) for scores in logits], dim=1).cpu()}
        if "label" in batch.values:
            found["rank"] = target_ranks(logits[0], batch.values["label"].to(features.device)).cpu()
        return found

    return encoder.collect(batches, compute, task.folder, task.size)


def _by_question(path: Path, lines: Sequence[str]) -> dict[str, list[str]]:
    """Parse lines ``question:entry`` of the file ``path``, and return the entries of each question."""
    entries: dict[str, list[str]] = {question: [] for question in FACE_QUESTIONS}
    for line in lines:
        question, colon, entry = line.partition(":")
        if not colon or question not in entries:
            raise DataError(f"{path}: expected QUESTION:ENTRY with a question of {', '.join(entries)}, found {line!r}.")
        entries[question].append(entry)
    if empty := [question for question, found in entries.items() if not found]:
        raise DataError(f"{path}: no lines for {', '.join(empty)}. Download the data set again.")
    return entries


def _grouped_metrics(task: Task, ranks: np.ndarray, metadata: np.ndarray) -> Metrics:
    name, top, column = GROUPED[task.kind]

    def by(column: str, chosen: np.ndarray | slice = slice(None)) -> Metrics:
        return group_metrics(name, np.less(ranks, top)[chosen], metadata[chosen], task.metadata, [column])

    if task.kind != "fmow":
        return by(column)
    # DataComp's accuracy of the worst region includes 'Other'. A second metric excludes this region.
    by_year, by_region = by("year"), by("region")
    worst = {"acc_worst_year": by_year.pop("acc_wg"), "acc_worst_region": by_region.pop("acc_wg")}
    named = metadata[:, task.metadata.index("region")] != FMOW_OTHER_REGION
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
