"""Load a checkpoint into the parts of a run, and cut the logs to it."""

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files import json_lines
from openclip_ext.files.schema import read_as
from openclip_ext.state.table_files import open_table
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint.format import (
    Checkpoint,
    Position,
    RunIdentity,
    load,
    set_random_state,
    table_file,
)
from openclip_ext.training.ema import TRAINED_KEY, ModelEma
from openclip_ext.training.lora import UNMERGED, is_adapted
from openclip_ext.training.optimizer import HYPERPARAMETERS


def restore(
    checkpoint: Checkpoint | None,
    identity: RunIdentity,
    steps_per_epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    loss: ContrastiveLoss,
) -> Position:
    """Load a checkpoint into the parts of a run, and return where it goes on; without one it begins.

    ``steps_per_epoch`` positions an OpenCLIP checkpoint, which has epochs only.

    Raises:
        UsageError: the checkpoint is of another run.
    """
    if checkpoint is None:
        return Position()
    check_identity(checkpoint, identity, keeps_samples=loss.needs_index)
    content = unmerged(checkpoint, model)
    if "optimizer" not in content:
        raise UsageError(
            f"{checkpoint.path} has the model alone, as best.pt does: to continue the run give --resume latest, to start "
            f"another one from this model --pretrained {checkpoint.path}"
        )
    load_model(model, content.get(TRAINED_KEY, content["state_dict"]), checkpoint.path)
    _load_optimizer(model, optimizer, content.get("optimizer"), checkpoint.path)
    if scaler is not None and "scaler" in content:
        scaler.load_state_dict(content["scaler"])
    restore_loss(checkpoint, loss)
    if checkpoint.shared is None:
        steps = content["epoch"] * steps_per_epoch
        return Position(content["epoch"], steps, samples=steps * identity.global_batch)
    return checkpoint.position


def unmerged(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Any]:
    """Return a model file with the states of the model as it is trained, with adapters or without."""
    content = checkpoint.model_file
    if (UNMERGED in content) != is_adapted(model):
        raise UsageError(
            f"{checkpoint.path} was trained {'with' if UNMERGED in content else 'without'} --lora-rank: resume with the "
            f"same flags, or start another run with --pretrained {checkpoint.path}"
        )
    return content | content.get(UNMERGED, {})


# Of a parameter group: how the update is computed, not what it is.
_IMPLEMENTATION = ("fused", "foreach", "capturable")


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, path: Path) -> None:
    """Load its state; the settings stay those of this run's command line, and the implementation that of its device."""
    own = optimizer.param_groups[0]
    implementation = {name: own[name] for name in _IMPLEMENTATION if name in own}
    asked = [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in optimizer.param_groups]
    try:
        state = read_as(dict[str, Any], saved, "it")
        groups = read_as(list[dict[str, Any]], state.get("param_groups"), "param_groups")
        state["param_groups"] = [group | implementation for group in groups]
        parallel.load_optimizer_state_dict(model, optimizer, state)
        for group, settings in zip(optimizer.param_groups, asked, strict=True):
            if not settings.keys() <= group.keys():
                raise ValueError(f"it has no {', '.join(sorted(settings.keys() - group.keys()))}: another optimizer's")
            group.update(settings)
    except (KeyError, ValueError) as error:
        raise UsageError(f"the optimizer state in {path} does not fit this run: {error}") from error


def restore_ema(checkpoint: Checkpoint | None, model: nn.Module, decay: float | None) -> ModelEma | None:
    """Restore the average of the weights, or begin it with those of the (restored) model; None without a decay."""
    if decay is None:
        return None
    ema = ModelEma(model, decay)
    content = {} if checkpoint is None else unmerged(checkpoint, model)
    if TRAINED_KEY in content:
        ema.load_state_dict(content["state_dict"])
    elif checkpoint is not None:
        logging.warning(f"{checkpoint.path} has no average of the weights: it begins here.")
    return ema


def cut_logs(folder: Path, position: Position) -> None:
    """Remove what was logged beyond the checkpoint, and an evaluation that is in one of the logs only: these come again."""
    evaluated = not _lacks_evaluation(folder, position)
    json_lines.truncate(
        folder / "metrics.jsonl",
        lambda line: line.get("step", math.inf) < position.step + ("evaluation" in line and evaluated),
    )
    json_lines.truncate(
        folder / "checkpoints" / "results.jsonl", lambda line: line.get("epoch", 0) < position.epoch + evaluated
    )


def lacks_evaluation(folder: Path | None, position: Position) -> bool:
    """Return whether the run was stopped between an epoch's checkpoint and its evaluation, as the master sees its files."""
    return bool(distributed.broadcast_object(distributed.is_master() and _lacks_evaluation(folder, position)))


def _lacks_evaluation(folder: Path | None, position: Position) -> bool:
    if folder is None or position.step_in_epoch > 0 or position.epoch == 0:
        return False
    results = json_lines.read(folder / "checkpoints" / "results.jsonl")
    metrics = [line for line in json_lines.read(folder / "metrics.jsonl") if "evaluation" in line]
    return any(all(line.get("epoch") != position.epoch for line in lines) for lines in (results, metrics))


def check_identity(checkpoint: Checkpoint, identity: RunIdentity, keeps_samples: bool) -> None:
    """Raise UsageError, with every difference, if a checkpoint is of another run.

    Args:
        checkpoint: the checkpoint.
        identity: the identity of the run that resumes. In mid-epoch the global batch must agree, too.
        keeps_samples: whether the loss has a state for each sample, which is useless for other data.
    """
    if checkpoint.shared is None:
        return
    found, asked = checkpoint.shared["identity"], asdict(identity)
    compared = {key for key, value in asked.items() if value is not None and found.get(key) is not None} - {"settings"}
    if checkpoint.position.step_in_epoch == 0:
        compared.discard("global_batch")  # between epochs the batch may change
    if not keeps_samples and "data" in compared and found["data"] != asked["data"]:
        compared.discard("data")
        logging.warning(
            f"{checkpoint.path} was trained on other data of as many samples: the run goes on with new ones."
        )
    differences = [
        f"{key}: checkpoint {found[key]}, run {asked[key]}" for key in sorted(compared) if found[key] != asked[key]
    ]
    if differences:
        raise UsageError(
            f"{checkpoint.path} is of another run ({'; '.join(differences)}). "
            "Resume with the same settings, or start a new run under another --name"
        )


def changed_settings(checkpoint: Checkpoint | None, identity: RunIdentity) -> list[str]:
    """Return the settings in which a run differs from the checkpoint that it resumes from, in words."""
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
    """Load the loss's state and this rank's random generators, which the data order does not depend on.

    With another number of ranks than at the save, per-sample state is split anew, and generators stay as they are.
    """
    if checkpoint.shared is None:
        logging.warning(f"{checkpoint.path} was written by OpenCLIP: the state of the loss starts afresh.")
        return
    parts = {
        name: [open_table(table_file(file, name)) for file in checkpoint.rank_files]
        for name in checkpoint.shared["tables"]
    }
    loss.restore_state(checkpoint.shared["loss"], parts, checkpoint.path)
    if checkpoint.shared["world_size"] == distributed.world_size():
        file = checkpoint.rank_files[distributed.rank()]
        generators = load(file).get("random", {})
        try:
            set_random_state(generators)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"{file} holds no random generators as a save writes them ({error!r})") from error


def load_model(
    model: torch.nn.Module, state_dict: dict[str, torch.Tensor], source: str | Path = "the checkpoint"
) -> None:
    """Load weights into a model, both with or without DistributedDataParallel's prefix ``module.``.

    Raises:
        UsageError: they do not fit the model; the message names the source.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    try:
        model.load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()})
    except RuntimeError as error:
        raise UsageError(f"{source} is of another model: {one_line(error)}") from error
