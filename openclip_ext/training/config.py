"""From the command line's namespace to the configurations of the parts.

The one place where ``argparse.Namespace`` ends: each configuration stands beside the part that it builds, and no part sees
a flag.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openclip_ext import distributed
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig
from openclip_ext.training.errors import UsageError
from openclip_ext.training.evaluation import EvaluationConfig
from openclip_ext.training.flags import LossChoice, flags_without_effect, loss_options, views
from openclip_ext.training.loss import LossConfig
from openclip_ext.training.lr_scales import TowerRates
from openclip_ext.training.model import ModelConfig, TowerLock
from openclip_ext.training.optimizer import OptimizerConfig, ScheduleConfig
from openclip_ext.training.parallel import ParallelConfig
from openclip_ext.training.remote import RemoteConfig
from openclip_ext.training.reporting import ReportingConfig
from openclip_ext.training.run_folder import RunFolderConfig, default_name
from openclip_ext.training.step import StepConfig
from openclip_ext.training.trainer import RunLength, SavePolicy

_DESTINATIONS = frozenset({"wandb", "tensorboard"})


@dataclass(frozen=True)
class TrainingConfig:
    """A run, part by part.

    Attributes:
        data: what to train on; None: only evaluate.
        rank_patience: seconds without a sign of life after which a rank is missing.
        resume: a checkpoint's path, ``latest`` or None.
        copy_codebase: keep the source with the run.
        flags: all flags with their values, as the run folder stores them.
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
    remote: RemoteConfig | None
    reporting: ReportingConfig
    rank_patience: float
    resume: str | None
    copy_codebase: bool
    flags: Mapping[str, Any]

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.loading.batch_size * self.loading.accum_freq * distributed.world_size()


def training_config(args: argparse.Namespace, choice: LossChoice, device: torch.device) -> TrainingConfig:
    """The typed configuration of a parsed command line, after ``torch.distributed`` has started on ``device``.

    Raises:
        UsageError: flags that mean nothing.
    """
    folder = _run_folder(args)
    destinations = _destinations(args.report_to)
    derived = {"name": folder.name, **folder.openclip_paths("tensorboard" in destinations)}
    flags = {**vars(args), **derived, "aug_cfg": dict(args.aug_cfg)}
    return TrainingConfig(
        model=model_config(args),
        data=DataSpec.of_training(vars(args)) if args.train_data or args.dataset_type == "synthetic" else None,
        loading=_loading(args, choice, device),
        loss=LossConfig(
            choice.name, loss_options(args, choice), frozenset(choice.options), flags_without_effect(args, choice)
        ),
        optimizer=optimizer_config(args),
        schedule=_schedule(args),
        step=StepConfig(args.precision, args.grad_clip_norm, args.model_ema_decay),
        parallel=_parallel(args),
        length=RunLength(args.epochs, args.accum_freq, args.log_every_n_steps, args.max_skipped_steps),
        saving=_saving(args, folder),
        evaluation=_evaluation(args),
        folder=folder,
        remote=_remote(args, folder),
        reporting=_reporting(args, folder, destinations, flags),
        rank_patience=args.rank_patience,
        resume=args.resume,
        copy_codebase=args.copy_codebase,
        flags=flags,
    )


def model_config(args: argparse.Namespace) -> ModelConfig:
    """What OpenCLIP's flags say about the model."""
    image_size = args.force_image_size
    if isinstance(image_size, list | tuple):
        image_size = image_size[0] if len(image_size) == 1 else tuple(image_size)
    lock_image = TowerLock(args.lock_image_unlocked_groups, args.lock_image_freeze_bn_stats)
    lock_text = TowerLock(args.lock_text_unlocked_layers, args.lock_text_freeze_layer_norm)
    if args.trace and args.train_data:
        raise UsageError("--trace is for evaluation only; leave it out to train")
    return ModelConfig(
        name=args.model,
        pretrained=args.pretrained,
        pretrained_image=args.pretrained_image,
        precision=args.precision,
        torchscript=args.torchscript,
        force_quick_gelu=args.force_quick_gelu,
        force_custom_text=args.force_custom_text,
        force_patch_dropout=args.force_patch_dropout,
        force_image_size=image_size,
        force_context_length=args.force_context_length,
        image_mean=args.image_mean and tuple(args.image_mean),
        image_std=args.image_std and tuple(args.image_std),
        image_interpolation=args.image_interpolation,
        image_resize_mode=args.image_resize_mode,
        aug_cfg=args.aug_cfg,
        image_backend=args.image_backend,
        cache_dir=args.cache_dir,
        siglip_start=args.siglip,
        lock_image=lock_image if args.lock_image else None,
        lock_text=lock_text if args.lock_text else None,
        grad_checkpointing=args.grad_checkpointing,
        trace=args.batch_size if args.trace else None,
        linear_replacement=args.use_bnb_linear,
    )


def _loading(args: argparse.Namespace, choice: LossChoice, device: torch.device) -> TrainLoaderConfig:
    return TrainLoaderConfig(
        batch_size=args.batch_size,
        accum_freq=args.accum_freq,
        workers=args.workers,
        seed=args.seed,
        views=views(choice),
        caption_aware_flip=args.caption_aware_flip,
        draw_captions=args.draw_captions,
        caption_hash=choice.options.get("equal_captions", "negative") != "negative",
        pin_memory=device.type == "cuda",
    )


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """What the flags say about the optimizer."""
    return OptimizerConfig(
        name=args.opt,
        lr=args.lr,
        weight_decay=args.wd,
        beta1=args.beta1,
        beta2=args.beta2,
        eps=args.eps,
        momentum=args.momentum,
        lookahead_steps=args.lookahead_steps,
        image=TowerRates(args.lr_image, args.image_layer_decay),
        text=TowerRates(args.lr_text, args.text_layer_decay),
    )


def _schedule(args: argparse.Namespace) -> ScheduleConfig:
    return ScheduleConfig(
        name=args.lr_scheduler,
        lr=args.lr,
        epochs=args.epochs,
        warmup=args.warmup,
        cooldown_epochs=args.epochs_cooldown,
        cooldown_power=args.lr_cooldown_power,
        cooldown_end=args.lr_cooldown_end,
        skip=args.skip_scheduler,
    )


def _parallel(args: argparse.Namespace) -> ParallelConfig:
    return ParallelConfig(
        fsdp=args.fsdp,
        reshard_after_forward=not args.fsdp_no_reshard_after_forward,
        static_graph=args.ddp_static_graph,
        sync_batchnorm=args.use_bn_sync,
        compile=args.torchcompile,
        grad_checkpointing=args.grad_checkpointing,
    )


def _saving(args: argparse.Namespace, folder: RunFolderConfig) -> SavePolicy:
    return SavePolicy(
        folder=None if folder.folder is None else folder.folder / "checkpoints",
        name=folder.name,
        every_epochs=args.save_frequency,
        every_steps=args.save_every_steps,
        most_recent=args.save_most_recent,
        delete_previous=args.delete_previous_checkpoint,
        best_metric=args.keep_best,
    )


def _evaluation(args: argparse.Namespace) -> EvaluationConfig:
    return EvaluationConfig(
        val_data=DataSpec.of_validation(vars(args)) if args.val_data else None,
        val_every=args.val_frequency,
        imagenet_val=args.imagenet_val,
        imagenet_v2=args.imagenet_v2,
        imagenet_every=args.zeroshot_frequency,
        suite=args.eval_suite,
        suite_data=args.eval_data_dir,
        suite_every=args.eval_frequency,
        batch_size=args.batch_size,
        workers=args.workers,
    )


def _run_folder(args: argparse.Namespace) -> RunFolderConfig:
    name = args.name
    if name is None:
        name = default_name(args.model, args.lr, args.batch_size, args.workers, args.precision)
    return RunFolderConfig(
        logs=Path(args.logs) if args.logs and args.logs.lower() != "none" else None,
        name=name,
        resume_latest=args.resume == "latest",
        debug=args.debug,
        log_local_rank=args.local_rank if args.log_local else None,
    )


def _remote(args: argparse.Namespace, folder: RunFolderConfig) -> RemoteConfig | None:
    if args.remote_sync is None:
        return None
    return RemoteConfig(
        address=f"{args.remote_sync.rstrip('/')}/{folder.name}",
        every_seconds=args.remote_sync_frequency,
        protocol=args.remote_sync_protocol,
    )


def _reporting(
    args: argparse.Namespace, folder: RunFolderConfig, destinations: frozenset[str], flags: Mapping[str, Any]
) -> ReportingConfig:
    return ReportingConfig(
        destinations=destinations,
        epochs=args.epochs,
        name=folder.name,
        wandb_project=args.wandb_project_name,
        wandb_notes=args.wandb_notes,
        resumes=args.resume is not None,
        flags=flags,
    )


def _destinations(report_to: str) -> frozenset[str]:
    asked = {name.strip() for name in report_to.split(",") if name.strip()}
    if not asked <= _DESTINATIONS | {"all"}:
        raise UsageError(f"--report-to {report_to}: known are wandb, tensorboard, all")
    return _DESTINATIONS if "all" in asked else frozenset(asked)
