"""Save a checkpoint from all ranks, so that a save that is killed leaves the old one usable; and remove old ones."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files.writing import write_atomically
from openclip_ext.state.table_files import write_table
from openclip_ext.training.checkpoint.format import (
    ADAPTER,
    CHECKSUMS,
    UNREADABLE,
    Position,
    RunIdentity,
    load,
    random_state,
    table_file,
)

# A network file system may show the files of another node some seconds late.
_NODE_SECONDS = 30.0
T = TypeVar("T")
# Errors of Python's and of torch's writers on a full disk.
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
    """Write a checkpoint from all ranks, and return the model file's path. A failed save changes nothing.

    Args:
        folder: the run's ``checkpoints/``.
        name: file name without suffix.
        model_file: OpenCLIP's dictionary, complete on the master.
        loss: the loss, whose state is saved.
        position, identity: saved with it.
        parts: other parts of the run whose state is saved, by name; that of the master, after all ranks have asked for theirs.

    Raises:
        OSError: on every rank, if some rank could not write.
    """
    states = {part: stateful.state_dict() for part, stateful in (parts or {}).items()}
    target = folder / f"{name}.pt"
    state_folder = folder / f"{name}.state" / f"step_{position.step}"
    temporary = folder / f"{name}.state" / f"tmp_step_{position.step}"
    if distributed.is_master():
        shutil.rmtree(temporary, ignore_errors=True)
    _together(lambda: temporary.mkdir(parents=True, exist_ok=True))
    try:
        checksums = _together(lambda: _write_state(temporary, loss, position, identity, states))
        _together(lambda: _commit(target, temporary, state_folder, model_file, checksums), master_only=True)
    except OSError:
        if distributed.is_master():
            _discard(temporary, target, state_folder)
        raise
    return target


def _write_state(
    folder: Path, loss: ContrastiveLoss, position: Position, identity: RunIdentity, parts: dict[str, Any]
) -> dict[str, str]:
    """Write this rank's files, and return their checksums."""
    tables = loss.tables()
    written = {}
    if distributed.is_master():
        run = {"world_size": distributed.world_size(), "position": asdict(position), "identity": asdict(identity)}
        shared = {**run, "parts": parts, "loss": loss.replicated_state(), "tables": list(tables)}
        written["shared.pt"] = _write(folder / "shared.pt", shared)
    rank_file = folder / f"rank_{distributed.rank():04d}.pt"
    written[rank_file.name] = _write(rank_file, {"random": random_state()})
    for name, table in tables.items():
        file = table_file(rank_file, name)
        written[file.name] = _write_file(file, functools.partial(write_table, table))
    return written


def _commit(
    target: Path,
    temporary: Path,
    state_folder: Path,
    model_file: dict[str, Any],
    checksums: list[dict[str, str]],
) -> None:
    """Write the model file under a temporary name, and rename first the state folder, then the model file."""
    unfinished = target.with_suffix(".pt.tmp")
    everything = {name: value for part in checksums for name, value in part.items()}
    _wait_for_other_nodes(temporary, everything)
    everything[target.name] = _write(unfinished, model_file)
    _write_file(temporary / CHECKSUMS, lambda file: file.write(json.dumps(everything, indent=1).encode()))
    # A folder of this very step is the leftover of a save that was killed between its two renames.
    shutil.rmtree(state_folder, ignore_errors=True)
    os.replace(temporary, state_folder)
    os.replace(unfinished, target)
    for other in state_folder.parent.iterdir():
        if other != state_folder:
            shutil.rmtree(other, ignore_errors=True)


def _wait_for_other_nodes(folder: Path, names: Iterable[str]) -> None:
    """Wait for the files of other nodes; raise OSError if they do not come, because the nodes share no folder."""
    deadline = time.monotonic() + _NODE_SECONDS
    while unseen := sorted(name for name in names if not (folder / name).is_file()):
        if time.monotonic() > deadline:
            raise OSError(
                f"{', '.join(unseen)} of other nodes not found in {folder}: all nodes must share one --logs folder"
            )
        time.sleep(0.2)


def _discard(temporary: Path, target: Path, state_folder: Path) -> None:
    """Remove what a failed save has left, but not the state of the existing model file."""
    shutil.rmtree(temporary, ignore_errors=True)
    if not target.exists():
        shutil.rmtree(state_folder.parent, ignore_errors=True)
    target.with_suffix(".pt.tmp").unlink(missing_ok=True)


def _write(path: Path, content: dict[str, Any]) -> str:
    return _write_file(path, lambda file: torch.save(content, file))


class _Hashed:
    """An open file whose checksum is made while it is written, from front to back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write some bytes."""
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Hand on what is written to the system."""
        self._file.flush()


def _write_file(path: Path, write: Callable[[Any], Any]) -> str:
    """Write a file and flush it to the disk, so that it is never empty after a rename; return its checksum."""
    try:
        with open(path, "wb") as file:
            hashed = _Hashed(file)
            write(hashed)
            file.flush()
            os.fsync(file.fileno())
        return hashed.digest.hexdigest()
    except _WRITE_ERRORS as error:
        path.unlink(missing_ok=True)
        # torch's writer says "unexpected pos" where the file has said why.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot write {path.name} ({getattr(reason, 'strerror', None) or reason})") from error


def _together(action: Callable[[], T], master_only: bool = False) -> list[T]:
    """Run a part of a save on all ranks, and return the results. If one fails, all raise, so that no rank waits for ever."""
    failure, results = None, []
    if distributed.is_master() or not master_only:
        try:
            results.append(action())
        except _WRITE_ERRORS as error:
            failure = f"rank {distributed.rank()}: {error}"
    outcomes = distributed.all_gather_object((failure, results))
    failures = [reason for reason, _ in outcomes if reason is not None]
    if failures:
        raise OSError("; ".join(failures))
    return [result for _, results in outcomes for result in results]


def save_model_file(path: Path, content: dict[str, Any]) -> None:
    """Write a model file without a state, atomically; warn if that fails."""
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    except _WRITE_ERRORS as error:
        logging.warning(f"{path.name} could not be saved ({error}); training goes on.")


def save_adapter(model_file: Path, write: Callable[[Path], None]) -> None:
    """Let the master write an adapter's folder beside a model file. All ranks must call it; all raise OSError if it fails."""

    def replace() -> None:
        target = model_file.with_suffix(ADAPTER)
        unfinished = target.with_name(f".{target.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        write(unfinished)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)

    _together(replace, master_only=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that could not be read, to keep it and to free its name; all ranks must call this."""

    def rename() -> None:
        for part in (path, path.with_suffix(".state"), path.with_suffix(ADAPTER)):
            if part.exists():
                number = sum(1 for _ in path.parent.glob(f"{part.name}{UNREADABLE}*"))
                part.rename(part.with_name(f"{part.name}{UNREADABLE}{number or ''}"))

    _together(rename, master_only=True)


def remove(path: Path) -> None:
    """Delete a checkpoint, or warn that it cannot be deleted. After a kill in between the next start cleans up."""
    unfinished = path.with_suffix(".pt.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, unfinished)
        for beside in (".state", ADAPTER):
            shutil.rmtree(path.with_suffix(beside), ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    except OSError as error:
        logging.warning(f"The old checkpoint {path} cannot be removed ({error}). Training goes on: remove it by hand")


def remove_older_mid_epoch(folder: Path, kept: Path, spared: Container[Path] = ()) -> None:
    """Remove the checkpoints in mid-epoch of a run's ``checkpoints/``, except for ``kept`` and ``spared``."""
    for path in folder.glob("epoch_*_step_*.pt"):
        if path != kept and path not in spared:
            remove(path)


def remove_leftovers(folder: Path, spared: Container[Path] = ()) -> None:
    """Remove what killed saves left in a run's ``checkpoints/``, except for parts of ``spared``, while nobody saves."""
    for state in folder.glob("epoch_*.state"):
        model_file = state.with_suffix(".pt")
        if model_file in spared or not state.is_dir():
            continue
        try:
            used = f"step_{load(model_file, mmap=True).get('step')}" if model_file.is_file() else None
        except UsageError:
            continue
        for part in state.iterdir():
            if part.name != used:
                shutil.rmtree(part, ignore_errors=True)
        if used is None:
            shutil.rmtree(state, ignore_errors=True)
    for adapter in (*folder.glob(f"epoch_*{ADAPTER}"), *folder.glob(f".*{ADAPTER}.partial")):
        model_file = adapter.with_suffix(".pt")
        if not model_file.is_file() and model_file not in spared:
            shutil.rmtree(adapter, ignore_errors=True)
    # Last: a state without such a file counts as one whose model file was lost.
    for unfinished in (*folder.glob("epoch_*.pt.tmp"), *folder.glob(".*.partial")):
        with contextlib.suppress(OSError):
            unfinished.unlink()
