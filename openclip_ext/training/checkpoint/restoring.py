"""Load a checkpoint into the parts of a run, and remove log entries that were written after it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from openclip_ext import compat, distributed
from openclip_ext.checkpoint import format as ckpt
from openclip_ext.checkpoint.format import TRAINED_KEY, UNMERGED, Checkpoint, Position, RunIdentity
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files import json_lines
from openclip_ext.state.table_files import open_table
from openclip_ext.training import parallel
from openclip_ext.training.lora import is_adapted
from openclip_ext.training.optimizer import HYPERPARAMETERS
from openclip_ext.training.step import TrainStep

logger = get_logger(__name__)


def restore(
    checkpoint: Checkpoint | None,
    identity: RunIdentity,
    steps_per_epoch: int,
    step: TrainStep,
    parts: Mapping[str, Stateful],
) -> Position:
    """Load a checkpoint, if any, into a run's step and other parts, and return the run's position.

    A checkpoint of stock OpenCLIP stores only the epoch, so the step is computed from ``steps_per_epoch``. If the checkpoint
    belongs to a different run, raise UsageError with the changed settings.
    """
    if checkpoint is None:
        return Position()
    check_identity(checkpoint, identity, keeps_samples=step.loss.needs_index)
    model = compat.uncompiled(step.model)
    content, path = unmerged(checkpoint, model), checkpoint.path
    if "pytorch-lightning_version" in content:
        raise UsageError(
            f"{path} is a checkpoint of Lightning: continue it there, with Trainer.fit(..., ckpt_path=...)"
        )
    if "optimizer" not in content:
        raise UsageError(f"{path} contains only the model: continue with --resume latest, or give --pretrained {path}")
    try:
        load_model(model, content.get(TRAINED_KEY, content["state_dict"]), path)
        _load_optimizer(model, step.optimizer, content["optimizer"], path)
        if step.scaler is not None and "scaler" in content:
            step.scaler.load_state_dict(content["scaler"])
        restore_loss(checkpoint, step.loss)
    except UsageError as error:
        if not (changed := changed_settings(checkpoint, identity)):
            raise
        raise UsageError(f"{error}. Changed settings: {'; '.join(changed)}") from error
    if step.ema is not None and TRAINED_KEY in content:
        step.ema.load_state_dict(content["state_dict"])
    elif step.ema is not None:
        step.ema.load_state_dict(compat.unwrap(model).state_dict())
        logger.warning(f"{path} has no average of the weights: the average starts from the current weights.")
    if checkpoint.shared is None:
        steps = content["epoch"] * steps_per_epoch
        return Position(content["epoch"], steps, samples=steps * identity.global_batch)
    for name, part in parts.items():
        part.load_state_dict(checkpoint.shared["parts"][name])
    return checkpoint.position


def unmerged(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Any]:
    """Return a model file's content for training, with separate (unmerged) LoRA adapters if the model has adapters."""
    content = checkpoint.model_file
    if (UNMERGED in content) != is_adapted(model):
        raise UsageError(
            f"{checkpoint.path} was trained {'with' if UNMERGED in content else 'without'} --lora-rank: resume with the "
            f"same flags, or start another run with --pretrained {checkpoint.path}"
        )
    return content | content.get(UNMERGED, {})


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, path: Path) -> None:
    """Load the optimizer state, but keep this run's hyperparameters and implementation (``fused``, ``foreach``)."""
    own = optimizer.param_groups[0]
    implementation = {name: own[name] for name in ("fused", "foreach", "capturable") if name in own}
    asked = [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in optimizer.param_groups]
    try:
        groups = [group | implementation for group in saved["param_groups"]]
        parallel.load_optimizer_state_dict(model, optimizer, saved | {"param_groups": groups})
        for group, settings in zip(optimizer.param_groups, asked, strict=True):
            if missing := settings.keys() - group.keys():
                raise ValueError(f"it has no {', '.join(sorted(missing))}, so it is of a different --opt")
            group.update(settings)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the optimizer state in {path} does not match this run ({error}): resume with the loss and the flags that wrote "
            f"it, or start another run with --pretrained {path}"
        ) from error


def cut_logs(folder: Path, position: Position) -> None:
    """Remove log entries that the resumed run writes again: later steps, and an evaluation that only one log contains.

    If the checkpoint was saved between an epoch's last step and the epoch's end, the run logs this end again.
    """
    evaluated = not lacks_evaluation(folder, position)

    def is_kept(line: dict[str, Any]) -> bool:
        completed = position.step - position.step_in_epoch + ("evaluation" in line and evaluated)
        return line.get("step", math.inf) < (position.step if "loss" in line else completed)

    json_lines.truncate(folder / "metrics.jsonl", is_kept)
    epochs = position.epoch + evaluated
    json_lines.truncate(folder / "checkpoints" / "results.jsonl", lambda line: line.get("epoch", 0) < epochs)


def lacks_evaluation(folder: Path | None, position: Position) -> bool:
    """Return whether the run stopped between saving an epoch's checkpoint and logging the epoch's evaluation."""
    if folder is None:
        return position.epoch == 0 and position.step == 0
    if position.step_in_epoch > 0:
        return False
    results = json_lines.read(folder / "checkpoints" / "results.jsonl")
    metrics = [line for line in json_lines.read(folder / "metrics.jsonl") if "evaluation" in line]
    return any(all(line.get("epoch") != position.epoch for line in lines) for lines in (results, metrics))


def check_identity(checkpoint: Checkpoint, identity: RunIdentity, keeps_samples: bool) -> None:
    """If a checkpoint does not belong to the run that resumes from it, raise UsageError with all differences.

    The global batch size is compared only mid-epoch. ``keeps_samples``: whether the loss has per-sample state. Such a loss
    requires the same data.
    """
    if checkpoint.shared is None:
        return
    found, asked = checkpoint.shared["identity"], asdict(identity)
    compared = {key for key, value in asked.items() if value is not None and found.get(key) is not None} - {"settings"}
    if checkpoint.position.step_in_epoch == 0:
        compared.discard("global_batch")
    differing = [key for key in sorted(compared) if found[key] != asked[key]]
    if "data" in differing and "num_samples" in differing:
        differing.remove("data")  # follows from the number of samples
    if differing == ["data"] and not keeps_samples:
        logger.warning(
            f"{checkpoint.path} was trained on different data of the same size. The run continues with the new data."
        )
    elif differing:
        differences = "; ".join(f"{key}: checkpoint {found[key]}, run {asked[key]}" for key in differing)
        raise UsageError(
            f"{checkpoint.path} belongs to a different run ({differences}). {_cure(checkpoint.path, differing, found)}"
        )


def _cure(path: Path, differing: Sequence[str], found: Mapping[str, Any]) -> str:
    """Return what the user can do about the differences between a run and the checkpoint's identity ``found``."""
    if differing == ["global_batch"]:
        return (
            f"Add --global-batch {found['global_batch']} (it sets --accum-freq), or --resume the checkpoint of a full epoch "
            "with another --name"
        )
    if not {*differing} - {"data", "num_samples", "global_batch"}:
        return f"Use the same data and manifest, or start a new run with --pretrained {path} and another --name"
    return "Use the same settings, or start a new run with another --name"


def changed_settings(checkpoint: Checkpoint | None, identity: RunIdentity) -> list[str]:
    """Return descriptions of the settings that differ between a run and the checkpoint from which it resumes."""
    if checkpoint is None or checkpoint.shared is None:
        return []
    saved = checkpoint.shared["identity"]
    before, now = ({**item["settings"], "global_batch": item["global_batch"]} for item in (saved, asdict(identity)))
    return [
        f"{name} {now.get(name, 'not used')} (before: {before.get(name, 'not used')})"
        for name in sorted(before.keys() | now.keys())
        if name not in before or name not in now or before[name] != now[name]
    ]


def restore_loss(checkpoint: Checkpoint, loss: ContrastiveLoss) -> None:
    """Load the state of the loss and of this rank's random generators.

    If the number of ranks has changed, per-sample state is sharded again, and the generators are not restored. The data
    order does not depend on the generators.
    """
    shared, ranks = checkpoint.shared, checkpoint.rank_files
    if shared is None:
        logger.warning(f"{checkpoint.path} was written by OpenCLIP: the state of the loss starts from scratch.")
        return
    parts = {name: [open_table(ckpt.table_file(file, name)) for file in ranks] for name in shared["tables"]}
    loss.restore_state(shared["loss"], parts, checkpoint.path)
    if shared["world_size"] == distributed.world_size():
        ckpt.set_random_state(ckpt.load(ranks[distributed.rank()])["random"])


def load_model(model: nn.Module, state_dict: dict[str, torch.Tensor], source: str | Path) -> None:
    """Load weights, with or without DDP's prefix ``module.``, into a model. Raise UsageError if they do not match."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    try:
        model.load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()})
    except RuntimeError as error:
        raise UsageError(f"{source} has the weights of a different model: {one_line(error)}") from error
