"""Evaluation during training: the tasks that the flags select, and OpenCLIP's validation."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.format import load_model_file
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.model import symmetric_cross_entropy
from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.sources.source import Source
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.ranks import IMAGE_TO_TEXT, RECALL_AT, TEXT_TO_IMAGE, retrieval_metrics
from openclip_ext.evaluation.tasks import GROUPS, SUITE_PREFIX, select_tasks
from openclip_ext.files import json_lines
from openclip_ext.training.config import EvaluationConfig, StepConfig
from openclip_ext.training.model import BuiltModel

if TYPE_CHECKING:  # imported late, because most runs do not evaluate
    from openclip_ext.evaluation.encoder import Encoder
    from openclip_ext.evaluation.scoring import Classification, Task

logger = get_logger(__name__)

TOP_K = (1, 5)  # of ImageNet's accuracies
RECALLS = tuple(f"{direction}_R@{k}" for direction in (IMAGE_TO_TEXT, TEXT_TO_IMAGE) for k in RECALL_AT)
CLASS_ACCURACY = "classes_accuracy"
KEPT = "kept_"  # prefix of the metrics of the held-out --keep-data
# If the name of a metric, except a kept one, contains one of these words, smaller values are better.
_LESS_IS_BETTER = ("loss", "rank")


class TrainingTask(Protocol):
    """A task that the trainer scores the live model on."""

    @property
    def name(self) -> str:
        """The task's name in messages."""
        ...

    def score(self, encoder: "Encoder") -> dict[str, float]:
        """Return the metrics to log. Only rank 0 calls it."""
        ...


@dataclass(frozen=True)
class Scheduled:
    """A task and its interval in epochs. An interval of 0 means that it never runs."""

    task: TrainingTask
    every: int
    encoder: "Callable[[nn.Module], Encoder]"  # makes the encoder of an unwrapped model in evaluation mode


def build_tasks(
    config: EvaluationConfig, built: BuiltModel, step: StepConfig, held_out: Source | None = None
) -> list[Scheduled]:
    """Build the tasks for the flags, in OpenCLIP's order. On ranks other than 0, return an empty list.

    ``held_out`` contains the held-out pairs of ``--keep-data``, if any.
    """
    if not distributed.is_rank0() or not config.frequencies:
        return []
    from openclip_ext.evaluation.encoder import Encoder, resolve_precision
    from openclip_ext.evaluation.open_tasks import datacomp_suite, imagenet_task

    loading: dict[str, Any] = {"batch_size": config.batch_size, "workers": config.workers}
    parts: dict[str, Any] = {"transform": built.preprocess_val, "tokenizer": built.tokenizer, "device": built.device}
    of_pairs = {"preprocess": built.preprocess_val, "tokenizer": built.tokenizer, **loading}
    live = partial(Encoder, **parts, **loading, autocast=step.precision)
    tasks = []
    folders = ("imagenet", "--imagenet-val", config.imagenet_val), ("imagenetv2", "--imagenet-v2", config.imagenet_v2)
    imagenet = {}
    for name, flag, folder in folders:
        if folder is not None:
            try:
                imagenet[name] = imagenet_task(name, folder)
            except ValueError as error:
                raise UsageError(f"{flag} {folder}: expected a folder of images for each class ({error})") from error
    if imagenet:
        tasks.append(Scheduled(ImageNet(imagenet), config.imagenet_every, live))
    if config.val_data is not None:
        tasks.append(Scheduled(Validation(build_eval_loader(config.val_data, **of_pairs)), config.val_every, live))
    if config.class_data is not None:
        names = ("classes", "own classes, accuracy", "--val-classes", CLASS_ACCURACY)
        tasks.append(Scheduled(OwnTask(class_task(config.class_data), *names), config.val_every, live))
    if held_out is not None:
        tasks.append(Scheduled(KeptValidation(EvalLoader(held_out, **of_pairs)), config.val_every, live))
    tasks += [Scheduled(kept_task(path), config.val_every, live) for path in config.kept_tasks]
    if config.suite is not None and config.suite_data is not None:
        suite = datacomp_suite(config.suite, config.suite_data)
        as_upstream = partial(Encoder, **parts, **loading, autocast=resolve_precision("datacomp", built.device))
        tasks.append(Scheduled(suite, config.suite_every, as_upstream))
    return tasks


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
        names += [KEPT + name for name in RECALLS] if config.scores_kept else []
        names += [kept_task(path).metric for path in config.kept_tasks]
    if config.imagenet_every > 0:
        folders = {"imagenet": config.imagenet_val, "imagenetv2": config.imagenet_v2}
        names += [top_name(name, k) for name, folder in folders.items() if folder is not None for k in TOP_K]
    if config.suite is not None and config.suite_every > 0:
        names += [SUITE_PREFIX + task.key for task in select_tasks([config.suite])]
        names += [f"{SUITE_PREFIX}average/{title}" for title in GROUPS]
    return names


def run_tasks(tasks: Iterable[Scheduled], model: nn.Module, must_succeed: bool = False) -> dict[str, float]:
    """Score a model on tasks. If one fails, log the error and omit its metrics, or raise the error if ``must_succeed``."""
    model = compat.unwrap(model)
    was_training = model.training
    model.eval()
    metrics: dict[str, float] = {}
    try:
        for scheduled in tasks:
            try:
                # Each encoder is new, because cached class embeddings belong to earlier weights.
                metrics.update(scheduled.task.score(scheduled.encoder(model)))
            except Exception:
                if must_succeed:
                    raise
                logger.exception(f"The evaluation {scheduled.task.name} failed; training continues without it.")
    finally:
        model.train(was_training)
    return metrics


class Score(NamedTuple):
    """The mean of the samples' scores in [0, 1], half the width of its 95 % interval (or None), and the number of samples."""

    value: float
    half: float | None
    samples: int


class ScoredTask(ABC):
    """A task on a user's data whose score shows what fine-tuning has gained or lost.

    Attributes:
        name: The task's name in messages and files.
        title: Title of the score.
        flag: The flag that names the data.
        is_own: Whether training should raise the score, or keep it.
    """

    name: str
    title: str
    flag: str
    is_own: bool = True

    @abstractmethod
    def measure(self, encoder: "Encoder") -> tuple[dict[str, float], Score]:
        """Return the metrics to log, and the score."""

    def score(self, encoder: "Encoder") -> dict[str, float]:
        return self.measure(encoder)[0]


@dataclass(frozen=True, eq=False)
class Validation(ScoredTask):
    """OpenCLIP's validation on ``--val-data``: loss, ranks and recall, with OpenCLIP's metric names."""

    name, title, flag = "validation", "own pairs, R@1", "--val-data"

    loader: Iterable[Mapping[str, Any]]
    _logged: set[str] = field(default_factory=set, init=False)  # so that no evaluation repeats it

    def measure(self, encoder: "Encoder") -> tuple[dict[str, float], Score]:
        from openclip_ext.evaluation.scoring import Retrieval

        task = Retrieval(name=self.flag, batches=lambda encoder: self.loader, losses=validation_losses)
        scores = task.score(encoder)
        if (repeated := scores.notes) not in ("", *self._logged):
            logger.info(f"{scores.samples:,} samples of {self.flag} have {repeated}.")
            self._logged.add(repeated)
        values = {name: value for name, value in scores.metrics.items() if value is not None}
        score = Score(values.pop("mean_R@1"), scores.half_widths.get("mean_R@1"), scores.samples)
        del values["main_metric"]
        return self.chosen({**values, "num_samples": scores.samples}), score

    @staticmethod
    def chosen(metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to log, by their names in the log."""
        return metrics


class KeptValidation(Validation):
    """Retrieval among the held-out pairs of ``--keep-data``, which shows what the model keeps."""

    name, title, flag, is_own = "kept", "kept pairs, R@1", "held-out --keep-data", False

    @staticmethod
    def chosen(metrics: dict[str, float]) -> dict[str, float]:
        return {KEPT + name: metrics[name] for name in RECALLS}


@dataclass(frozen=True, eq=False)
class OwnTask(ScoredTask):
    """A task of the evaluation whose main metric is the score, such as zero-shot classification (``--val-classes``)."""

    task: "Task"
    name: str
    title: str
    flag: str
    metric: str  # name of the score in the log
    is_own: bool = True

    def measure(self, encoder: "Encoder") -> tuple[dict[str, float], Score]:
        scores = self.task.score(encoder)
        _warn_skipped(self.flag, scores.skipped)
        value = scores.metrics["main_metric"]
        if value is None:
            raise ValueError(
                f"{self.flag} {self.task.name}: its {self.task.main_metric} is undefined for these samples"
            )
        half = scores.half_widths.get(self.task.main_metric or "")
        return {self.metric: value}, Score(value, half, scores.samples)


def _warn_skipped(name: str, skipped: Sequence[str]) -> None:
    if skipped:
        logger.warning(f"{name}: {len(skipped)} images do not decode, the first: {skipped[0]}")


def kept_task(path: str) -> OwnTask:
    """Return a task of ``--keep-tasks``; raise ValueError if the data are unknown."""
    from openclip_ext.evaluation.open_tasks import own_task

    task = own_task(path)
    name = f"{KEPT}{task.name}"  # the user's name may be that of another score, such as "classes"
    return OwnTask(task, name, f"kept {task.name}", f"--keep-tasks {task.name}", name, is_own=False)


def class_task(spec: DataSpec) -> "Classification":
    """Return the task of ``--val-classes``; raise ValueError if the data are no images with classes."""
    from openclip_ext.data.sources.keys import LABEL_COLUMNS
    from openclip_ext.evaluation.open_tasks import own_task
    from openclip_ext.evaluation.scoring import Classification

    task = own_task(str(spec.source), pairs=spec, labels_first=True)
    if not isinstance(task, Classification):
        columns = ", ".join(LABEL_COLUMNS)
        raise ValueError(f"{spec.source} has no classes: expected a folder for each class, or a column ({columns})")
    return task


def validation_losses(output: Mapping[str, Any]) -> dict[str, float]:
    """Return OpenCLIP's loss of a batch from the model's outputs, and for CoCa the loss of its captions."""
    image, text = output["image_features"].float(), output["text_features"].float()
    logits = output["logit_scale"].float() * image @ text.T
    losses = {"clip_val_loss": float(symmetric_cross_entropy(logits))}
    if "logits" in output and "labels" in output:
        losses["val_generative_loss"] = float(F.cross_entropy(output["logits"].float().mT, output["labels"]))
    return losses


@dataclass(frozen=True)
class ImageNet:
    """OpenCLIP's zero-shot accuracy on ImageNet and ImageNet-V2, with its metric names."""

    tasks: "Mapping[str, Classification]"  # by prefix of the metric names (``imagenet`` or ``imagenetv2``)
    name: str = "imagenet-zero-shot"

    def score(self, encoder: "Encoder") -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, task in self.tasks.items():
            scores = task.score(encoder)
            _warn_skipped(name, scores.skipped)
            metrics |= {top_name(name, k): value for k in TOP_K if (value := scores.metrics[f"acc{k}"]) is not None}
        return metrics


def top_name(data: str, k: int) -> str:
    """Return OpenCLIP's name of the top-k accuracy on ``imagenet`` or ``imagenetv2``."""
    return f"{data}-zeroshot-val-top{k}"


def is_best(metrics: dict[str, float], metric: str, folder: Path, epoch: int) -> bool:
    """Return whether an evaluation is better than the model in ``best.pt``, whose metric is in ``results.jsonl``.

    Without such a model, every evaluation is better. For losses and ranks, smaller is better. For other metrics, also of
    ``--keep-tasks``, larger is better. Return False if ``metrics`` is empty.

    Args:
        folder: The run's ``checkpoints/``.
        epoch: Number of completed epochs of the evaluated model.
    """
    if not metrics:
        return False
    if metric not in metrics:
        logger.warning(f"--keep-best {metric}: no such metric in this evaluation, found: {', '.join(metrics)}")
        return False
    # The name of one of --keep-tasks is the user's, and may contain such a word: "blossoms".
    sign = -1 if not metric.startswith(KEPT) and any(word in metric for word in _LESS_IS_BETTER) else 1
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
