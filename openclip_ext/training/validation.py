"""Evaluation during training: the evaluators' interface, their creation from flags, and OpenCLIP's validation."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.format import load_model_file
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.model import symmetric_cross_entropy
from openclip_ext.data.loader.build import build_eval_loader, check_csv
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.sources.source import Source
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.embeddings import outputs_of
from openclip_ext.evaluation.imagenet import TOP_K, ImageNetZeroShot, imagenet_loader, top_name
from openclip_ext.evaluation.ranks import IMAGE_TO_TEXT, TEXT_TO_IMAGE, Ranks, image_text_ranks, repeats
from openclip_ext.evaluation.statistics import half_width, linked_groups
from openclip_ext.evaluation.tasks import GROUPS, select_tasks
from openclip_ext.evaluation.training_log import SUITE_PREFIX
from openclip_ext.files import json_lines
from openclip_ext.training.config import EvaluationConfig, StepConfig
from openclip_ext.training.model import BuiltModel

logger = get_logger(__name__)

RECALL_AT = (1, 5, 10)
RECALLS = tuple(f"{direction}_R@{k}" for direction in (IMAGE_TO_TEXT, TEXT_TO_IMAGE) for k in RECALL_AT)
# If a metric's name contains one of these words, smaller values are better.
_LESS_IS_BETTER = ("loss", "rank")
# Names of a column with classes in the CSV file of --val-classes.
_CLASS_COLUMNS = ("label", "class")
CLASS_ACCURACY = "classes_accuracy"
KEPT = "kept_"  # prefix of the metrics of the held-out --keep-data


class Evaluator(Protocol):
    """Interface of the evaluations that the trainer runs."""

    @property
    def name(self) -> str:
        """The evaluator's name in messages."""
        ...

    def run(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of an unwrapped model in evaluation mode. Only rank 0 calls it."""
        ...


# An evaluator, and its interval in epochs. An interval of 0 means that it never runs.
ScheduledEvaluator = tuple[Evaluator, int]


def build_evaluators(
    config: EvaluationConfig, built: BuiltModel, step: StepConfig, held_out: Source | None = None
) -> list[ScheduledEvaluator]:
    """Build the evaluators for the flags, in OpenCLIP's order. On ranks other than 0, return an empty list.

    ``held_out`` contains the held-out pairs of ``--keep-data``, if any.
    """
    if not distributed.is_master():
        return []
    evaluators: list[ScheduledEvaluator] = []
    folders = ("imagenet", "--imagenet-val", config.imagenet_val), ("imagenetv2", "--imagenet-v2", config.imagenet_v2)
    imagenet = {
        name: imagenet_loader(flag, folder, built.preprocess_val, config.batch_size, config.workers)
        for name, flag, folder in folders
        if folder is not None
    }
    if imagenet:
        zero_shot = ImageNetZeroShot(imagenet, built.tokenizer, built.device, step.precision)
        evaluators.append((zero_shot, config.imagenet_every))
    loading: dict[str, Any] = {"batch_size": config.batch_size, "workers": config.workers}
    loading |= {"preprocess": built.preprocess_val, "tokenizer": built.tokenizer}
    if config.val_data is not None:
        validation = Validation(build_eval_loader(config.val_data, **loading), built.device, step.precision)
        evaluators.append((validation, config.val_every))
    if config.class_data is not None:
        classes = build_class_loader(config.class_data, **loading)
        evaluators.append((ClassValidation(classes, built.device, step.precision), config.val_every))
    if held_out is not None:
        kept = KeptValidation(EvalLoader(held_out, **loading), built.device, step.precision)
        evaluators.append((kept, config.val_every))
    if config.suite is not None and config.suite_data is not None:
        try:
            from openclip_ext.evaluation.suite import build_suite
        except ImportError as error:
            raise UsageError(f"--eval-suite needs {error.name}: pip install 'openclip_ext[eval]'") from error
        suite = build_suite(config.suite, config.suite_data, device=built.device, **loading)
        evaluators += [(evaluator, config.suite_every) for evaluator in suite]
    return evaluators


def build_class_loader(spec: DataSpec, *, tokenizer: Callable[[list[str]], Tensor], **loading: Any) -> EvalLoader:
    """Build the loader of ``--val-classes``: the caption of an image is its class, encoded with ``--caption-template``."""
    template = spec.caption_template

    def tokenize_classes(names: list[str]) -> Tensor:
        return tokenizer([template.replace("{}", name) for name in names])

    return build_eval_loader(class_spec(spec), tokenizer=tokenize_classes, **loading)


def class_spec(spec: DataSpec) -> DataSpec:
    """Return how to read the images and classes of ``--val-classes``. Raise ValueError if the data cannot be read."""
    plain = replace(spec, caption_template="{}")
    if plain.resolved_type == "csv":
        for column in _CLASS_COLUMNS:
            named = replace(plain, csv_caption_key=column)
            with contextlib.suppress(ValueError):
                check_csv(named)
                return named
    return plain


def metric_names(config: EvaluationConfig, is_captioner: bool) -> list[str]:
    """Return the names of the metrics of the evaluations that run during training.

    For ``--eval-suite``, the names include tasks whose data may be missing.
    """
    names: list[str] = []
    if config.val_data is not None and config.val_every > 0:
        names += [*retrieval_metrics(torch.eye(2), torch.eye(2)), "clip_val_loss", "num_samples"]
        names += ["val_generative_loss"] * is_captioner
    if config.val_every > 0:
        names += [CLASS_ACCURACY] if config.class_data is not None else []
        names += list(KeptValidation.chosen(dict.fromkeys(RECALLS, 0.0))) if config.scores_kept else []
    if config.imagenet_every > 0:
        folders = {"imagenet": config.imagenet_val, "imagenetv2": config.imagenet_v2}
        names += [top_name(name, k) for name, folder in folders.items() if folder is not None for k in TOP_K]
    if config.suite is not None and config.suite_every > 0:
        names += [SUITE_PREFIX + task.key for task in select_tasks([config.suite])]
        names += [f"{SUITE_PREFIX}average/{title}" for title in GROUPS]
    return names


def run_evaluators(evaluators: Iterable[Evaluator], model: nn.Module, must_succeed: bool = False) -> dict[str, float]:
    """Run evaluators. If one fails, log the error and omit its metrics, or raise the error if ``must_succeed``."""
    model = compat.unwrap(model)
    was_training = model.training
    model.eval()
    metrics: dict[str, float] = {}
    try:
        for evaluator in evaluators:
            try:
                metrics.update(evaluator.run(model))
            except Exception:
                if must_succeed:
                    raise
                logger.exception(f"The evaluation {evaluator.name} failed; training continues without it.")
    finally:
        model.train(was_training)
    return metrics


class Score(NamedTuple):
    """The mean of the samples' scores in [0, 1], half the width of its 95 % interval (or None), and the number of samples."""

    value: float
    half: float | None
    samples: int


@dataclass(frozen=True)
class Validation:
    """OpenCLIP's validation on ``--val-data``: loss, ranks and recall, with OpenCLIP's metric names.

    Subclasses select other metrics and directions of retrieval.
    """

    loader: Iterable[dict[str, Tensor]]
    device: torch.device
    precision: str = "fp32"
    name: ClassVar[str] = "validation"
    title: ClassVar[str] = "own pairs, R@1"  # of the score
    flag: ClassVar[str] = "--val-data"
    is_own: ClassVar[bool] = True  # whether training should raise the score, or keep it
    directions: ClassVar[Sequence[str]] = (IMAGE_TO_TEXT, TEXT_TO_IMAGE)  # the score is the mean of their R@1
    _logged: set[str] = field(
        default_factory=set, init=False, compare=False
    )  # so that each evaluation does not repeat it

    def run(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics of a model in evaluation mode."""
        return self.measure(model)[0]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[dict[str, float], Score]:
        """Return the metrics and the score of a model in evaluation mode."""
        images, texts, losses, caption_losses, count = [], [], 0.0, 0.0, 0
        groups: dict[str, list[int]] = {"image": [], "caption": []}
        for batch, output in outputs_of(model, self.loader, self.precision, self.device):
            size = len(batch["text"])
            image, text = output["image_features"].float(), output["text_features"].float()
            logits = output["logit_scale"].float() * image @ text.T
            losses += float(symmetric_cross_entropy(logits)) * size
            if "logits" in output and "labels" in output:  # CoCa's captions
                caption_losses += float(F.cross_entropy(output["logits"].float().mT, output["labels"])) * size
            count += size
            # Features are stored on the host, because the device may lack memory for a large validation set.
            images.append(image.cpu())
            texts.append(text.cpu())
            for name, hashes in groups.items():
                hashes += batch[f"{name}_hash"].tolist()
        if count == 0:
            raise ValueError(f"{self.flag} contains no samples: expected at least one")
        if (repeated := repeats(*groups.values())) not in ("", *self._logged):
            logger.info(f"{count:,} samples of {self.flag} have {repeated}.")
            self._logged.add(repeated)
        found = image_text_ranks(torch.cat(images), torch.cat(texts), *groups.values())
        metrics = metrics_of_ranks(found) | {"clip_val_loss": losses / count, "num_samples": count}
        metrics |= {"val_generative_loss": caption_losses / count} if caption_losses else {}
        hits = torch.stack([found[direction].hits() for direction in self.directions]).mean(dim=0).cpu()
        names = [groups["image"]] if self.directions == (IMAGE_TO_TEXT,) else [*groups.values()]
        score = Score(float(hits.mean()), half_width(hits, linked_groups(*names)), count)
        return self.chosen(metrics), score

    @staticmethod
    def chosen(metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to log, by their names in the log."""
        return dict(metrics)


class KeptValidation(Validation):
    """Retrieval among the held-out pairs of ``--keep-data``, which shows what the model keeps."""

    name, title, flag, is_own = "kept", "kept pairs, R@1", "held-out --keep-data", False

    @staticmethod
    def chosen(metrics: Mapping[str, float]) -> dict[str, float]:
        return {KEPT + name: metrics[name] for name in RECALLS}


class ClassValidation(Validation):
    """Zero-shot classification of ``--val-classes``: whether the class of an image, as caption, is nearest to the image."""

    name, title, flag, directions = "classes", "own classes, accuracy", "--val-classes", (IMAGE_TO_TEXT,)

    @staticmethod
    def chosen(metrics: Mapping[str, float]) -> dict[str, float]:
        return {CLASS_ACCURACY: metrics[f"{IMAGE_TO_TEXT}_R@1"]}


def retrieval_metrics(
    image_features: Tensor,
    text_features: Tensor,
    image_groups: Sequence[int] | None = None,
    caption_groups: Sequence[int] | None = None,
) -> dict[str, float]:
    """Compute the mean and median rank (from 1) and the recall of paired items, from images to texts and from texts to images.

    Row ``i`` of both tensors is a pair. Metrics have OpenCLIP's names (``image_to_text_R@1``, ...). Groups have equal values
    for equal images and for equal captions, see :func:`image_text_ranks`. None (default) means that all rows differ. Items of
    equal similarity are in random order: ranks are expected ranks, and recall is the probability of a hit.
    """
    rows = range(len(image_features))
    found = image_text_ranks(
        image_features,
        text_features,
        rows if image_groups is None else image_groups,
        rows if caption_groups is None else caption_groups,
    )
    return metrics_of_ranks(found)


def metrics_of_ranks(found: Mapping[str, Ranks]) -> dict[str, float]:
    """Compute the metrics of :func:`retrieval_metrics` from the ranks in each direction."""
    metrics = {}
    for name, ranks in found.items():
        expected = ranks.mean()
        metrics[f"{name}_mean_rank"] = float(expected.mean()) + 1
        metrics[f"{name}_median_rank"] = math.floor(float(expected.quantile(0.5))) + 1
        for k in RECALL_AT:
            metrics[f"{name}_R@{k}"] = float(ranks.hits(k).mean())
    return metrics


def is_best(metrics: dict[str, float], metric: str, folder: Path, epoch: int) -> bool:
    """Return whether an evaluation is better than the model in ``best.pt``, whose metric is in ``results.jsonl``.

    Without such a model, every evaluation is better. For losses and ranks, smaller is better. For other metrics, larger is
    better. Return False if ``metrics`` is empty.

    Args:
        folder: The run's ``checkpoints/``.
        epoch: Number of completed epochs of the evaluated model.
    """
    if not metrics:
        return False
    if metric not in metrics:
        logger.warning(f"--keep-best {metric}: no such metric in this evaluation, found: {', '.join(metrics)}")
        return False
    sign = -1 if any(word in metric for word in _LESS_IS_BETTER) else 1
    # An earlier evaluation may be better, but if its model could not be saved, it must not prevent this save.
    saved = None
    with contextlib.suppress(UsageError):
        saved = load_model_file(folder / "best.pt", mmap=True)["epoch"]
    lines = [line for line in json_lines.read(folder / "results.jsonl") if line.get("epoch", epoch) < epoch]
    best = [
        sign * line[metric] for line in lines if line["epoch"] == saved and isinstance(line.get(metric), int | float)
    ]
    value = sign * metrics[metric]
    return not math.isnan(value) and all(value > other or math.isnan(other) for other in best)
