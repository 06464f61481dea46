"""Evaluation during training: the evaluator protocol, OpenCLIP's validation (with recall in chunks) and zero-shot."""

import argparse
import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext import compat

RECALL_AT = (1, 5, 10)


class Evaluator(Protocol):
    """Anything that measures a model. The trainer knows evaluators only as this."""

    name: str

    def run(self, model: nn.Module) -> dict[str, float]:
        """Measure the model, which is in evaluation mode and outside DDP; only the master calls it."""
        ...


@dataclass(frozen=True)
class ScheduledEvaluator:
    """An evaluator and how often it runs: every ``every`` epochs and after the last one; never with 0."""

    evaluator: Evaluator
    every: int

    def is_due(self, completed_epochs: int, epochs: int) -> bool:
        return self.every > 0 and (completed_epochs % self.every == 0 or completed_epochs == epochs)


def run_evaluators(evaluators: Iterable[Evaluator], model: nn.Module) -> dict[str, float]:
    """Run evaluators one after another; one that fails is logged and costs nothing but its own numbers."""
    model = compat.unwrap(model)
    was_training = model.training
    model.eval()
    metrics: dict[str, float] = {}
    try:
        for evaluator in evaluators:
            try:
                metrics.update(evaluator.run(model))
            except Exception:
                logging.exception(f"The evaluation {evaluator.name} failed; training goes on without it.")
    finally:
        model.train(was_training)
    return metrics


@dataclass(frozen=True)
class ImageNetZeroShot:
    """OpenCLIP's zero-shot accuracy on ImageNet and ImageNet-V2 (``--imagenet-val``, ``--imagenet-v2``)."""

    loaders: dict[str, Any]
    args: argparse.Namespace
    tokenizer: Callable
    name: str = "imagenet-zero-shot"

    def run(self, model: nn.Module) -> dict[str, float]:
        return compat.imagenet_zero_shot(model, self.loaders, self.args, self.tokenizer)


@dataclass(frozen=True)
class Validation:
    """OpenCLIP's validation on ``--val-data``: loss, ranks and recall, under OpenCLIP's names.

    Attributes:
        loader: batches of ``image`` and ``text``.
        device: where the model is.
        input_dtype: type of the images, or None.
        autocast: as in training.
    """

    loader: Iterable[dict[str, Tensor]]
    device: torch.device
    input_dtype: torch.dtype | None = None
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    name: str = "validation"

    @torch.no_grad()
    def run(self, model: nn.Module) -> dict[str, float]:
        images, texts, losses, caption_losses, count = [], [], 0.0, 0.0, 0
        for batch in self.loader:
            size = len(batch["text"])
            with self.autocast():
                output = model(
                    batch["image"].to(self.device, self.input_dtype, non_blocking=True),
                    batch["text"].to(self.device, non_blocking=True),
                )
            image, text = output["image_features"].float(), output["text_features"].float()
            logits = output["logit_scale"].float() * image @ text.T
            losses += float(symmetric_cross_entropy(logits)) * size
            if "logits" in output and "labels" in output:  # CoCa's captions
                caption_losses += float(F.cross_entropy(output["logits"].permute(0, 2, 1), output["labels"])) * size
            count += size
            # On the host: the features of a large validation set do not fit beside the model.
            images.append(image.cpu())
            texts.append(text.cpu())
        if count == 0:
            raise ValueError("the validation data is empty")
        metrics = retrieval_metrics(torch.cat(images), torch.cat(texts))
        metrics |= {"clip_val_loss": losses / count, "num_samples": count}
        return metrics | ({"val_generative_loss": caption_losses / count} if caption_losses else {})


def symmetric_cross_entropy(logits: Tensor) -> Tensor:
    """OpenCLIP's contrastive loss of a square matrix of logits."""
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def retrieval_metrics(image_features: Tensor, text_features: Tensor, chunk: int = 1024) -> dict[str, float]:
    """Mean and median rank and recall of the paired item, both ways, in memory proportional to ``chunk``.

    Args:
        image_features: ``(n, d)``.
        text_features: ``(n, d)``, row ``i`` belongs to image ``i``.
        chunk: rows of the similarity matrix that exist at one time.

    Returns:
        OpenCLIP's names: ``image_to_text_R@1`` ..., ranks counted from 1. Ties count half of those in front, so that
        constant features score as chance would.
    """
    metrics = {}
    directions = {"image_to_text": (image_features, text_features), "text_to_image": (text_features, image_features)}
    for name, (queries, items) in directions.items():
        ranks = torch.cat([_ranks(queries, items, start, chunk) for start in range(0, len(queries), chunk)])
        metrics[f"{name}_mean_rank"] = float(ranks.mean()) + 1
        metrics[f"{name}_median_rank"] = math.floor(float(ranks.quantile(0.5))) + 1
        for k in RECALL_AT:
            metrics[f"{name}_R@{k}"] = float((ranks < k).double().mean())
    return metrics


def _ranks(queries: Tensor, items: Tensor, start: int, chunk: int) -> Tensor:
    """Number of items in front of the paired one (from 0) for a chunk of queries, float64."""
    similarity = queries[start : start + chunk] @ items.T
    rows = torch.arange(len(similarity), device=similarity.device)
    paired = similarity[rows, start + rows].unsqueeze(1)
    in_front = (similarity > paired).sum(1)
    tied = (similarity == paired).sum(1) - 1
    return in_front.double() + tied.double() / 2
