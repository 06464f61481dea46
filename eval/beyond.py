"""Run clip-benchmark with our models on data sets outside DataComp: ``python -m eval.beyond eval ...``.

The arguments are clip-benchmark's (``clip_benchmark eval --help``). This module corrects four faults of clip-benchmark 1.6.2:
computing accuracies fails with numpy 2.4, loading demo models or projection heads fails, mixed precision fails on the CPU, and
missing data sets are downloaded without asking the user.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from clip_benchmark import cli
from clip_benchmark.metrics import linear_probe, zeroshot_classification
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.encoder import ImageTextModel
from openclip_ext.evaluation.metrics import target_ranks
from openclip_ext.evaluation.models import open_model


def accuracy(logits: Tensor, targets: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """Return the top-k accuracy of logits ``(N, C)`` for each ``k`` in ``topk``."""
    ranks = target_ranks(logits.float(), targets.long())
    return [float((ranks < k).double().mean()) for k in topk]


def load_clip(
    model_type: str, model_name: str, pretrained: str, cache_dir: str | None = None, device: str = "cpu"
) -> tuple[ImageTextModel, Callable[[Any], Tensor], Callable[[list[str]], Tensor]]:
    """Return a model, its transform and its tokenizer. This function replaces ``clip_benchmark.cli.load_clip``."""
    opened = open_model(pretrained, model_name)
    return opened.model.to(device), opened.transform, opened.tokenizer


def build_dataset(*args: Any, root: str, build: Callable = cli.build_dataset, **options: Any) -> Any:
    """Build a data set. If its folder is missing, raise FileNotFoundError instead of downloading the data.

    Raise UsageError if clip-benchmark does not have the data set.
    """
    if not Path(root).exists():
        raise FileNotFoundError(f"{root} not found: set --dataset_root. To download the data, create the folder first")
    try:
        return build(*args, root=root, **options)
    except ValueError as error:
        if not str(error).startswith("Unsupported dataset"):
            raise
        name = options.get("dataset_name", *args[:1])
        raise UsageError(
            f"--dataset {name}: not a data set of clip-benchmark. Give one of its names, such as cifar10, or wds/NAME for "
            "shards in its format; your own prompts are --custom_template_file"
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run clip-benchmark's command line with the functions of this module."""
    zeroshot_classification.accuracy = linear_probe.accuracy = accuracy
    cli.load_clip, cli.build_dataset = load_clip, build_dataset
    arguments = sys.argv[1:] if argv is None else argv
    sys.argv = ["eval.beyond", *arguments, *([] if torch.cuda.is_available() else ["--no_amp"])]
    cli.main()


if __name__ == "__main__":
    command_line.run(main)
