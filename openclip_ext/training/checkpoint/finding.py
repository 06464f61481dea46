"""Find and verify checkpoints: the checkpoint that a run starts from, or whose model is evaluated or exported."""

import contextlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import nearest
from openclip_ext.files import json_lines
from openclip_ext.training.checkpoint.format import LATEST, NAME, Checkpoint, load_model_file, read, verify
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.runtime.run_folder import SAVED, fetch_checkpoints


class Start(NamedTuple):
    """The checkpoint from which a run starts, if any, and the ``unreadable`` checkpoints in the run's folder."""

    checkpoint: Checkpoint | None = None
    unreadable: frozenset[Path] = frozenset()


def find_start(resume: str | None, config: RunFolderConfig) -> Start:
    """Find, verify and read the checkpoint of ``--resume``. Collective: all ranks call it. Rank 0 verifies for all."""
    if resume is None:
        return Start()
    path, unreadable = distributed.on_master(lambda: _find(resume, config))
    return Start(None if path is None else read(path), unreadable)


def _find(resume: str, config: RunFolderConfig) -> tuple[Path | None, frozenset[Path]]:
    if resume != "latest":
        try:
            verify(Path(resume))
        except UsageError as error:
            good = None
            with contextlib.suppress(UsageError):
                good, _ = scan(Path(resume).parent)
            raise UsageError(f"{error}. {good} is good: resume from it" if good else str(error)) from error
        return Path(resume), frozenset()
    assert config.folder is not None, "--logs none is refused with --resume latest"
    fetch_checkpoints(config)
    newest, unreadable = scan(config.folder / "checkpoints")
    if newest is not None:
        logging.info(f"Resuming from {newest}.")
        return newest, unreadable
    # If the run was killed before its first save, start from scratch. After a save, this would overwrite the run's log.
    log = config.folder / "metrics.jsonl"
    steps = sum("loss" in line for line in json_lines.read(log))
    if steps and (config.folder / SAVED).exists():
        raise UsageError(
            f"{config.folder} has the log of {steps} steps, and its checkpoints are lost: check whether the disk of "
            f"{config.folder / 'checkpoints'} is mounted. To start from scratch, remove {log}"
        )
    runs = [path.parent.name for path in config.folder.parent.glob("*/checkpoints") if any(path.iterdir())]
    hint = nearest(config.name, runs)
    logging.log(
        logging.WARNING if hint else logging.INFO, f"No checkpoint in {config.folder}: starting from scratch{hint}"
    )
    return None, unreadable


def checkpoint_file(path: Path) -> Path:
    """Return a file of weights to load: ``path``, or the newest good checkpoint of the run folder ``path``.

    Files with a ``.state`` folder are verified. Other files, such as ``best.pt`` or another program's, have no checksums.

    Raises:
        UsageError: The file does not exist or is corrupt, or the folder contains no good checkpoint.
    """
    if not path.exists():
        raise UsageError(f"checkpoint {path} not found: expected a file, or a run folder LOGS/NAME")
    if not path.is_dir():
        if path.with_suffix(".state").is_dir():
            verify(path)
        return path
    newest, _ = scan(path / "checkpoints")
    if newest is None:
        raise UsageError(f"no checkpoint in {path}: expected a run folder LOGS/NAME with checkpoints/epoch_K.pt")
    return newest


def scan(folder: Path) -> tuple[Path | None, frozenset[Path]]:
    """Return the newest good checkpoint in a folder, if any, and the unreadable checkpoints. Log a warning for each of these.

    Checkpoints that are older than the newest good one are not verified. Raise UsageError if the folder cannot be read, or if
    it contains checkpoints and none of them can be read.
    """
    try:
        names = sorted(os.listdir(folder)) if folder.exists() else []
    except OSError as error:
        raise UsageError(f"cannot read {folder} ({error}): make it readable, or use another --name") from error
    candidates: list[tuple[int, int, Path]] = []
    unreadable: dict[Path, str] = {}
    for path in (folder / name for name in names if name.endswith(".pt")):
        if path.stem != LATEST and not NAME.match(path.stem):
            continue
        try:
            content = load_model_file(path, mmap=True)
            candidates.append((content["epoch"], content.get("step", 0), path))
        except UsageError as error:
            unreadable[path] = str(error)
    newest = None
    for *_, path in sorted(candidates, reverse=True):
        try:
            verify(path)
            newest = path
            break
        except UsageError as error:
            unreadable[path] = str(error)
    for reason in unreadable.values():
        logging.warning(f"Checkpoint skipped: {reason}")
    if newest is None and unreadable:
        raise UsageError(
            f"none of the checkpoints in {folder} can be read ({'; '.join(unreadable.values())}). Nothing was changed: "
            "restore a checkpoint, or use another --name"
        )
    return newest, frozenset(unreadable)
