"""What the command lines of all evaluations share: which model, and how to run it."""

import argparse
import os
from collections.abc import Callable

import torch

from eval.features import PRECISIONS, Encoder, resolve_precision
from eval.models import MODEL_OPTIONS, LoadedModel, load_model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to run it."""
    parser.add_argument("--model", required=True, help="OpenCLIP's name of the model, hf-hub: and local-dir: too")
    parser.add_argument("--checkpoint", help="checkpoint file, or one of the model's pretrained tags")
    parser.add_argument("--batch-size", type=_at_least(1), default=256, help="images, and texts, in a batch")
    parser.add_argument(
        "--workers",
        type=_at_least(0),
        default=default_workers(),
        help="images that are decoded at a time, in processes, never more than shards, and threads of theirs; "
        "default: one a core (here %(default)s), at most 16",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="datacomp",
        help="datacomp: as DataComp's harness on CUDA (texts, and in retrieval images too, in autocast), float32 on "
        "CPU; fp32: float32 everywhere; amp: autocast everywhere (CUDA)",
    )
    group = parser.add_argument_group("model options", "as in training with OpenCLIP, for checkpoints that need them")
    group.add_argument("--model-config", help="JSON of a model that OpenCLIP does not ship")
    group.add_argument("--force-quick-gelu", action="store_true", default=None)
    group.add_argument("--force-custom-text", action="store_true", default=None)
    group.add_argument("--force-image-size", type=int)
    group.add_argument("--force-context-length", type=int)
    group.add_argument("--image-mean", type=float, nargs=3)
    group.add_argument("--image-std", type=float, nargs=3)
    group.add_argument("--image-interpolation", choices=("bicubic", "bilinear", "random"))
    group.add_argument("--image-resize-mode", choices=("shortest", "longest", "squash"))


def default_workers() -> int:
    """One for each core that this process may use; the processes of torchrun on one machine share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _at_least(lowest: int) -> Callable[[str], int]:
    """An argument type: integers from ``lowest``."""

    def integer(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return int(text)

    return integer


def select_device(requested: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one; under torchrun each process takes its own GPU.

    Raises:
        ValueError: for CUDA where there is none, or what is no device.
    """
    try:
        device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {requested}: expected cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {device}: this machine, or this build of torch, has no CUDA device.")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def load_encoder(args: argparse.Namespace, show_progress: bool = True) -> tuple[LoadedModel, Encoder]:
    """The model that arguments of :func:`add_model_arguments` name, and how to encode with it.

    Raises:
        ValueError: no such model, checkpoint or device.
    """
    device = select_device(args.device)
    precision = resolve_precision(args.precision, device)
    options = {name: getattr(args, name) for name in MODEL_OPTIONS}
    loaded = load_model(args.model, args.checkpoint, device, args.model_config, **options)
    encoder = Encoder(
        loaded.model,
        loaded.preprocess,
        loaded.tokenizer,
        device,
        precision,
        args.batch_size,
        args.workers,
        show_progress=show_progress,
    )
    return loaded, encoder
