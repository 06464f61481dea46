"""Arguments of all evaluations: the model, and how to run it."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from openclip_ext.machine import available_cores

from .features import PRECISIONS, Encoder, resolve_precision
from .models import MODEL_OPTIONS, LoadedModel, load_model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ModelArguments`."""
    parser.add_argument("--model", required=True, help="OpenCLIP's name of the model, hf-hub: and local-dir: too")
    parser.add_argument("--checkpoint", help="checkpoint file, or one of the model's pretrained tags")
    parser.add_argument("--batch-size", type=_at_least(1), default=256, help="images, and texts, in a batch")
    parser.add_argument(
        "--workers",
        type=_at_least(0),
        default=default_workers(),
        help="number of images decoded in parallel (default: one per core, at most 16; here %(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one")
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
    """One per core that this process may use, at most 16; processes of torchrun on one machine share the cores."""
    return max(1, min(16, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _at_least(lowest: int) -> Callable[[str], int]:
    """An argument type: integers from ``lowest``."""

    def integer(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return int(text)

    return integer


def select_device(requested: str | None) -> torch.device:
    """The requested device, else CUDA if there is one; under torchrun each process takes its own GPU.

    Raises:
        ValueError: if there is no such device.
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


@dataclass(frozen=True)
class ModelArguments:
    """The model to evaluate, and how to run it.

    Attributes:
        model: OpenCLIP's name of the model.
        checkpoint: file or pretrained tag; None for names that bring their weights.
        model_config: JSON of a model that OpenCLIP does not ship.
        options: `eval.models.MODEL_OPTIONS`, None where not given.
        device: ``cpu``, ``cuda``, ``cuda:N``, or None for cuda if there is one.
        precision: one of `eval.features.PRECISIONS`.
        batch_size: images, and texts, in a batch.
        workers: number of images decoded in parallel.
    """

    model: str
    checkpoint: str | None = None
    model_config: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    precision: str = "datacomp"
    batch_size: int = 256
    workers: int = 4

    @classmethod
    def of(cls, args: argparse.Namespace) -> "ModelArguments":
        """From arguments of `add_model_arguments`."""
        return cls(
            args.model,
            args.checkpoint,
            args.model_config,
            {name: getattr(args, name) for name in MODEL_OPTIONS},
            args.device,
            args.precision,
            args.batch_size,
            args.workers,
        )


def load_encoder(arguments: ModelArguments, show_progress: bool = True) -> tuple[LoadedModel, Encoder]:
    """The model, and how to encode with it.

    Raises:
        ValueError: no such model, checkpoint or device.
    """
    device = select_device(arguments.device)
    precision = resolve_precision(arguments.precision, device)
    loaded = load_model(arguments.model, arguments.checkpoint, device, arguments.model_config, **arguments.options)
    encoder = Encoder(
        loaded.model,
        loaded.preprocess,
        loaded.tokenizer,
        device,
        precision,
        arguments.batch_size,
        arguments.workers,
        show_progress=show_progress,
    )
    return loaded, encoder
