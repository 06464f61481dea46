"""Checkpoints: a model file for OpenCLIP, and beside it a folder with the rest of what an exact resume needs.

``epoch_K.pt`` (``epoch_K_step_S.pt`` in mid-epoch, ``epoch_latest.pt`` for ``--save-most-recent``) is OpenCLIP's
dictionary. The folder of the same name with ``.state`` has a sub-folder named by the step::

    epoch_3.pt
    epoch_3.state/step_1200/shared.pt       the same on all ranks: loss, position
    epoch_3.state/step_1200/rank_0000.pt    of one rank: random generators
    epoch_3.state/step_1200/rank_0000.normalizer.table.npy    of one rank: its part of a table of per-sample state
    epoch_3.state/step_1200/checksums.json  SHA-256 of all of these and of epoch_3.pt

A save writes everything under temporary names, and renames the state folder first and the model file last. Until that last
rename the old checkpoint is complete. A resume verifies the checksums.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pickle
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.files.schema import read_as
from openclip_ext.files.writing import write_atomically
from openclip_ext.training.checkpoint.table_files import open_table, restore_table, write_table

LATEST = "epoch_latest"
CHECKSUMS = "checksums.json"
UNREADABLE = ".unreadable"
_NAME = re.compile(r"epoch_(\d+)(?:_step_(\d+))?$")
_BLOCK = 1 << 22
# A network file system may show the files of another node some seconds late.
_NODE_SECONDS = 30.0
_MAX_RANKS = 10**5
T = TypeVar("T")
# Errors of Python's and of torch's writers on a full disk.
_WRITE_ERRORS = (OSError, RuntimeError)


@dataclass
class Position:
    """The position of a run: all that decides which sample comes next.

    Attributes:
        epoch: number of completed epochs.
        step: optimizer steps of the run.
        step_in_epoch: optimizer steps of the current epoch.
        progress: the loader's progress in that epoch (``TrainLoader.progress``), brought up to date by a save.
        samples: samples that the run was trained on; a resume may change how many a step has.
        skipped: steps of the run that changed nothing.
        bad: the bad samples (``BadSamples.state``).
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    progress: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    skipped: int = 0
    bad: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint must have in common with the run that resumes from it.

    Attributes:
        model, loss, optimizer: names.
        num_samples, data: size of the index space, and :attr:`openclip_ext.data.sources.source.Source.index_digest`.
        global_batch: samples of an optimizer step.
        seed: the run's seed.
        settings: ``run_folder.settings``, which may differ; a warning tells where.
    """

    model: str
    loss: str
    optimizer: str
    num_samples: int
    global_batch: int
    seed: int
    data: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Shared:
    """The entries of ``shared.pt``."""

    loss: dict[str, Any]
    position: Position
    identity: RunIdentity
    world_size: int
    tables: list[str]


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
    """Return the state of all random generators of the training, as tensors and plain types."""
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
    """Restore :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


# --- saving ----------------------------------------------------------------------------------------------------------


def checkpoint_name(position: Position) -> str:
    """Return ``epoch_K`` at the end of an epoch, ``epoch_K_step_S`` within one; K is the number of completed epochs."""
    if position.step_in_epoch == 0:
        return f"epoch_{position.epoch}"
    return f"epoch_{position.epoch}_step_{position.step}"


def save(
    folder: Path,
    name: str,
    model_file: dict[str, Any],
    loss: ContrastiveLoss,
    position: Position,
    identity: RunIdentity,
) -> Path:
    """Write a checkpoint from all ranks, and return the model file's path. A failed save changes nothing.

    Args:
        folder: the run's ``checkpoints/``.
        name: file name without suffix.
        model_file: OpenCLIP's dictionary, complete on the master.
        loss: the loss, whose state is saved.
        position, identity: saved with it.

    Raises:
        OSError: on every rank, if some rank could not write.
    """
    target = folder / f"{name}.pt"
    state_folder = folder / f"{name}.state" / f"step_{position.step}"
    temporary = folder / f"{name}.state" / f"tmp_step_{position.step}"
    if distributed.is_master():
        shutil.rmtree(temporary, ignore_errors=True)
    _together(lambda: temporary.mkdir(parents=True, exist_ok=True))
    try:
        checksums = _together(lambda: _write_state(temporary, loss, position, identity))
        _together(lambda: _commit(target, temporary, state_folder, model_file, checksums), master_only=True)
    except OSError:
        if distributed.is_master():
            _discard(temporary, target, state_folder)
        raise
    return target


def _write_state(folder: Path, loss: ContrastiveLoss, position: Position, identity: RunIdentity) -> dict[str, str]:
    """Write this rank's files, and return their checksums."""
    tables = loss.tables()
    written = {}
    if distributed.is_master():
        run = {"world_size": distributed.world_size(), "position": asdict(position), "identity": asdict(identity)}
        shared = {**run, "loss": loss.replicated_state(), "tables": list(tables)}
        written["shared.pt"] = _write(folder / "shared.pt", shared)
    rank_file = folder / f"rank_{distributed.rank():04d}.pt"
    written[rank_file.name] = _write(rank_file, {"random": random_state()})
    for name, table in tables.items():
        file = _table_file(rank_file, name)
        written[file.name] = _write_file(file, functools.partial(write_table, table))
    return written


def _table_file(rank_file: Path, table: str) -> Path:
    """Return the path of a rank's part of a table, given the rank's other file."""
    return rank_file.with_name(f"{rank_file.stem}.{table}.npy")


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


def _write_file(path: Path, write: Callable[[BinaryIO], Any]) -> str:
    """Write a file and flush it to the disk, so that it is never empty after a rename; return its checksum."""
    try:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        return checksum(path)
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


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def save_model_file(path: Path, content: dict[str, Any]) -> None:
    """Write a model file without a state, atomically; warn if that fails."""
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    except _WRITE_ERRORS as error:
        logging.warning(f"{path.name} could not be saved ({error}); training goes on.")


def set_aside(path: Path) -> None:
    """Rename a checkpoint that could not be read, to keep it and to free its name; all ranks must call this."""

    def rename() -> None:
        for part in (path, path.with_suffix(".state")):
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
        shutil.rmtree(path.with_suffix(".state"), ignore_errors=True)
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
            used = f"step_{_load(model_file, mmap=True).get('step')}" if model_file.is_file() else None
        except UsageError:
            continue
        for part in state.iterdir():
            if part.name != used:
                shutil.rmtree(part, ignore_errors=True)
        if used is None:
            shutil.rmtree(state, ignore_errors=True)
    # Last: a state without such a file counts as one whose model file was lost.
    for unfinished in (*folder.glob("epoch_*.pt.tmp"), *folder.glob(".*.partial")):
        with contextlib.suppress(OSError):
            unfinished.unlink()


# --- finding and loading ---------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """The checkpoints of a run: the newest verified one (None: there are none), and the newer ones that cannot be read."""

    newest: Path | None
    unreadable: frozenset[Path]


def scan(folder: Path) -> Scan:
    """Find the newest checkpoint of a run that can be read; a warning names each newer one that cannot.

    Raises:
        UsageError: there are checkpoints, and none can be read; or the folder cannot be listed.
    """
    try:
        if folder.exists():
            os.listdir(folder)  # ``glob`` finds nothing in a folder that cannot be read
    except OSError as error:
        raise UsageError(
            f"cannot look for checkpoints in {folder} ({error}): make it readable, or start afresh under another --name"
        ) from error
    candidates: list[tuple[int, int, Path]] = []
    unreadable: dict[Path, str] = {}
    for path in sorted(folder.glob("*.pt")):
        if path.stem != LATEST and not _NAME.match(path.stem):
            continue
        try:
            position = read(path, mmap=True).position
            candidates.append((position.epoch, position.step, path))
        except UsageError as error:
            unreadable[path] = str(error)
    for state in sorted(folder.glob("epoch_*.state")):
        if _lost_its_model_file(state):
            unreadable[state.with_suffix(".pt")] = f"{state} has no {state.stem}.pt beside it (deleted or renamed?)"
    newest = None
    for *_, path in sorted(candidates, reverse=True):
        try:
            verify(read(path, mmap=True))
            newest = path
            break
        except UsageError as error:
            unreadable[path] = str(error)
    for reason in unreadable.values():
        logging.warning(f"Passing over a checkpoint: {reason}")
    if newest is None and unreadable:
        raise UsageError(
            f"none of the checkpoints in {folder} can be read ({'; '.join(unreadable.values())}). Nothing was changed: "
            "restore one of them, or start afresh under another --name"
        )
    return Scan(newest, frozenset(unreadable))


def _lost_its_model_file(state: Path) -> bool:
    """Return whether the model file of a finished save is gone. A killed save leaves an unfinished one."""
    model_file = state.with_suffix(".pt")
    is_finished = any(state.glob(f"step_*/{CHECKSUMS}"))
    return is_finished and not model_file.exists() and not model_file.with_suffix(".pt.tmp").exists()


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint's model file and shared state; raise UsageError if they are missing, incomplete or unreadable."""
    if not path.is_file():
        raise UsageError(f"checkpoint {path} does not exist")
    model_file = _load(path, mmap)
    weights = model_file.get("state_dict")
    if not isinstance(weights, dict) or set(map(type, weights)) - {str} or not isinstance(model_file.get("epoch"), int):
        keys = ", ".join(str(key) for key in list(model_file)[:5])
        raise UsageError(f"{path} holds no training checkpoint (keys: {keys}; expected state_dict and epoch)")
    step = model_file.get("step")
    if step is None:
        return Checkpoint(path, model_file, shared=None)
    folder = path.with_suffix(".state") / f"step_{step}"
    shared = _load(folder / "shared.pt", mmap)
    try:
        read_as(_Shared, shared, str(folder / "shared.pt"))
    except ValueError as error:
        raise UsageError(f"{error}: not as a save writes it") from error
    ranks = tuple(folder / f"rank_{rank:04d}.pt" for rank in range(min(shared["world_size"], _MAX_RANKS)))
    files = [*ranks, *(_table_file(rank, table) for rank in ranks for table in shared["tables"]), folder / CHECKSUMS]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not ranks:
        raise UsageError(f"the state of {path} is incomplete, missing: {', '.join(missing[:5]) or 'all ranks'}")
    return Checkpoint(path, model_file, shared, ranks)


def verify(checkpoint: Checkpoint) -> None:
    """Compare every file of a checkpoint with its checksum, if there are any; raise UsageError for one that differs."""
    if checkpoint.shared is None:
        return
    folder = checkpoint.rank_files[0].parent
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
        files = {
            checkpoint.path if name == checkpoint.path.name else folder / name: expected[name] for name in expected
        }
        if checkpoint.path not in files:
            raise ValueError(f"{CHECKSUMS} is of another checkpoint")
        # Hashing releases the interpreter's lock.
        with ThreadPoolExecutor() as pool:
            found = dict(zip(files, pool.map(checksum, files), strict=True))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"cannot verify {checkpoint.path}: {error}") from error
    damaged = [file.name for file in files if found[file] != files[file]]
    if damaged:
        raise UsageError(f"{checkpoint.path} is damaged: {', '.join(damaged)} is not as it was written (checksum)")


def _load(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: the checkpoint is incomplete") from error
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(error, OSError) and not zipfile.is_zipfile(path):
            reason = "it is empty, cut off, or no file of torch.save"
        elif isinstance(error, pickle.UnpicklingError):
            reason = one_line(error)
        raise UsageError(f"cannot read {path}: {reason}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no training checkpoint, but a {type(content).__name__}")
    return content


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
    if "settings" not in saved:
        return [f"which ones is not known, as {checkpoint.path} does not say its own"]
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
        name: [open_table(_table_file(file, name)) for file in checkpoint.rank_files]
        for name in checkpoint.shared["tables"]
    }
    tables = loss.tables()
    if parts.keys() != tables.keys():
        raise UsageError(
            f"{checkpoint.path} has per-sample state of {sorted(parts)}, this run's loss keeps {sorted(tables)}: resume with "
            "the options of the saved run"
        )
    if any(part.dtype == np.float64 for saved in parts.values() for part in saved):
        loss.double()
    try:
        loss.load_replicated_state(checkpoint.shared["loss"])
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"{checkpoint.path} has the state of a loss with other options ({' '.join(str(error).split())[:500]}): resume "
            "with the options of the saved run"
        ) from error
    for name, table in tables.items():
        restore_table(table, parts[name], checkpoint.path)
    if checkpoint.shared["world_size"] == distributed.world_size():
        file = checkpoint.rank_files[distributed.rank()]
        generators = _load(file).get("random", {})
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
