"""Find the checkpoint that a run starts from."""

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from openclip_ext import distributed
from openclip_ext.checkpoint.finding import scan
from openclip_ext.checkpoint.format import Checkpoint, read, verify
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.cli.options import nearest
from openclip_ext.files import json_lines
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.runtime.run_folder import SAVED, fetch_checkpoints

logger = get_logger(__name__)


class Start(NamedTuple):
    """The checkpoint from which a run starts, if any, and the ``unreadable`` checkpoints in the run's folder."""

    checkpoint: Checkpoint | None = None
    unreadable: frozenset[Path] = frozenset()


def find_start(resume: str | None, config: RunFolderConfig) -> Start:
    """Find, verify and read the checkpoint of ``--resume``. Collective: all ranks call it. Rank 0 verifies for all."""
    if resume is None:
        return Start()
    path, unreadable = distributed.on_rank0(lambda: _find(resume, config))
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
        logger.info(f"Resuming from {newest}.")
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
    logger.log(
        logging.WARNING if hint else logging.INFO, f"No checkpoint in {config.folder}: starting from scratch{hint}"
    )
    return None, unreadable
