"""The run folder ``LOGS/NAME/``: OpenCLIP's files, our ``config.json`` and ``metrics.jsonl``, and the remote copy."""

import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

import openclip_ext
from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.files import json_lines
from openclip_ext.files.writing import write_text
from openclip_ext.training.config import RunFolderConfig

logger = get_logger(__name__)

# Flags that only determine how a run is started and logged, so they may change on resume.
_NOT_COMPARED = {
    "resume", "logs", "name", "log_path", "checkpoint_path", "tensorboard_path", "device", "distributed", "rank", "local_rank",
    "world_size", "workers", "log_every_n_steps", "debug",
}  # fmt: skip
# Name of an empty file in the run folder, which exists if the run has saved a checkpoint.
SAVED = ".saved"
LOCK_PATIENCE = 10  # seconds to wait for another process to release the run folder's lock


@contextmanager
def opened(config: RunFolderConfig) -> Iterator[Path | None]:
    """Create the run folder, lock it for this run, and start logging. If no step is taken, remove a new folder.

    Yield the folder, or None with ``--logs none``. Raise UsageError if the folder contains a run (without
    ``--resume latest``), is in use by another process, or is not writable.
    """
    level = logging.DEBUG if config.debug else logging.INFO
    folder = config.folder
    if folder is None:
        compat.setup_logging(None, level if distributed.is_rank0() else logging.WARNING)
        yield None
        return
    with ExitStack() as stack:
        distributed.on_rank0(lambda: stack.enter_context(_claimed(folder, config.resume_latest)) and None)
        writes_log = distributed.is_rank0() if config.log_local_rank is None else config.log_local_rank == 0
        if writes_log:
            folder.mkdir(parents=True, exist_ok=True)
            others = list(logging.root.handlers)
            compat.setup_logging(str(folder / config.log_file), level)
            for handler in [handler for handler in logging.root.handlers if handler not in others]:
                handler.handleError = functools.partial(_write_failed, handler)  # type: ignore[method-assign]
        else:
            compat.setup_logging(None, logging.WARNING)
        yield folder


@functools.cache
def _warn_log_unwritable() -> None:
    with suppress(OSError):  # the user may have closed the terminal
        print("error: the log file cannot be written. Training continues: check the disk space.", file=sys.stderr)


def _write_failed(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Print once that the log file cannot be written, instead of a traceback for each line."""
    if isinstance(sys.exc_info()[1], OSError):
        _warn_log_unwritable()
        if isinstance(handler, logging.FileHandler):
            _reopen(handler)
    else:
        traceback.print_exc()


def _reopen(handler: logging.FileHandler) -> None:
    """Discard the text that could not be written, and open the file for the next line."""
    if handler.stream:
        with suppress(OSError):  # closing writes the text again, and fails
            handler.stream.close()
    try:
        handler.stream = open(handler.baseFilename, "a")  # noqa: SIM115
    except OSError:  # the folder was removed
        handler.stream = open(os.devnull, "a")  # noqa: SIM115


@contextmanager
def _claimed(folder: Path, resume_latest: bool) -> Iterator[None]:
    """Create the folder, and lock it inside the ``with`` block. After an error before the first step, remove a new folder."""
    new = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    owner = folder / ".owner"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        # The lock is released when the process exits, but data workers of a killed run may hold it for some seconds.
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=LOCK_PATIENCE)
        for name in ("config.json", "params.txt", "metrics.jsonl", "out.log"):
            if (folder / name).exists():
                (folder / name).open("ab").close()  # raises OSError if this is a folder or another user's file
        owner.write_text(f"process {os.getpid()} on {platform.node()}")
    except Timeout as error:
        holder = owner.read_text() if owner.is_file() else "another process"
        raise UsageError(f"run folder {folder} is in use by {holder}: stop it, or give another --name") from error
    except OSError as error:
        raise UsageError(f"cannot write to the run folder {folder} ({error}): give another --logs") from error
    try:
        # Checked under the lock, because the process that held it may have trained this run meanwhile.
        if not resume_latest and has_begun(folder):
            raise UsageError(f"run folder {folder} exists; continue it with --resume latest, or give another --name")
        yield
    except BaseException:
        if new and not has_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # fails if another program has written to a parent folder
                for place in new[1:]:
                    place.rmdir()
        raise
    finally:
        lock.release()


def has_begun(folder: Path) -> bool:
    """Return whether a folder contains a run that has taken a step, or a run of OpenCLIP."""
    checkpoints, is_ours = folder / "checkpoints", (folder / "config.json").exists()
    if (folder / "metrics.jsonl").exists() or ((folder / "params.txt").exists() and not is_ours):
        return True
    return checkpoints.is_dir() and any(checkpoints.iterdir())


@contextmanager
def synchronized(config: RunFolderConfig) -> Iterator[None]:
    """Copy the run folder to ``--remote-sync`` now, at intervals and at the end. Raise UsageError if the first copy fails."""
    if config.remote is None or not distributed.is_rank0():
        yield
        return
    copy = str(config.folder), config.remote, config.remote_protocol
    if not compat.remote_sync(*copy):
        raise UsageError(f"the first copy to --remote-sync {config.remote} failed: fix the error in the log above")
    process = compat.start_remote_sync(config.remote_every, *copy)
    try:
        yield
    finally:
        process.terminate()
        if not compat.remote_sync(*copy):
            logger.error("The final copy of the run folder to --remote-sync failed.")


def fetch_checkpoints(config: RunFolderConfig) -> None:
    """Copy checkpoints from ``--remote-sync``, for a job that restarts on another node. Only s3 is supported."""
    if config.remote is None or config.folder is None:
        return
    if config.remote_protocol != "s3":
        raise UsageError("--resume latest with --remote-sync needs --remote-sync-protocol s3")
    source = f"{config.remote}/checkpoints"
    command = ["aws", "s3", "sync", source, str(config.folder / "checkpoints")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise UsageError(f"cannot fetch checkpoints from {source}: {result.stderr.strip()}")


class Settings(NamedTuple):
    """Settings in a run folder: the command line that repeats the run, and what was derived from this command line.

    ``steps`` is the number of optimizer steps of the full run. ``pretrained_weights`` is the SHA-256 of the file of initial
    weights, or None without a file.
    """

    words: Sequence[str]
    flags: Mapping[str, Any]
    loss: str
    loss_options: Mapping[str, Any]
    steps: int
    pretrained_weights: str | None = None


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the settings, versions and git commit to our ``config.json``, and the flags to OpenCLIP's ``params.txt``."""
    config = {
        "typed": settings.words,
        "resolved": {
            "flags": _plain(settings.flags),
            "loss": {"name": settings.loss, "options": settings.loss_options},
            "steps": settings.steps,
            "pretrained_weights": settings.pretrained_weights,
            "world_size": distributed.world_size(),
        },
        "versions": {**versions(), "git_commit": _git_commit()},
    }
    write_text(folder / "config.json", json_lines.dumps(config, indent=2) + "\n")
    parameters = "".join(f"{name}: {value}\n" for name, value in sorted(settings.flags.items()))
    write_text(folder / "params.txt", parameters)


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect a run's results."""
    import open_clip
    import torchvision

    return {
        "openclip_ext": openclip_ext.__version__,
        "open_clip_torch": open_clip.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }


def settings(flags: Mapping[str, Any], loss_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect a run's results or files, by name.

    On resume, these settings are compared with the checkpoint's settings.
    """
    return {name: value for name, value in _plain({**flags, **loss_options}).items() if name not in _NOT_COMPARED}


def _plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    kinds = str | int | float | bool | list | tuple | dict | None
    return {name: value for name, value in sorted(flags.items()) if isinstance(value, kinds)}


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(openclip_ext.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def copy_codebase(folder: Path) -> None:
    target = folder / "code" / "openclip_ext"
    if not target.exists():
        shutil.copytree(Path(openclip_ext.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
