"""``python -m eval.beyond eval ...``: clip-benchmark's command line on its data sets beyond DataComp's, with our models.

Its arguments are its own (``clip_benchmark eval --help``). Mended are what stops or misleads it (clip-benchmark 1.6.2): its
accuracy, which fails with numpy from 2.4 on; its loading, which knows neither the demo models nor checkpoints with heads;
mixed precision on the CPU; and fetching a set that is not there without being asked.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from clip_benchmark import cli
from clip_benchmark.metrics import linear_probe, zeroshot_classification
from torch import Tensor

from .metrics import target_ranks
from .models import ImageTextModel, load_model


def accuracy(logits: Tensor, targets: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """Return the share of samples whose class is among the first ``k``, for each ``k``."""
    ranks = target_ranks(logits.float(), targets.long())
    return [float((ranks < k).double().mean()) for k in topk]


def load_clip(
    model_type: str, model_name: str, pretrained: str, cache_dir: str | None = None, device: str = "cpu"
) -> tuple[ImageTextModel, Callable[[Any], Tensor], Callable[[list[str]], Tensor]]:
    """Return model, transform and tokenizer, as clip-benchmark's function does."""
    loaded = load_model(model_name, pretrained, device)
    return loaded.model, loaded.preprocess, loaded.tokenizer


def build_dataset(*args: Any, root: str, build: Callable = cli.build_dataset, **options: Any) -> Any:
    """Make a data set; clip-benchmark fetches what is missing, so its folder must be there.

    Raises:
        FileNotFoundError: if it is not.
    """
    if not Path(root).exists():
        raise FileNotFoundError(f"there is no {root}: set --dataset_root, or make the folder for it to be fetched into")
    return build(*args, root=root, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run clip-benchmark's command line."""
    zeroshot_classification.accuracy = linear_probe.accuracy = accuracy
    cli.load_clip, cli.build_dataset = load_clip, build_dataset
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv = ["eval.beyond", *arguments, *([] if torch.cuda.is_available() else ["--no_amp"])]
    cli.main()


if __name__ == "__main__":
    main()
