"""Checkpoints: a model file in OpenCLIP's format, and next to it a folder with everything else that an exact resume needs.

The model file is ``epoch_K.pt`` after K full epochs, or ``epoch_latest.pt`` with ``--save-most-recent``. Mid-epoch, it is
``epoch_K_step_S.pt`` after S optimizer steps. The next save removes this file. The folder has the name of the model file with
the suffix ``.state``, and a subfolder for the step::

    epoch_3.pt
    epoch_3.state/step_1200/shared.pt       state that is equal on all ranks: loss, position
    epoch_3.state/step_1200/rank_0000.pt    random generators of one rank
    epoch_3.state/step_1200/rank_0000.normalizer.table.npy    one rank's shard of a table of per-sample state
    epoch_3.state/step_1200/checksums.json  SHA-256 of all these files and of epoch_3.pt
    epoch_3.lora/                           with --lora-rank: the adapter for peft; a resume does not read it

A save first writes temporary files, then renames the state folder, and finally renames the model file. Until the last rename,
the old checkpoint is complete. A resume verifies the checksums.
"""

import hashlib
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openclip_ext.cli.errors import UsageError, one_line

LATEST = "epoch_latest"
CHECKSUMS = "checksums.json"
ADAPTER = ".lora"
# Keys of a model file: the trained weights next to a ``state_dict`` with their average, and states with unmerged adapters.
TRAINED_KEY, UNMERGED = "trained_state_dict", "unmerged"
# In the run folder: the chosen mix of pretrained and trained weights, and the scores of all mixes.
MIX_FILE, MIX_SCORES_FILE = "checkpoints/interpolated.pt", "interpolation.json"
NAME = re.compile(r"epoch_(\d+)(?:_step_(\d+))?$")


@dataclass
class Position:
    """The position of a run, in epochs, steps and samples. The loader's state contains the position in the data."""

    epoch: int = 0  # completed epochs
    step: int = 0  # optimizer steps of the run
    step_in_epoch: int = 0  # optimizer steps of the current epoch
    samples: int = 0  # samples seen in training; stored because a resume may change the batch size


@dataclass(frozen=True)
class RunIdentity:
    """Properties that must be equal in a checkpoint and in the run that resumes from it."""

    model: str
    loss: str
    optimizer: str
    num_samples: int  # number of samples in the data set, including excluded samples
    global_batch: int  # samples per optimizer step
    seed: int
    data: str | None = None  # openclip_ext.data.sources.source.Source.index_digest of the data
    lora: str | None = None  # rank, alpha and targets of the adapters
    settings: dict[str, Any] = field(default_factory=dict)  # settings that may differ (a difference is logged)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. ``shared`` is the content of ``shared.pt``, or None if stock OpenCLIP wrote it."""

    path: Path
    model_file: dict[str, Any]
    shared: dict[str, Any] | None
    rank_files: tuple[Path, ...] = ()

    @property
    def position(self) -> Position:
        if self.shared is None:
            return Position(epoch=self.model_file["epoch"])
        return Position(**self.shared["position"])


def table_file(rank_file: Path, table: str) -> Path:
    """Return the path of a rank's shard of a table, next to the rank's file ``rank_NNNN.pt``."""
    return rank_file.with_name(f"{rank_file.stem}.{table}.npy")


def has_state(path: Path) -> bool:
    """Return whether a checkpoint's model file has a ``.state`` folder next to it."""
    return path.with_suffix(".state").is_dir()


def read(path: Path, needs_state: bool = True) -> Checkpoint:
    """Read a checkpoint's model file and shared state. Raise UsageError if they are missing or unreadable.

    If not ``needs_state``, a checkpoint without its ``.state`` folder is read like one that stock OpenCLIP wrote.
    """
    model_file = load_model_file(path)
    folder = _state_folder(path, model_file)
    if folder is None or not (needs_state or has_state(path)):
        return Checkpoint(path, model_file, shared=None)
    shared = load(folder / "shared.pt")
    ranks = tuple(folder / f"rank_{rank:04d}.pt" for rank in range(shared["world_size"]))
    return Checkpoint(path, model_file, shared, ranks)


def verify(path: Path) -> None:
    """Raise UsageError if a file of a checkpoint is missing or does not match its checksum.

    OpenCLIP's checkpoints have no checksums.
    """
    folder = _state_folder(path, load_model_file(path, mmap=True))
    if folder is None:
        return
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
        if path.name not in expected:
            named = ", ".join(name for name in expected if NAME.match(Path(name).stem) or name == f"{LATEST}.pt")
            raise ValueError(f"{folder} belongs to {named or 'no checkpoint'}. Undo the renaming of {path.name}")
        files = [path if name == path.name else folder / name for name in expected]
        # Threads compute checksums in parallel, because hashing releases Python's global interpreter lock.
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(checksum, files))
        pairs = zip(files, found, expected.values(), strict=True)
        corrupt = [file.name for file, digest, recorded in pairs if digest != recorded]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"the state of {path} is incomplete or unreadable: {error}") from error
    if corrupt:
        raise UsageError(f"{path} is corrupt: checksum mismatch in {', '.join(corrupt)}")


def load_model_file(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a model file in OpenCLIP's format. Raise UsageError if it is missing, unreadable or not a training checkpoint."""
    if path.is_dir():
        raise UsageError(f"checkpoint {path} is a folder: expected a file, such as LOGS/NAME/checkpoints/epoch_1.pt")
    if not path.is_file():
        raise UsageError(f"checkpoint {path} does not exist")
    content = load(path, mmap)
    if not isinstance(content.get("state_dict"), dict) or not isinstance(content.get("epoch"), int):
        keys = ", ".join(str(key) for key in list(content)[:5])
        raise UsageError(f"{path} is not a training checkpoint: expected state_dict and epoch, found {keys}")
    return content


def _state_folder(path: Path, model_file: dict[str, Any]) -> Path | None:
    """Return the folder ``NAME.state/step_S`` of a checkpoint, or None if stock OpenCLIP wrote the checkpoint."""
    step = model_file.get("step")
    return None if step is None else path.with_suffix(".state") / f"step_{step}"


def load(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load raises many types of errors for a corrupt file
        raise UsageError(f"cannot read {path}: {one_line(error) or repr(error)}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a checkpoint dictionary, found {type(content).__name__}")
    return content


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def random_state() -> dict[str, Any]:
    """Return the state of all random generators that training uses, as tensors and plain Python types."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray), "get_state is a dict only with legacy=False"
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        # numpy's state is converted to plain types, because its own types do not load with weights_only=True.
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of all random generators from the result of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
