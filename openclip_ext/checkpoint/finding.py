"""Find good checkpoints: of a run that resumes, or whose model is evaluated or exported."""

import os
from collections.abc import Callable
from pathlib import Path

from openclip_ext.checkpoint.format import LATEST, NAME, has_state, load_model_file, verify
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger

logger = get_logger(__name__)


def checkpoint_file(path: Path) -> Path:
    """Return a file of weights to load: ``path``, or the newest good checkpoint of the run folder ``path``.

    Files with a ``.state`` folder are verified. Other files have no checksums: ``best.pt``, another program's, or a checkpoint
    whose ``.state`` folder was deleted.

    Raises:
        UsageError: The file does not exist or is corrupt, or the folder contains no good checkpoint.
    """
    if not path.exists():
        raise UsageError(f"checkpoint {path} not found: expected a file, or a run folder LOGS/NAME")
    if not path.is_dir():
        _verify_with_state(path)
        return path
    newest, _ = scan(path / "checkpoints", _verify_with_state)
    if newest is None:
        raise UsageError(f"no checkpoint in {path}: expected a run folder LOGS/NAME with checkpoints/epoch_K.pt")
    return newest


def _verify_with_state(path: Path) -> None:
    if has_state(path):
        verify(path)


def scan(folder: Path, check: Callable[[Path], None] = verify) -> tuple[Path | None, frozenset[Path]]:
    """Return the newest good checkpoint in a folder, if any, and the unreadable checkpoints. Log a warning for each of these.

    ``check`` raises UsageError for a bad checkpoint. Checkpoints that are older than the newest good one are not checked.
    Raise UsageError if the folder cannot be read, or if it contains checkpoints and none of them can be read.
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
            check(path)
            newest = path
            break
        except UsageError as error:
            unreadable[path] = str(error)
    for reason in unreadable.values():
        logger.warning(f"Checkpoint skipped: {reason}")
    if newest is None and unreadable:
        raise UsageError(
            f"none of the checkpoints in {folder} can be read ({'; '.join(unreadable.values())}). Nothing was changed: "
            "restore a checkpoint, or use another --name"
        )
    return newest, frozenset(unreadable)
