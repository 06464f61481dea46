"""Checkpoints: a model file for OpenCLIP, and beside it a folder with the rest of what an exact resume needs.

``epoch_K.pt`` (``epoch_K_step_S.pt`` in mid-epoch, ``epoch_latest.pt`` for ``--save-most-recent``) is OpenCLIP's
dictionary. The folder of the same name with ``.state`` has a sub-folder named by the step::

    epoch_3.pt
    epoch_3.state/step_1200/shared.pt       the same on all ranks: loss, position
    epoch_3.state/step_1200/rank_0000.pt    of one rank: random generators
    epoch_3.state/step_1200/rank_0000.normalizer.table.npy    of one rank: its part of a table of per-sample state
    epoch_3.state/step_1200/checksums.json  SHA-256 of all of these and of epoch_3.pt
    epoch_3.lora/                           with --lora-rank: the adapter for peft, which no resume needs

A save writes everything under temporary names, and renames the state folder first and the model file last. Until that last
rename the old checkpoint is complete. A resume verifies the checksums.
"""

import hashlib
import json
import pickle
import random
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.files.schema import read_as

LATEST = "epoch_latest"
CHECKSUMS = "checksums.json"
UNREADABLE = ".unreadable"
ADAPTER = ".lora"
NAME = re.compile(r"epoch_(\d+)(?:_step_(\d+))?$")
_BLOCK = 1 << 22
_MAX_RANKS = 10**5


@dataclass
class Position:
    """The position of a run in its steps. What the loader has handed out is the loader's state.

    Attributes:
        epoch: number of completed epochs.
        step: optimizer steps of the run.
        step_in_epoch: optimizer steps of the current epoch.
        samples: samples that the run was trained on; a resume may change how many a step has.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    samples: int = 0


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
    parts: dict[str, dict[str, Any]]
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

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The states of the run's parts by name; none of stock OpenCLIP's."""
        return {} if self.shared is None else self.shared["parts"]


def checkpoint_name(position: Position) -> str:
    """Return ``epoch_K`` at the end of an epoch, ``epoch_K_step_S`` within one; K is the number of completed epochs."""
    if position.step_in_epoch == 0:
        return f"epoch_{position.epoch}"
    return f"epoch_{position.epoch}_step_{position.step}"


def table_file(rank_file: Path, table: str) -> Path:
    """Return the path of a rank's part of a table, given the rank's other file."""
    return rank_file.with_name(f"{rank_file.stem}.{table}.npy")


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint's model file and shared state; raise UsageError if they are missing, incomplete or unreadable."""
    if not path.is_file():
        raise UsageError(f"checkpoint {path} does not exist")
    model_file = load(path, mmap)
    weights = model_file.get("state_dict")
    if not isinstance(weights, dict) or set(map(type, weights)) - {str} or not isinstance(model_file.get("epoch"), int):
        keys = ", ".join(str(key) for key in list(model_file)[:5])
        raise UsageError(f"{path} holds no training checkpoint (keys: {keys}; expected state_dict and epoch)")
    step = model_file.get("step")
    if step is None:
        return Checkpoint(path, model_file, shared=None)
    folder = path.with_suffix(".state") / f"step_{step}"
    shared = load(folder / "shared.pt", mmap)
    try:
        read_as(_Shared, shared, str(folder / "shared.pt"))
    except ValueError as error:
        raise UsageError(f"{error}: not as a save writes it") from error
    ranks = tuple(folder / f"rank_{rank:04d}.pt" for rank in range(min(shared["world_size"], _MAX_RANKS)))
    files = [*ranks, *(table_file(rank, table) for rank in ranks for table in shared["tables"]), folder / CHECKSUMS]
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


def load(path: Path, mmap: bool = False) -> dict[str, Any]:
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


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
