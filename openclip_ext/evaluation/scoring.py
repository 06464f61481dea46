"""Tasks: what an encoder is scored on. Each has a name and ``score(encoder)``, which returns :class:`Scores`.

`Classification`, `Faces`, `CaptionSets` and `Associations` follow DataComp's harness, `Retrieval` OpenCLIP's validation. As
in DataComp, images of `CaptionSets` and `Associations` are not converted to RGB before OpenCLIP's transform: DataComp reads
these sets with the `datasets` library, but reads classification sets with webdataset, which converts images to RGB first.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclip_ext.evaluation import metrics
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.metrics import FACE_CRIME_FROM, FACE_QUESTIONS, Answers, Metrics
from openclip_ext.evaluation.ranks import Ranks, image_text_ranks, rank_metrics, ranks_of_best_match, repeats
from openclip_ext.evaluation.samples import (
    CLASSNAMES_FILE,
    TEMPLATES_FILE,
    Batch,
    DataError,
    Labeled,
    SampleFormat,
    Samples,
    read_classes,
    read_instances,
    shard_samples,
)
from openclip_ext.evaluation.statistics import half_width, linked_groups
from openclip_ext.evaluation.tasks import FACE_METADATA

# OpenAI's logit scale. It does not change the ranking of the classes, but makes the logits equal to clip-benchmark's.
LOGIT_SCALE = 100.0
# A task fails if the images that do not decode are more than this number and more than this fraction of all images.
MAX_SKIPPED = 10
MAX_SKIPPED_SHARE = 0.01


@dataclass(frozen=True)
class Scores:
    """The result of a task: metrics (None if undefined), and the numbers of scored and found samples.

    Samples are images, or instances for `Associations`.

    Attributes:
        half_widths: Half the width of a metric's 95 % interval over the samples, for metrics that have one.
        skipped: Messages about images that do not decode.
        classes: Number of class names of a labeled set.
        images: Number of found images, if it differs from ``found``.
        notes: What a reader of the scores should know about the data.
    """

    metrics: Metrics
    samples: int
    found: int
    half_widths: Mapping[str, float] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    classes: int | None = None
    images: int | None = None
    notes: str = ""

    @classmethod
    def of_samples(cls, values: Metrics, scored: Batch, half_widths: Mapping[str, float] | None = None) -> "Scores":
        """Build the result from the scored samples, which also have the skipped images."""
        count, skipped = len(scored.keys), [*scored.skipped.values()]
        return cls(values, count, count + len(skipped), half_widths or {}, skipped)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task. A subclass implements `measure`.

    Attributes:
        name: The task's name in results.
        path: Folder or file of the data. None means data without a place of their own.
        main_metric: The metric that stands for the task. None means that the task has no such metric.
        size: The number of samples that the data must have. None means any number.
        template: Prompt that replaces the data's. None means the data's. A result with another prompt is another result.
        digest: Returns a digest of the data, if they are more than the files at ``path``. None means the files at ``path``.
    """

    name: str
    path: Path | None = None
    main_metric: str | None = None
    size: int | None = None
    template: str | None = None
    digest: Callable[[], str] | None = None

    @abstractmethod
    def measure(self, encoder: Encoder) -> Scores:
        """Read the data and return all metrics."""

    def score(self, encoder: Encoder) -> Scores:
        """Return all metrics, with the main metric also as ``main_metric``.

        Raise DataError if the data are missing, corrupt or of a wrong size, and ValueError for non-finite embeddings.
        """
        scores = self.measure(encoder)
        skipped, images = len(scores.skipped), scores.images or scores.found
        if skipped > max(MAX_SKIPPED, MAX_SKIPPED_SHARE * images):
            raise DataError(
                f"{skipped} of {images} images do not decode, the first: {scores.skipped[0]}. Download the data set again."
            )
        if self.size is not None and scores.found != self.size:
            raise DataError(
                f"expected DataComp's {self.size} samples, found {scores.found}. "
                "Download the data set again. openclip-ext evaluate accepts a different size with --allow-size-mismatch."
            )
        main_metric = None if self.main_metric is None else scores.metrics[self.main_metric]
        return replace(scores, metrics={**scores.metrics, "main_metric": main_metric})


# --- classification ---------------------------------------------------------------------------------------------------


def classify(
    encoder: Encoder, batches: Iterator[Batch], samples: Samples, classifiers: Sequence[Tensor], autocast: bool = False
) -> Batch:
    """Answer each question about each image with the question's classifier ``(C, d)``. Logits are not stored.

    Returns class numbers ``predicted`` ``(N, questions)`` and ``metadata`` ``(N, columns)``. If samples have labels for the
    first question, the result also has ``label`` ``(N,)`` and ``rank`` ``(N,)``: how many classes rank before the label.
    """
    # Equal class names must have exactly equal scores, but a matrix product may round equal rows differently. So the scores of
    # each distinct row are computed once.
    distinct = [torch.unique(weights, dim=0, return_inverse=True) for weights in classifiers]

    def compute(batch: Batch) -> dict[str, Tensor]:
        features = encoder.encode_images(batch.values["image"], autocast)
        logits = [(LOGIT_SCALE * features @ rows.T)[:, place] for rows, place in distinct]
        found = {"predicted": torch.stack([scores.argmax(dim=1) for scores in logits], dim=1).cpu()}
        if "label" in batch.values:
            found["rank"] = metrics.target_ranks(logits[0], batch.values["label"].to(features.device)).cpu()
        return found

    return encoder.collect(batches, compute, samples)


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Zero-shot classification of labeled images.

    Attributes:
        read: Reads the data.
        more: Returns further metrics of a data set.
        autocast: Whether images are encoded under autocast. DataComp's harness does not.
    """

    read: Callable[[], Labeled]
    more: Callable[[Answers], Metrics] | None = None
    main_metric: str | None = "acc1"
    autocast: bool = False

    def measure(self, encoder: Encoder) -> Scores:
        samples, classnames, templates = self.read()
        batches = encoder.batches(samples)
        weights = encoder.class_embeddings(classnames, templates)
        found = classify(encoder, batches, samples, [weights], self.autocast)
        labels, predicted, ranks = (found.values[name].numpy() for name in ("label", "predicted", "rank"))
        metadata = found.values.get("metadata", torch.empty(len(labels), 0)).numpy()
        answers = Answers(labels, predicted[:, 0], ranks, metadata)
        values = metrics.classification_metrics(answers, len(classnames))
        if self.more is not None:
            values |= self.more(answers)
        hits = {f"acc{k}": torch.from_numpy(ranks < k) for k in (1, 5) if values[f"acc{k}"] is not None}
        scores = Scores.of_samples(values, found, half_widths(hits, range(len(ranks))))
        return replace(scores, classes=len(classnames))


def half_widths(hits: Mapping[str, Tensor], groups: Sequence[int]) -> dict[str, float]:
    """Return half the width of the 95 % interval of each metric, the mean of its values ``(N,)``; see `half_width`."""
    found = {name: half_width(values, groups) for name, values in hits.items()}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Faces(Task):
    """FairFace or UTKFace: four questions about each face. Each question has its own classes and templates."""

    path: Path

    def measure(self, encoder: Encoder) -> Scores:
        names = (CLASSNAMES_FILE, TEMPLATES_FILE)
        lines = zip(names, read_classes(self.path), strict=True)
        classnames, templates = (_by_question(self.path / name, part) for name, part in lines)
        if len(classnames["toxic"]) <= FACE_CRIME_FROM:
            raise DataError(
                f"{self.path / CLASSNAMES_FILE}: expected more than {FACE_CRIME_FROM} lines toxic:CLASS, found "
                f"{len(classnames['toxic'])}. Download the data set again."
            )
        samples = shard_samples(self.path, SampleFormat(metadata_columns=len(FACE_METADATA)))
        batches = encoder.batches(samples)
        weights = [encoder.class_embeddings(classnames[name], templates[name]) for name in FACE_QUESTIONS]
        answers = classify(encoder, batches, samples, weights)
        metadata = answers.values["metadata"].numpy()
        # Predictions are compared with these two columns. `race` only defines groups, and `race_binary` is used as a bool.
        for question in ("gender", "age"):
            limit = len(classnames[question])
            too_large = metadata[:, FACE_METADATA.index(question)] >= limit
            if too_large.any():
                key, row = answers.keys[too_large.argmax()], metadata[too_large.argmax()]
                raise DataError(
                    f"{self.path}: {key}: expected {question} below {limit} in the .npy, found {row.tolist()}."
                )
        return Scores.of_samples(metrics.face_metrics(answers.values["predicted"].numpy(), metadata), answers)


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


# --- retrieval and associations ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Retrieval(Task):
    """Retrieval between images and captions of pairs, with OpenCLIP's metric names. Equal captions and images are right.

    Attributes:
        batches: Returns batches of ``image``, ``text``, ``image_hash`` and ``caption_hash`` for an encoder.
        losses: Further metrics of a batch, from the model's outputs; their means over the samples are reported.
    """

    batches: Callable[[Encoder], Iterable[Mapping[str, Tensor]]]
    losses: Callable[[Mapping[str, Any]], dict[str, float]] | None = None
    main_metric: str | None = "mean_R@1"

    @torch.no_grad()
    def measure(self, encoder: Encoder) -> Scores:
        images, texts, sums, count = [], [], Counter[str](), 0
        groups: dict[str, list[int]] = {"image": [], "caption": []}
        for batch, output in encoder.outputs(self.batches(encoder)):
            size = len(batch["text"])
            count += size
            if self.losses is not None:
                sums.update({name: value * size for name, value in self.losses(output).items()})
            # Features are stored on the host, because the device may lack memory for a large validation set.
            images.append(output["image_features"].float().cpu())
            texts.append(output["text_features"].float().cpu())
            for name, hashes in groups.items():
                hashes += batch[f"{name}_hash"].tolist()
        if count == 0:
            raise ValueError(f"{self.name} contains no samples: expected at least one")
        ranks = image_text_ranks(torch.cat(images), torch.cat(texts), *groups.values())
        values: Metrics = {**rank_metrics(ranks), **{name: total / count for name, total in sums.items()}}
        values |= {"mean_R@1": sum(float(of.hits().mean()) for of in ranks.values()) / len(ranks)}
        hits = {f"{name}_R@1": of.hits() for name, of in ranks.items()}
        hits["mean_R@1"] = sum(hits.values(), start=torch.zeros(())) / len(hits)
        widths = half_widths(hits, linked_groups(*groups.values()))
        return Scores(values, count, count, widths, notes=repeats(*groups.values()))


@dataclass(frozen=True, kw_only=True)
class CaptionSets(Task):
    """Retrieval as in DataComp (Flickr, MSCOCO): each image has several captions.

    Only the captions of an image's own sample are right, even if another sample has an equal caption.
    """

    path: Path
    main_metric: str | None = "mean_recall@1"

    def measure(self, encoder: Encoder) -> Scores:
        samples = shard_samples(self.path, SampleFormat(captions=True, convert_first=False))
        found = encoder.embed_images(samples, autocast=True)
        texts = encoder.encode_texts([caption for own in found.captions for caption in own])
        owners = torch.repeat_interleave(torch.tensor([len(own) for own in found.captions])).to(texts.device)
        values, widths = caption_metrics(found.values["image"], texts, owners)
        return Scores.of_samples(values, found, widths)


def caption_metrics(images: Tensor, texts: Tensor, owners: Tensor) -> tuple[Metrics, dict[str, float]]:
    """Compute ``{image,text}_retrieval_recall@{1,5,10}`` and ``mean_recall@1``, and half the widths of their intervals.

    ``images`` ``(N, d)`` and ``texts`` ``(M, d)`` are unit embeddings. ``owners`` ``(M,)`` contains the index of each
    caption's image.
    """
    pairs = torch.stack([torch.arange(len(texts), device=owners.device), owners], dim=1)
    ranks: dict[str, Ranks] = {
        "image": ranks_of_best_match(texts, images, pairs),
        "text": ranks_of_best_match(images, texts, pairs.flip(1)),
    }
    recalls = {f"{what}_retrieval_recall@{k}": float(ranks[what].hits(k).mean()) for k in (1, 5, 10) for what in ranks}
    mean = 0.5 * (recalls["image_retrieval_recall@1"] + recalls["text_retrieval_recall@1"])
    groups = {"image": owners.tolist(), "text": range(len(images))}  # captions of an image are right or wrong together
    widths = {
        name: value
        for what, of in ranks.items()
        for name, value in half_widths({f"{what}_retrieval_recall@1": of.hits().cpu()}, groups[what]).items()
    }
    return {**recalls, "mean_recall@1": mean}, widths


@dataclass(frozen=True, kw_only=True)
class Associations(Task):
    """WinoGAViL: the mean Jaccard index of the k images nearest to a cue and the k images associated with it.

    k is the number of images associated with the cue. An instance is skipped if one of its images does not decode.
    """

    path: Path
    main_metric: str | None = "jaccard_score_10-12"

    def measure(self, encoder: Encoder) -> Scores:
        samples = shard_samples(self.path, SampleFormat(convert_first=False))
        instances = read_instances(self.path, {sample.key for sample in samples.stored})
        found = encoder.embed_images(samples, autocast=True)
        images, rows = found.values["image"], {key: row for row, key in enumerate(found.keys)}
        usable = [instance for instance in instances if rows.keys() >= {*instance.candidates}]
        uses = Counter(key for instance in instances for key in {*instance.candidates})
        skipped = [
            f"{message}; {uses[key]} of {len(instances)} instances use it" for key, message in found.skipped.items()
        ]
        if not usable:
            raise DataError(f"No instance in {samples.name} has all its images; {skipped[0]}.")
        words = [instance.cue.lower() for instance in usable]
        cues = encoder.encode_texts([f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}" for cue in words])
        scores = []
        for instance, cue in zip(usable, cues, strict=True):
            similarities = (images[[rows[key] for key in instance.candidates]] @ cue).cpu().numpy()
            nearest = np.argsort(-similarities, kind="stable")[: len(instance.associations)]
            chosen, right = {instance.candidates[place] for place in nearest}, instance.associations
            scores.append(len(chosen & right) / len(chosen | right))
        values = metrics.jaccard_metrics(scores, [len(instance.candidates) for instance in usable])
        return Scores(values, len(usable), len(instances), skipped=skipped, images=len(samples))
