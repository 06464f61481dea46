"""Add and read the arguments that evaluations share: the model, batch size, workers and device."""

import argparse
import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from openclip_ext import distributed
from openclip_ext.cli.command_line import count, count_or_zero
from openclip_ext.cli.command_line import device as device_name
from openclip_ext.data.processes import available_cores
from openclip_ext.evaluation.encoder import PRECISIONS, Encoder, resolve_precision
from openclip_ext.evaluation.models import MODEL_OPTIONS, OpenedModel, open_model

MODEL_HELP = "OpenCLIP's model name; hf-hub:, local-dir: and transformers: names are accepted"
REF_HELP = (
    "run folder LOGS/NAME (its newest checkpoint), checkpoint file, or folder of an exported or a transformers model"
)


def add_model_arguments(parser: argparse.ArgumentParser, takes_run: bool = False) -> None:
    """Add the arguments that `load_encoder` reads. With ``takes_run``, the user can give a run folder instead."""
    if takes_run:
        parser.add_argument("run", nargs="?", help=REF_HELP)
    parser.add_argument("--model", required=not takes_run, help=MODEL_HELP)
    parser.add_argument("--checkpoint", help="checkpoint file, or a pretrained tag of the model")
    add_running_arguments(parser)
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="datacomp",
        help="datacomp: as in DataComp's harness (on CUDA, autocast for texts and for the images of retrieval tasks; on the "
        "CPU, float32); fp32: float32 everywhere; amp: autocast everywhere (CUDA only)",
    )
    add_model_options(parser)


def add_running_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for batch size, workers and device."""
    parser.add_argument("--batch-size", type=count, default=256, help="number of images or texts in a batch")
    # All torchrun processes on one machine share its cores.
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    help_text = "number of images decoded in parallel (default: one per core, up to 16)"
    parser.add_argument("--workers", type=count_or_zero, default=max(1, min(16, cores)), help=help_text)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    help_text = "cpu, cuda or cuda:N (default: cuda if there is a GPU)"
    parser.add_argument("--device", type=device_name, default=default, help=help_text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model options that :func:`model_options` reads."""
    group = parser.add_argument_group(
        "model options",
        "the same flags as in OpenCLIP's training (default: the values in the checkpoint's training run)",
    )
    group.add_argument("--model-config", help="JSON file of a model that OpenCLIP does not contain")
    group.add_argument("--force-quick-gelu", action="store_true", default=None)
    group.add_argument("--force-custom-text", action="store_true", default=None)
    group.add_argument("--force-image-size", type=int)
    group.add_argument("--force-context-length", type=int)
    group.add_argument("--image-mean", type=float, nargs=3)
    group.add_argument("--image-std", type=float, nargs=3)
    group.add_argument("--image-interpolation", choices=("bicubic", "bilinear", "random"))
    group.add_argument("--image-resize-mode", choices=("shortest", "longest", "squash"))


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model options for `open_model`."""
    return {name: getattr(args, name) for name in MODEL_OPTIONS}


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the columns of tables that :func:`given_columns` reads."""
    group = parser.add_argument_group("tables", "the same flags as in training")
    group.add_argument("--csv-separator", help="separator of a CSV file")
    group.add_argument("--csv-img-key", help="column of the images")
    group.add_argument("--csv-caption-key", help="column of the captions")


def given_columns(args: argparse.Namespace) -> dict[str, str]:
    """Return the given flags of :func:`add_columns`, by the names of training's flags."""
    names = "csv_separator", "csv_img_key", "csv_caption_key"
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def own_device(name: str) -> torch.device:
    """Return the device of this process. If it is a GPU, make it CUDA's current device."""
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is None:  # under torchrun, each process uses its own GPU
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Create a process group for objects and barriers if torchrun started several processes."""
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # gloo is enough, because no GPU tensor is communicated. A process may wait for hours until others have finished.
            dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))
        yield
    finally:
        distributed.shutdown()


def load_encoder(args: argparse.Namespace, show_progress: bool = True) -> tuple[OpenedModel, Encoder]:
    """Open the model that the arguments of `add_model_arguments` select; return the model and an encoder for it."""
    run = getattr(args, "run", None)
    if run is not None and (args.model or args.checkpoint):
        raise ValueError("a run folder determines model and checkpoint: remove --model and --checkpoint")
    if run is None and args.model is None and args.checkpoint is None:
        raise ValueError("no model given: expected a run folder LOGS/NAME, or --model and --checkpoint")
    device = own_device(args.device)
    settings = {"batch_size": args.batch_size, "workers": args.workers, "show_progress": show_progress}
    precision = resolve_precision(args.precision, device)
    opened = open_model(run or args.checkpoint, args.model, args.model_config, **model_options(args))
    return opened, opened.encoder(device, autocast=precision, **settings)
