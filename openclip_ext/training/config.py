"""From the command line's flags to the configurations of the parts.

A field of a configuration is a flag (``openclip_ext/cli/options.py``), and each configuration stands beside the part that it
builds. Here ``argparse.Namespace`` ends: no part sees another part's flags.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import without_secrets
from openclip_ext.cli.options import flag, from_flags
from openclip_ext.data.loader.train_loader import TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.training.model import LossConfig, ModelConfig
from openclip_ext.training.optimizer import OptimizerConfig, ScheduleConfig
from openclip_ext.training.parallel import ParallelConfig
from openclip_ext.training.runtime.reporting import ReportingConfig
from openclip_ext.training.runtime.run_folder import RunFolderConfig, default_name, settings
from openclip_ext.training.step import StepConfig
from openclip_ext.training.trainer import RunLength, SavePolicy
from openclip_ext.training.validation import EvaluationConfig

_DESTINATIONS = frozenset({"wandb", "tensorboard"})


@dataclass(frozen=True)
class TrainingConfig:
    """A run, part by part.

    Attributes:
        data: what to train on; None: only evaluate.
        flags: all flags with their values, as the run folder stores them: without secrets.
        resume: a checkpoint's path, ``latest`` or None.
        copy_codebase: keep the source with the run.
    """

    model: ModelConfig
    data: DataSpec | None
    loading: TrainLoaderConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    step: StepConfig
    parallel: ParallelConfig
    length: RunLength
    saving: SavePolicy
    evaluation: EvaluationConfig
    folder: RunFolderConfig
    reporting: ReportingConfig
    flags: Mapping[str, Any]
    rank_patience: float | None = flag(
        600.0,
        "end the run when a rank has given no sign of life for so many seconds, and say which; none: wait for ever",
        exclusive_minimum=0.0,
    )
    shared_batch: int | None = flag(
        None,
        "samples of an optimizer step over all GPUs, however many; --batch-size is then the most that a GPU takes at once, "
        "and --accum-freq follows",
        dest="global_batch",
        minimum=1,
    )
    resume: str | None = flag(None)
    copy_codebase: bool = flag(False)

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.loading.batch_size * self.loading.accum_freq * distributed.world_size()


# The configurations that flags fill, by the heading of their flags in the help.
FLAG_GROUPS: dict[str, tuple[type, ...]] = {
    "data": (DataSpec, TrainLoaderConfig, ModelConfig),
    "optimization": (OptimizerConfig, ScheduleConfig, StepConfig, ParallelConfig),
    "length, checkpoints and evaluation": (RunLength, SavePolicy, EvaluationConfig),
    "the run": (RunFolderConfig, ReportingConfig, TrainingConfig),
}


def training_config(args: argparse.Namespace, loss: LossConfig, device: torch.device) -> TrainingConfig:
    """Return the typed configuration of a parsed command line, after ``torch.distributed`` has started on ``device``."""
    args = argparse.Namespace(**{**vars(args), **_shared_batch(args)})
    folder = _run_folder(args)
    destinations = _destinations(args.report_to)
    derived = {"name": folder.name, **folder.openclip_paths("tensorboard" in destinations)}
    flags = {**vars(args), **derived, "aug_cfg": dict(args.aug_cfg)}
    stored = without_secrets(flags)
    _refuse_other_flags(settings(stored, loss.options))
    return from_flags(
        TrainingConfig,
        flags,
        model=model_config(flags),
        data=from_flags(DataSpec, flags) if args.train_data or args.dataset_type == "synthetic" else None,
        loading=from_flags(
            TrainLoaderConfig,
            flags,
            views=loss.options.get("views", 1),
            caption_hash=loss.options.get("equal_captions", "negative") != "negative",
            pin_memory=device.type == "cuda",
            patience=args.rank_patience,
        ),
        loss=loss,
        optimizer=from_flags(OptimizerConfig, flags),
        schedule=from_flags(ScheduleConfig, flags),
        step=from_flags(StepConfig, flags),
        parallel=from_flags(ParallelConfig, flags),
        length=from_flags(RunLength, flags),
        saving=from_flags(SavePolicy, flags, folder=folder.folder and folder.folder / "checkpoints", name=folder.name),
        evaluation=from_flags(
            EvaluationConfig, flags, val_data=DataSpec.of_validation(flags) if args.val_data else None
        ),
        folder=folder,
        reporting=from_flags(
            ReportingConfig,
            flags,
            destinations=destinations,
            name=folder.name,
            resumes=args.resume is not None,
            flags=stored,
        ),
        flags=stored,
    )


def _refuse_other_flags(own: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks if one was started with other flags; paths may be others on each node."""
    first, *others = distributed.all_gather_object(
        {name: value for name, value in own.items() if not (isinstance(value, str) and os.sep in value)}
    )
    for rank, flags in enumerate(others, start=1):
        differing = [f"{name} {flags.get(name)} ({first[name]})" for name in first if flags.get(name) != first[name]]
        if differing:
            told = f"rank {rank} was started with other flags than rank 0 (in brackets): {', '.join(differing)}"
            raise UsageError(f"{told}. Start all ranks with the same")


def _shared_batch(args: argparse.Namespace) -> dict[str, int]:
    """Return ``batch_size`` and ``accum_freq`` with the fewest micro-batches that make the ``--global-batch``."""
    if args.global_batch is None:
        return {}
    world_size = getattr(args, "world_size", distributed.world_size())
    for accum_freq in range(args.accum_freq, args.global_batch + 1):
        size, rest = divmod(args.global_batch, accum_freq * world_size)
        if rest == 0 and size <= args.batch_size:
            return {"batch_size": size, "accum_freq": accum_freq}
    raise UsageError(
        f"--global-batch {args.global_batch} cannot be shared by {world_size} processes: give a number that "
        "every number of processes divides with which the run may go on"
    )


def model_config(flags: Mapping[str, Any]) -> ModelConfig:
    """Return what OpenCLIP's flags, by their Python names, say about the model."""
    size = flags["force_image_size"]
    if isinstance(size, list | tuple):
        size = size[0] if len(size) == 1 else tuple(size)
    trace = flags["batch_size"] if flags["trace"] else None
    return from_flags(ModelConfig, flags, force_image_size=size, trace=trace)


def writes_nothing(logs: str | None) -> bool:
    """Return whether ``--logs`` asks for no files."""
    return not logs or logs.lower() == "none"


def _run_folder(args: argparse.Namespace) -> RunFolderConfig:
    name = args.name
    if name is None:
        name = default_name(args.model, args.lr, args.batch_size, args.workers, args.precision)
    return from_flags(
        RunFolderConfig,
        vars(args),
        logs=None if writes_nothing(args.logs) else Path(args.logs),
        name=name,
        resume_latest=args.resume == "latest",
        log_local_rank=args.local_rank if args.log_local else None,
    )


def _destinations(report_to: str) -> frozenset[str]:
    asked = {name.strip() for name in report_to.split(",") if name.strip()}
    if not asked <= _DESTINATIONS | {"all"}:
        raise UsageError(f"--report-to {report_to}: known are wandb, tensorboard, all")
    return _DESTINATIONS if "all" in asked else frozenset(asked)
