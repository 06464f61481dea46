"""Checkpoints: a model file for OpenCLIP, and beside it what else an exact resume needs.

``epoch_K.pt`` (``epoch_K_step_S.pt`` in mid-epoch, ``epoch_latest.pt`` for ``--save-most-recent``) is OpenCLIP's
dictionary. The loss's state, the random generators and the position in the data lie in the folder of the same name with
``.state/``, in a sub-folder named by the step::

    epoch_3.pt
    epoch_3.state/step_1200/shared.pt       the same on all ranks: loss, position
    epoch_3.state/step_1200/rank_0000.pt    of one rank: random generators
    epoch_3.state/step_1200/rank_0000.normalizer.table.npy    of one rank: its part of a table of per-sample state

A save writes everything under temporary names, moves the state folder into place first and the model file last. Until
that last rename the old checkpoint is complete, so a killed save costs nothing but itself.
"""

import contextlib
import functools
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training.errors import UsageError
from openclip_ext.training.table_files import TablePart, open_table, restore_table, write_table

LATEST = "epoch_latest"
_NAME = re.compile(r"epoch_(\d+)(?:_step_(\d+))?$")
# What a full disk or a file-size limit raises from Python's and from torch's writers.
_WRITE_ERRORS = (OSError, RuntimeError)


@dataclass
class Position:
    """Where the run stands: all that decides which sample comes next.

    Attributes:
        epoch: number of completed epochs.
        step: optimizer steps over the run.
        step_in_epoch: optimizer steps in the epoch under way.
        progress: what the loader has handed out of that epoch (see ``data/train_loader.py``); kept up to date at saves.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    progress: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint must have in common with the run that resumes from it."""

    model: str
    loss: str
    num_samples: int
    global_batch: int
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    model_file: dict[str, Any]
    shared: dict[str, Any] | None  # None: a checkpoint of stock OpenCLIP
    rank_files: tuple[Path, ...] = ()

    @property
    def position(self) -> Position:
        if self.shared is None:
            return Position(epoch=self.model_file["epoch"])
        return Position(**self.shared["position"])


# --- random generators -----------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of all generators that training draws from, as tensors and plain types."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray), "only the form without legacy=False is a tuple"
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        # numpy's own state does not load with weights_only=True.
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue the generators where ``random_state`` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


# --- saving ----------------------------------------------------------------------------------------------------------


def checkpoint_name(position: Position) -> str:
    """``epoch_K`` at the end of an epoch, ``epoch_K_step_S`` within one; K is the number of completed epochs."""
    if position.step_in_epoch == 0:
        return f"epoch_{position.epoch}"
    return f"epoch_{position.epoch}_step_{position.step}"


def save(
    folder: Path,
    name: str,
    model_file: Callable[[], dict[str, Any]],
    loss: ContrastiveLoss,
    position: Position,
    identity: RunIdentity,
) -> Path:
    """Write a checkpoint from all ranks; either it is complete afterwards or nothing has changed.

    Args:
        folder: the run's ``checkpoints/``.
        name: file name without ending.
        model_file: makes OpenCLIP's dictionary; called on the master only.
        loss: its state is saved.
        position: where the run stands.
        identity: what a resuming run must agree with.

    Returns:
        The model file's path.

    Raises:
        OSError: some rank could not write, on every rank.
    """
    state_folder = folder / f"{name}.state" / f"step_{position.step}"
    temporary = folder / f"{name}.state" / f"tmp_step_{position.step}"
    if distributed.is_master():
        shutil.rmtree(temporary, ignore_errors=True)
    _together(lambda: temporary.mkdir(parents=True, exist_ok=True))
    try:
        _together(lambda: _write_state(temporary, loss, position, identity))
        _together(lambda: _commit(folder / f"{name}.pt", temporary, state_folder, model_file), master_only=True)
    except OSError:
        if distributed.is_master():
            _discard(temporary, folder / f"{name}.pt", state_folder)
        raise
    return folder / f"{name}.pt"


def _write_state(folder: Path, loss: ContrastiveLoss, position: Position, identity: RunIdentity) -> None:
    tables = loss.tables()
    if distributed.is_master():
        state = {"loss": loss.replicated_state(), "position": asdict(position), "identity": asdict(identity)}
        _write(folder / "shared.pt", {**state, "world_size": distributed.world_size(), "tables": list(tables)})
    rank_file = folder / f"rank_{distributed.rank():04d}.pt"
    _write(rank_file, {"random": random_state()})
    for name, table in tables.items():
        _write_file(_table_file(rank_file, name), functools.partial(write_table, table))


def _table_file(rank_file: Path, table: str) -> Path:
    """Where a rank's part of a table is, given the rank's other file."""
    return rank_file.with_name(f"{rank_file.stem}.{table}.npy")


def _commit(target: Path, temporary: Path, state_folder: Path, model_file: Callable[[], dict[str, Any]]) -> None:
    """The master's part: the model file under a temporary name, then both renames, the model file's last."""
    unfinished = target.with_suffix(".pt.tmp")
    _write(unfinished, model_file())
    # A folder of this very step is the leftover of a save that was killed between its two renames, or the same state.
    shutil.rmtree(state_folder, ignore_errors=True)
    os.replace(temporary, state_folder)
    os.replace(unfinished, target)
    for other in state_folder.parent.iterdir():
        if other != state_folder:
            shutil.rmtree(other, ignore_errors=True)


def _discard(temporary: Path, target: Path, state_folder: Path) -> None:
    """Remove what a failed save has left; the state that the existing model file needs stays."""
    shutil.rmtree(temporary, ignore_errors=True)
    target.with_suffix(".pt.tmp").unlink(missing_ok=True)
    if not target.exists():
        shutil.rmtree(state_folder.parent, ignore_errors=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    _write_file(path, lambda file: torch.save(content, file))


def _write_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write and flush to the device, so that a rename never names an empty file."""
    try:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except _WRITE_ERRORS as error:
        path.unlink(missing_ok=True)
        raise OSError(f"cannot write {path.name} ({error})") from error


def _together(action: Callable[[], Any], master_only: bool = False) -> None:
    """Run a step of a save on all ranks; when one fails, all raise, so that no rank waits for another for ever."""
    failure = None
    if distributed.is_master() or not master_only:
        try:
            action()
        except _WRITE_ERRORS as error:
            failure = f"rank {distributed.rank()}: {error}"
    failures = [reason for reason in distributed.all_gather_object(failure) if reason is not None]
    if failures:
        raise OSError("; ".join(failures))


def remove(path: Path) -> None:
    """Delete a checkpoint, the model file first: without it the state is no checkpoint."""
    path.unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(".state"), ignore_errors=True)


def remove_older_mid_epoch(folder: Path, kept: Path) -> None:
    """Of the checkpoints in mid-epoch only the newest is kept, and none that a whole epoch has overtaken."""
    for path in folder.glob("epoch_*_step_*.pt"):
        if path != kept:
            remove(path)


# --- finding and loading ---------------------------------------------------------------------------------------------


def find_latest(folder: Path) -> Path | None:
    """The newest usable checkpoint of a run; unreadable ones are named in a warning and passed over."""
    newest: tuple[int, int, Path] | None = None
    for path in sorted(folder.glob("*.pt")):
        if path.stem != LATEST and not _NAME.match(path.stem):
            continue
        try:
            checkpoint = read(path, mmap=True)
        except UsageError as error:
            logging.warning(f"Passing over a checkpoint: {error}")
            continue
        order = (checkpoint.position.epoch, checkpoint.position.step, path)
        newest = order if newest is None else max(newest, order)
    return None if newest is None else newest[2]


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint's model file and shared state (per-rank files are read by ``restore_loss``).

    Raises:
        UsageError: no such file, unreadable, or its state is missing or incomplete.
    """
    if not path.is_file():
        raise UsageError(f"checkpoint {path} does not exist")
    model_file = _load(path, mmap)
    if "state_dict" not in model_file:
        raise UsageError(f"{path} holds no training checkpoint (keys: {', '.join(list(model_file)[:5])}, ...)")
    step = model_file.get("step")
    if step is None:
        return Checkpoint(path, model_file, shared=None)
    folder = path.with_suffix(".state") / f"step_{step}"
    shared = _load(folder / "shared.pt", mmap)
    ranks = tuple(folder / f"rank_{rank:04d}.pt" for rank in range(shared["world_size"]))
    files = [*ranks, *(_table_file(rank, table) for rank in ranks for table in shared["tables"])]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(f"the state of {path} is incomplete, missing: {', '.join(missing)}")
    return Checkpoint(path, model_file, shared, ranks)


def _load(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: the checkpoint is incomplete") from error
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise UsageError(f"cannot read {path}: {error}") from error


def check_identity(checkpoint: Checkpoint, identity: RunIdentity) -> None:
    """Refuse to resume a different run, naming every difference.

    Raises:
        UsageError: the checkpoint is of another model, loss, data set, seed or (in mid-epoch) global batch.
    """
    if checkpoint.shared is None:
        return
    found, asked = checkpoint.shared["identity"], asdict(identity)
    compared = set(asked)
    if checkpoint.position.step_in_epoch == 0:
        compared.discard("global_batch")  # between epochs the batch may change
    differences = [
        f"{key}: checkpoint {found[key]}, run {asked[key]}" for key in sorted(compared) if found[key] != asked[key]
    ]
    if differences:
        raise UsageError(
            f"{checkpoint.path} is of another run ({'; '.join(differences)}). "
            "Resume with the same settings, or start a new run under another --name"
        )


def restore_loss(checkpoint: Checkpoint, loss: ContrastiveLoss) -> None:
    """Load the loss's state and this rank's random generators; per-sample state is cut anew for other world sizes.

    With another number of ranks than at the save, generators start from the run's seeds (the data order does not depend
    on them).
    """
    if checkpoint.shared is None:
        logging.warning(f"{checkpoint.path} was written by OpenCLIP: the state of the loss starts afresh.")
        return
    parts = _saved_tables(checkpoint.shared["tables"], checkpoint.rank_files)
    tables = loss.tables()
    if parts.keys() != tables.keys():
        raise UsageError(
            f"{checkpoint.path} has per-sample state of {sorted(parts)}, this run's loss keeps {sorted(tables)}: resume with "
            "the options of the saved run"
        )
    if any(part.dtype == torch.float64 for saved in parts.values() for part in saved):
        loss.double()
    loss.load_replicated_state(checkpoint.shared["loss"])
    for name, table in tables.items():
        restore_table(table, parts[name])
    if checkpoint.shared["world_size"] == distributed.world_size():
        set_random_state(_load(checkpoint.rank_files[distributed.rank()])["random"])


def _saved_tables(names: list[str], rank_files: Sequence[Path]) -> dict[str, list[TablePart]]:
    """All ranks' parts of the tables in a checkpoint, to be read in parts."""
    return {name: [open_table(_table_file(file, name)) for file in rank_files] for name in names}


def load_model(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Load weights saved with or without DistributedDataParallel's ``module.`` into a model with or without it."""
    state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise UsageError(f"the checkpoint is of another model: {str(error)[:500]}") from error


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Cut the lines that lie beyond a checkpoint, and an unfinished last one, out of a log of JSON lines."""
    import json

    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if keep(json.loads(line)):
                kept.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
