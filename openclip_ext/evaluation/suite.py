"""Evaluate DataComp's tasks during training (``--eval-suite quick|full``)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from openclip_ext.cli.messages import get_logger
from openclip_ext.evaluation.features import Encoder, resolve_precision
from openclip_ext.evaluation.results import averages
from openclip_ext.evaluation.runner import evaluate_task
from openclip_ext.evaluation.tasks import Task, select_tasks

logger = get_logger(__name__)


@dataclass
class DataCompSuite:
    """Evaluator of those tasks of a suite whose data exist."""

    name: ClassVar[str] = "datacomp"
    tasks: list[Task]
    data_dir: Path
    any_size: bool
    make_encoder: Callable[[Any], Encoder]

    def run(self, model: nn.Module) -> dict[str, float]:
        """Score a model that is in evaluation mode and not wrapped in DDP. A failed task is logged and excluded.

        Returns main metrics as ``datacomp/KEY``, and averages of groups without missing tasks as ``datacomp/average/TITLE``.
        """
        # Each call needs a new encoder, because cached class embeddings belong to earlier weights.
        encoder = self.make_encoder(model)
        scores = {}
        for task in self.tasks:
            try:
                value = evaluate_task(task, self.data_dir, encoder, self.any_size).metrics["main_metric"]
            except Exception as error:
                logger.error(f"{task.name} failed and is excluded: {error}")
                continue
            if value is not None:  # a metric may be undefined: WinoGAViL's needs instances with 10 or 12 candidates
                scores[task.key] = value
        complete = {f"average/{title}": mean for title, (mean, _) in averages(scores).items() if mean is not None}
        return {f"{self.name}/{key}": value for key, value in {**scores, **complete}.items()}


def build_suite(
    suite: str, data_dir: str | Path, *, device: str | torch.device = "cpu", any_size: bool = False, **encoding: Any
) -> list[DataCompSuite]:
    """Build a training run's evaluators. Each has a ``name`` and a method ``run(model) -> dict[str, float]``.

    Args:
        suite: ``quick`` (six tasks, 40,754 images), ``full`` (the 38 tasks with a main metric), or another key of `SUITES`.
            Tasks without data are skipped and logged.
        data_dir: Folder with the ``wds_*_test`` folders.
        any_size: Whether to score data whose size differs from DataComp's.
        **encoding: ``preprocess``, ``tokenizer`` and other arguments of `Encoder`.

    Raises:
        ValueError: The suite is unknown, or ``data_dir`` has no data set of the suite.
    """
    wanted = [task for task in select_tasks([suite]) if task.main_metric is not None]
    tasks = [task for task in wanted if (Path(data_dir) / task.folder).is_dir()]
    missing = ", ".join(task.name for task in wanted if task not in tasks)
    if not tasks:
        raise ValueError(f"{data_dir} has no data set of the suite {suite!r}: expected one or more of {missing}.")
    if missing:
        logger.warning(f"The suite {suite!r} is incomplete in {data_dir}. Missing: {missing}.")
    encoding |= {"device": torch.device(device), "precision": resolve_precision("datacomp", device)}
    return [DataCompSuite(tasks, Path(data_dir), any_size, partial(Encoder, **encoding))]
