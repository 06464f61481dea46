"""Mistakes in a command line that would show only later, told before anything is built or written."""

import importlib.util
import logging
import os
from pathlib import Path

import open_clip

from openclip_ext import compat, distributed
from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.storage import is_local, local_path
from openclip_ext.options import nearest
from openclip_ext.training import recipes
from openclip_ext.training.config import TrainingConfig
from openclip_ext.training.errors import UsageError
from openclip_ext.training.evaluation import EvaluationConfig
from openclip_ext.training.help import NOTHING_TO_DO
from openclip_ext.training.model import ModelConfig
from openclip_ext.training.optimizer import check_optimizer


def check(config: TrainingConfig) -> None:
    """Raise UsageError for the first mistake, with what would be right."""
    if config.data is None and not config.evaluation.is_asked_for:
        raise UsageError(NOTHING_TO_DO)
    _check_model(config.model)
    check_optimizer(config.optimizer)
    _check_evaluation(config.evaluation)
    if config.data is not None and config.data.resolved_type != "synthetic":
        files = _local_files(config.data)
        if files and not any(map(os.path.isfile, files)):  # a few that are missing are counted as bad samples
            raise UsageError(f"--train-data: none of the {len(files)} files is there, the first is {files[0]}")
    if "wandb" in config.reporting.destinations and importlib.util.find_spec("wandb") is None:
        raise UsageError("--report-to wandb needs the package wandb, which is not installed: pip install wandb")


def tell_other_batch(config: TrainingConfig) -> None:
    """Warn of a recipe on another number of GPUs than it is for, if the batch of a GPU does not make up for it."""
    name = config.flags["recipe"]
    wanted = config.global_batch if name is None else recipes.get(name, config.loss.name).global_batch
    if wanted != config.global_batch:
        each = wanted / (distributed.world_size() * config.loading.accum_freq)
        logging.warning(
            f"--recipe {name} is for a global batch of {wanted:,}, and this run's is {config.global_batch:,}: give "
            f"--batch-size {each:g}, or do not expect the recipe's results"
        )


def _check_model(config: ModelConfig) -> None:
    if ":" in config.name:  # hf-hub:, local-dir: and so on; OpenCLIP looks for them
        return
    known = open_clip.list_models()
    name = config.file_name
    if name not in known:
        raise UsageError(f"unknown model --model {config.name}{nearest(name, known)}; known: open_clip.list_models()")
    try:
        compat.check_augmentation(config.aug_cfg)
    except ValueError as error:
        raise UsageError(str(error)) from error
    tag = config.pretrained
    if not tag or os.path.exists(tag) or open_clip.is_pretrained_cfg(name, tag):
        return
    tags = open_clip.list_pretrained_tags_by_model(name)
    there = f"; tags of {name}: {', '.join(tags)}" if tags else f"; {name} has no tags"
    raise UsageError(f"--pretrained {tag} is neither a file nor a tag of {name}{nearest(tag, tags)}{there}")


def _check_evaluation(config: EvaluationConfig) -> None:
    for flag, folder in (("--imagenet-val", config.imagenet_val), ("--imagenet-v2", config.imagenet_v2)):
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"{flag} {folder} is no folder")
    if config.val_data is not None and config.val_data.resolved_type != "synthetic":
        _check_files("--val-data", config.val_data)


def _local_files(spec: DataSpec) -> list[str]:
    assert spec.source is not None, "a data set that is not synthetic has a source"
    if spec.resolved_type == "csv":
        return [spec.source] if isinstance(spec.source, str) else list(spec.source)
    return [local_path(url) for url in expand_shards(spec.source) if is_local(url)]


def _check_files(flag: str, spec: DataSpec) -> None:
    files = _local_files(spec)
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise UsageError(f"{flag}: {len(missing)} of {len(files)} files are not there, the first is {missing[0]}")
