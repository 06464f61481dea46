"""Save a checkpoint from all ranks, and remove old checkpoints. If a save is killed, the old checkpoint stays usable."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from openclip_ext import distributed
from openclip_ext.checkpoint import format as ckpt
from openclip_ext.checkpoint.format import ADAPTER, Position, RunIdentity
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files.writing import write_atomically
from openclip_ext.losses.heads import HEADS_KEY
from openclip_ext.state.table_files import write_table
from openclip_ext.training import lora

logger = get_logger(__name__)

# Seconds to wait for files of other nodes, which a network file system may show with a delay.
_NODE_SECONDS = 30.0
T = TypeVar("T")
# Keys of a checkpoint that belong to the model, not to the training state.
_MODEL_ENTRIES = ("epoch", "name", "state_dict", HEADS_KEY)
# Errors that Python and torch raise when the disk is full.
_WRITE_ERRORS = (OSError, RuntimeError)


def save(
    folder: Path,
    name: str,
    model_file: dict[str, Any],
    loss: ContrastiveLoss,
    position: Position,
    identity: RunIdentity,
    parts: Mapping[str, Stateful] | None = None,
) -> Path:
    """Write a checkpoint. Return the model file's path. A failed save keeps old files. Collective: all ranks call it.

    Args:
        folder, name: The run's ``checkpoints/``, and the file name without suffix.
        model_file: OpenCLIP's checkpoint dictionary. Only rank 0 writes it, so other ranks may pass an incomplete one.
        loss, position, identity: Saved in ``.state``, together with the state of the random generators.
        parts: Other parts of the run, by name. All ranks call each part's ``state_dict``. Rank 0's result is saved.

    Raises:
        OSError: At least one rank could not write. All ranks raise the error.
    """
    states = {part: stateful.state_dict() for part, stateful in (parts or {}).items()}
    target = folder / f"{name}.pt"
    state_folder = folder / f"{name}.state" / f"step_{position.step}"
    temporary = state_folder.with_name(f"tmp_{state_folder.name}")
    write_state = functools.partial(_write_state, temporary, loss, asdict(position), asdict(identity), states)
    _together(lambda: temporary.mkdir(parents=True, exist_ok=True))
    try:
        checksums = {name: value for part in _together(write_state) for name, value in part.items()}
        _together(lambda: _commit(target, temporary, state_folder, model_file, checksums), master_only=True)
    except OSError:
        if distributed.is_rank0():
            shutil.rmtree(temporary, ignore_errors=True)
            if not target.exists():
                shutil.rmtree(state_folder.parent, ignore_errors=True)
            target.with_suffix(".pt.tmp").unlink(missing_ok=True)
        raise
    return target


def _write_state(folder: Path, loss: ContrastiveLoss, position: Any, identity: Any, parts: Any) -> dict[str, str]:
    """Write this rank's files, and return their checksums."""
    tables = loss.tables()
    written = {}
    if distributed.is_rank0():
        run = {"world_size": distributed.world_size(), "position": position, "identity": identity}
        shared = {**run, "parts": parts, "loss": loss.replicated_state(), "tables": list(tables)}
        written["shared.pt"] = _write(folder / "shared.pt", shared)
    rank_file = folder / f"rank_{distributed.rank():04d}.pt"
    written[rank_file.name] = _write(rank_file, {"random": ckpt.random_state()})
    for name, table in tables.items():
        file = ckpt.table_file(rank_file, name)
        written[file.name] = _write_file(file, functools.partial(write_table, table))
    return written


def _commit(target: Path, temporary: Path, state_folder: Path, model_file: dict[str, Any], checksums: Any) -> None:
    """Write the model file under a temporary name, then rename the state folder, and finally rename the model file."""
    deadline = time.monotonic() + _NODE_SECONDS
    while unseen := sorted(name for name in checksums if not (temporary / name).is_file()):
        if time.monotonic() > deadline:
            missing = f"{', '.join(unseen)} from other nodes not found in {temporary}"
            raise OSError(f"{missing}: all nodes must share one --logs folder")
        time.sleep(0.2)
    unfinished = target.with_suffix(".pt.tmp")
    checksums = checksums | {target.name: _write(unfinished, model_file)}
    _write_file(temporary / ckpt.CHECKSUMS, lambda file: file.write(json.dumps(checksums, indent=1).encode()))
    # A save that was killed between its two renames may have left a folder for the same step.
    shutil.rmtree(state_folder, ignore_errors=True)
    os.replace(temporary, state_folder)
    os.replace(unfinished, target)
    for other in state_folder.parent.iterdir():
        if other != state_folder:
            shutil.rmtree(other, ignore_errors=True)


def _write(path: Path, content: dict[str, Any]) -> str:
    return _write_file(path, lambda file: torch.save(content, file))


class _HashingWriter:
    """A file that is written sequentially and computes the SHA-256 of its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.flush = file, hashlib.sha256(), file.flush

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write_file(path: Path, write: Callable[[Any], Any]) -> str:
    """Write a file, and return its checksum. The file is flushed to disk, so that a crash after its rename loses no data."""
    try:
        with open(path, "wb") as file:
            writer = _HashingWriter(file)
            write(writer)
            file.flush()
            os.fsync(file.fileno())
        return writer.digest.hexdigest()
    except _WRITE_ERRORS as error:
        # torch only reports "unexpected pos"; the original OSError contains the reason.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot write {path.name} ({getattr(reason, 'strerror', None) or reason})") from error


def _together(action: Callable[[], T], master_only: bool = False) -> list[T]:
    """Run an action on all ranks. Return all results. If a rank fails, all ranks raise OSError, so that none waits forever."""
    failure, results = None, []
    if distributed.is_rank0() or not master_only:
        try:
            results.append(action())
        except _WRITE_ERRORS as error:
            failure = f"rank {distributed.rank()}: {error}"
    outcomes = distributed.all_gather_object((failure, results))
    failures = [reason for reason, _ in outcomes if reason is not None]
    if failures:
        raise OSError("; ".join(failures))
    return [result for _, results in outcomes for result in results]


def save_model(path: Path, content: dict[str, Any], model: nn.Module) -> None:
    """Write a model file without ``.state``, and its adapter, if any, atomically. On failure, log a warning. Collective."""
    entries = {name: content[name] for name in _MODEL_ENTRIES if name in content}
    try:
        save_adapter(path, content, model)
        _together(lambda: write_atomically(path, lambda file: torch.save(entries, file)), master_only=True)
    except OSError as error:
        if distributed.is_rank0():
            logger.warning(f"{path.name} could not be saved ({error}); training continues.")


def save_adapter(model_file: Path, content: dict[str, Any], model: nn.Module) -> None:
    """On rank 0, write the adapter, if any, next to the model file. If this fails, all ranks raise OSError. Collective.

    Call this before the model file is saved, so that each model file on disk has its adapter.
    """

    def replace() -> None:
        target = model_file.with_suffix(ADAPTER)
        unfinished = target.with_name(f".{target.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        lora.save_adapter(content, model, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)

    if lora.is_adapted(model):
        _together(replace, master_only=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that cannot be read, so that the run does not overwrite or remove it."""
    for part in (path, path.with_suffix(".state"), path.with_suffix(ADAPTER)):
        if part.exists():
            name = f"{part.name}.unreadable"
            part.rename(part.with_name(f"{name}{len([*path.parent.glob(f'{name}*')]) or ''}"))


def remove(path: Path) -> None:
    """Delete a checkpoint. Log a warning if this fails.

    If the process is killed during the deletion, the next launch deletes the remaining files.
    """
    unfinished = path.with_suffix(".pt.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, unfinished)
        for suffix in (".state", ADAPTER):
            shutil.rmtree(path.with_suffix(suffix), ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(f"The old checkpoint {path} cannot be removed ({error}). Training continues: remove it by hand")


def remove_older_mid_epoch(folder: Path, kept: Path) -> None:
    """Remove all mid-epoch checkpoints in a run's ``checkpoints/`` except ``kept``."""
    for path in folder.glob("epoch_*_step_*.pt"):
        if path != kept:
            remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove files that killed saves left in a run's ``checkpoints/``. Do not call this during a save."""
    folders = [*folder.glob("epoch_*.state"), *folder.glob(f"epoch_*{ADAPTER}"), *folder.glob(f".*{ADAPTER}.partial")]
    orphans = [path for path in folders if not path.with_suffix(".pt").is_file()]
    for path in (*orphans, *folder.glob("epoch_*.state/tmp_step_*")):
        # A killed save leaves a temporary model file. Without such a file, a user may have renamed the model file.
        if any(path.glob(f"step_*/{ckpt.CHECKSUMS}")) and not path.with_suffix(".pt.tmp").exists():
            logger.warning(
                f"{path} has no {path.stem}.pt next to it: if you renamed the checkpoint, undo it; if not, remove the folder"
            )
        else:
            shutil.rmtree(path, ignore_errors=True)
    for unfinished in (*folder.glob("epoch_*.pt.tmp"), *folder.glob(".*.partial")):
        with contextlib.suppress(OSError):
            unfinished.unlink()
