"""Where a run starts: afresh, or from a checkpoint, with the logs cut to it."""

import contextlib
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files import json_lines
from openclip_ext.files.schema import read_as
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import checkpoint as ckpt
from openclip_ext.training.checkpoint.checkpoint import Checkpoint, Position, RunIdentity
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.ema import TRAINED_KEY, ModelEma
from openclip_ext.training.optimizer import HYPERPARAMETERS
from openclip_ext.training.runtime.run_folder import SAVED, fetch_checkpoints


class Start(NamedTuple):
    """What a run starts from: a checkpoint or none, and ``unreadable`` ones in its folder that nobody may overwrite."""

    checkpoint: Checkpoint | None = None
    unreadable: frozenset[Path] = frozenset()


def find_start(resume: str | None, config: RunFolderConfig) -> Start:
    """Find, verify and read the checkpoint that ``--resume`` names; all ranks read the one that the master found.

    Raises:
        UsageError: the checkpoint does not exist or cannot be read, or there is no folder to look into.
    """
    if resume is None:
        return Start()
    if resume == "latest" and config.folder is None:
        raise UsageError("--resume latest needs a run folder, and --logs none has none")
    found = distributed.on_master(lambda: _find(resume, config))
    return Start(None if found.newest is None else ckpt.read(found.newest), found.unreadable)


def _find(resume: str, config: RunFolderConfig) -> ckpt.Scan:
    if resume != "latest":
        try:
            ckpt.verify(ckpt.read(Path(resume), mmap=True))
        except UsageError as error:
            good = None
            with contextlib.suppress(UsageError):
                good = ckpt.scan(Path(resume).parent).newest
            raise UsageError(f"{error}. {good} is good" if good else str(error)) from error
        return ckpt.Scan(Path(resume), frozenset())
    assert config.folder is not None
    fetch_checkpoints(config)
    found = ckpt.scan(config.folder / "checkpoints")
    if found.newest is None:
        _refuse_lost_checkpoints(config.folder)
    nothing = f"No checkpoint in {config.folder} yet: starting afresh."
    logging.info(f"Resuming from {found.newest}." if found.newest else nothing)
    return found


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Raise UsageError for a run that has saved, and whose checkpoints are gone: it would lose its log, too.

    A run that was killed before its first save has nothing to go on from, and starts afresh.
    """
    steps = [line for line in json_lines.read(folder / "metrics.jsonl") if "loss" in line]
    if steps and (folder / SAVED).exists():
        raise UsageError(
            f"{folder} has the log of {len(steps)} steps and no checkpoint, though the run has saved some: is the disk of "
            f"{folder / 'checkpoints'} there? To start afresh and lose the log, remove {folder / 'metrics.jsonl'}"
        )


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
    ckpt.check_identity(checkpoint, identity, keeps_samples=loss.needs_index)
    content = checkpoint.model_file
    if "optimizer" not in content:
        raise UsageError(
            f"{checkpoint.path} has the model alone, as best.pt does: to continue the run give --resume latest, to start "
            f"another one from this model --pretrained {checkpoint.path}"
        )
    ckpt.load_model(model, content.get(TRAINED_KEY, content["state_dict"]), checkpoint.path)
    _load_optimizer(model, optimizer, content.get("optimizer"), checkpoint.path)
    if scaler is not None and "scaler" in content:
        scaler.load_state_dict(content["scaler"])
    ckpt.restore_loss(checkpoint, loss)
    if checkpoint.shared is None:
        steps = content["epoch"] * steps_per_epoch
        return Position(content["epoch"], steps, samples=steps * identity.global_batch)
    return checkpoint.position


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
    if checkpoint is not None and TRAINED_KEY in checkpoint.model_file:
        ema.load_state_dict(checkpoint.model_file["state_dict"])
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
