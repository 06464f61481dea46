"""Where a run starts: afresh, or from a checkpoint, with the logs cut to it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training import checkpoint as ckpt
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import Checkpoint, Position, RunIdentity
from openclip_ext.training.errors import UsageError


def find_checkpoint(resume: str | None, folder: Path | None, fetch: Callable[[Path], None]) -> Checkpoint | None:
    """Read the checkpoint that ``--resume`` names; all ranks read the one that the master found.

    Args:
        resume: a path, ``latest``, or None.
        folder: the run's.
        fetch: brings checkpoints from elsewhere into the folder; called on the master.

    Raises:
        UsageError: the checkpoint does not exist or cannot be read, or there is no folder to look into.
    """
    if resume is None:
        return None
    if resume != "latest":
        return ckpt.read(Path(resume))
    if folder is None:
        raise UsageError("--resume latest needs a run folder, and --logs none has none")
    if distributed.is_master():
        fetch(folder)
    path = distributed.broadcast_object(ckpt.find_latest(folder / "checkpoints") if distributed.is_master() else None)
    if distributed.is_master():
        logging.info(f"Resuming from {path}." if path else f"No checkpoint in {folder} yet: starting afresh.")
    return None if path is None else ckpt.read(path)


def restore(
    checkpoint: Checkpoint | None,
    identity: RunIdentity,
    steps_per_epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    loss: ContrastiveLoss,
) -> Position:
    """Load a checkpoint into the parts of a run.

    Args:
        checkpoint: None for a fresh run, which starts at the beginning.
        identity: of this run.
        steps_per_epoch: of this run; positions an OpenCLIP checkpoint, which has epochs only.
        model, optimizer, scaler, loss: are changed.

    Returns:
        Where the run goes on.

    Raises:
        UsageError: the checkpoint is of another run.
    """
    if checkpoint is None:
        return Position()
    ckpt.check_identity(checkpoint, identity)
    content = checkpoint.model_file
    ckpt.load_model(model, content["state_dict"])
    try:
        parallel.load_optimizer_state_dict(model, optimizer, content["optimizer"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"the optimizer state in {checkpoint.path} does not fit this run: {error}") from error
    if scaler is not None and "scaler" in content:
        scaler.load_state_dict(content["scaler"])
    ckpt.restore_loss(checkpoint, loss)
    if checkpoint.shared is None:
        return Position(epoch=content["epoch"], step=content["epoch"] * steps_per_epoch)
    return checkpoint.position


def cut_logs(folder: Path, position: Position) -> None:
    """Remove what was logged beyond the checkpoint: those steps come again."""
    ckpt.truncate_jsonl(
        folder / "metrics.jsonl",
        lambda line: line["step"] < position.step + ("evaluation" in line),
    )
    ckpt.truncate_jsonl(folder / "checkpoints" / "results.jsonl", lambda line: line.get("epoch", 0) <= position.epoch)


def lacks_evaluation(folder: Path | None, position: Position) -> bool:
    """Whether the run was stopped between an epoch's checkpoint and its evaluation."""
    if folder is None or position.step_in_epoch > 0 or position.epoch == 0:
        return False
    results = folder / "checkpoints" / "results.jsonl"
    lines = results.read_text().splitlines() if results.is_file() else []
    return all(json.loads(line).get("epoch") != position.epoch for line in lines)
