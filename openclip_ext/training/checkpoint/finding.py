"""Find the checkpoint that a run starts from."""

import contextlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.files import json_lines
from openclip_ext.training.checkpoint.format import CHECKSUMS, LATEST, NAME, Checkpoint, read, verify
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.runtime.run_folder import SAVED, fetch_checkpoints


class Scan(NamedTuple):
    """The checkpoints of a run: the newest verified one (None: there are none), and the newer ones that cannot be read."""

    newest: Path | None
    unreadable: frozenset[Path]


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
    return Start(None if found.newest is None else read(found.newest), found.unreadable)


def _find(resume: str, config: RunFolderConfig) -> Scan:
    if resume != "latest":
        try:
            verify(read(Path(resume), mmap=True))
        except UsageError as error:
            good = None
            with contextlib.suppress(UsageError):
                good = scan(Path(resume).parent).newest
            raise UsageError(f"{error}. {good} is good" if good else str(error)) from error
        return Scan(Path(resume), frozenset())
    assert config.folder is not None
    fetch_checkpoints(config)
    found = scan(config.folder / "checkpoints")
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
        if path.stem != LATEST and not NAME.match(path.stem):
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
