"""The run folder ``LOGS/NAME/``: what OpenCLIP writes there, and our ``config.json`` and ``metrics.jsonl``."""

import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import openclip_ext
from openclip_ext import compat, distributed
from openclip_ext.options import flag
from openclip_ext.training.errors import UsageError, on_master

# Flags that say how a run was started and not what it does.
_OF_THE_START = {
    "resume", "logs", "name", "log_path", "checkpoint_path", "tensorboard_path", "device", "distributed", "rank", "local_rank",
    "world_size", "workers", "log_every_n_steps", "debug", "epochs",
}  # fmt: skip
# Seconds to wait for another process to leave the run folder.
LOCK_PATIENCE = 10


@dataclass(frozen=True)
class RunFolderConfig:
    """Where the run's files go and what is logged.

    Attributes:
        logs: ``--logs``; None to write nothing.
        name: ``--name``.
        resume_latest: the folder may hold a run, which goes on.
        debug: log more.
        log_local_rank: with ``--log-local``, this process's rank on its node, where the first one logs; None: the master logs.
    """

    logs: Path | None
    name: str
    resume_latest: bool = False
    debug: bool = flag(False)
    log_local_rank: int | None = None

    @property
    def folder(self) -> Path | None:
        """``LOGS/NAME``, or None."""
        return None if self.logs is None else self.logs / self.name

    def openclip_paths(self, tensorboard: bool) -> dict[str, str | None]:
        """The paths that OpenCLIP's own ``params.txt`` has."""
        folder = self.folder
        if folder is None:
            return {"log_path": None, "checkpoint_path": None, "tensorboard_path": ""}
        return {
            "log_path": str(folder / self.log_file),
            "checkpoint_path": str(folder / "checkpoints"),
            "tensorboard_path": str(folder / "tensorboard") if tensorboard else "",
        }

    @property
    def log_file(self) -> str:
        """``out.log``, or with ``--log-local`` one for each node."""
        return "out.log" if self.log_local_rank is None else f"out-{distributed.rank()}"


def default_name(model: str, lr: float, batch_size: int, workers: int, precision: str) -> str:
    """OpenCLIP's name for a run without ``--name``, the same on all ranks."""
    date = distributed.broadcast_object(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
    return f"{date}-model_{model.replace('/', '-')}-lr_{lr}-b_{batch_size}-j_{workers}-p_{precision}"


@contextmanager
def opened(config: RunFolderConfig) -> Iterator[Path | None]:
    """Make the run folder, lock it for this run, and start logging.

    Returns:
        A context with the folder, or None with ``--logs none`` (nothing is written then).

    Raises:
        UsageError: the folder holds a run already, and this is not ``--resume latest``; another process is at work in it; or
            it cannot be written to.
    """
    level = logging.DEBUG if config.debug else logging.INFO
    folder = config.folder
    if folder is None:
        compat.setup_logging(None, level if distributed.is_master() else logging.WARNING)
        yield None
        return
    with ExitStack() as stack:
        on_master(lambda: stack.enter_context(_claimed(folder, config.resume_latest)) and None)
        writes_log = distributed.is_master() if config.log_local_rank is None else config.log_local_rank == 0
        if writes_log:
            folder.mkdir(parents=True, exist_ok=True)
            compat.setup_logging(str(folder / config.log_file), level)
        else:
            compat.setup_logging(None, logging.WARNING)
        yield folder


@contextmanager
def _claimed(folder: Path, resume_latest: bool) -> Iterator[None]:
    """Make the folder, which no other process may train in until the end of the context, however that comes."""
    if not resume_latest and any((folder / name).exists() for name in ("out.log", "out-0", "metrics.jsonl")):
        raise UsageError(f"run folder {folder} exists; continue it with --resume latest, or give another --name")
    owner = folder / ".owner"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        # The lock goes with the process. A killed run's last workers may have it for some seconds more.
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=LOCK_PATIENCE)
        owner.write_text(f"process {os.getpid()} on {platform.node()}")
    except Timeout as error:
        holder = owner.read_text() if owner.is_file() else "another process"
        raise UsageError(
            f"run folder {folder} is in use by {holder}: wait until it ends, stop it, or give another --name"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write to the run folder {folder} ({error}): give another --logs") from error
    try:
        yield
    finally:
        lock.release()


def write_settings(folder: Path, flags: Mapping[str, Any], loss: str, loss_options: dict[str, Any]) -> None:
    """Write OpenCLIP's ``params.txt`` and our ``config.json``: resolved flags, versions, git commit.

    Args:
        folder: the run's.
        flags: all flags with their values.
        loss: its name.
        loss_options: what it was created with.
    """
    (folder / "params.txt").write_text("".join(f"{name}: {value}\n" for name, value in sorted(flags.items())))
    config = {
        "flags": _plain(flags),
        "loss": {"name": loss, "options": loss_options},
        "versions": versions(),
        "git_commit": _git_commit(),
        "world_size": distributed.world_size(),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def changed_settings(folder: Path, flags: Mapping[str, Any], loss_options: dict[str, Any]) -> list[str]:
    """What differs from the settings that :func:`write_settings` wrote last, in words; nothing if there are none."""
    try:
        before = json.loads((folder / "config.json").read_text())
        old = {**before["flags"], **before["loss"]["options"]}
    except (OSError, ValueError, KeyError):
        return []
    new = json.loads(json.dumps({**_plain(flags), **loss_options}))
    return [
        f"{name} {new[name]} (before: {old[name]})"
        for name in sorted(new.keys() & old.keys() - _OF_THE_START)
        if new[name] != old[name]
    ]


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    import open_clip
    import torchvision

    return {
        "openclip_ext": openclip_ext.__version__,
        "open_clip_torch": open_clip.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }


def _plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold, by name."""
    kinds = str | int | float | bool | list | tuple | dict | None
    return {name: value for name, value in sorted(flags.items()) if isinstance(value, kinds)}


def _git_commit() -> str | None:
    """The commit of this package's source, where it runs from a clone."""
    command = ["git", "-C", str(Path(openclip_ext.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def copy_codebase(folder: Path) -> None:
    """``--copy-codebase``: keep this package's source with the run."""
    target = folder / "code" / "openclip_ext"
    if target.exists():
        logging.info(f"The code is in {target} already.")
        return
    shutil.copytree(Path(openclip_ext.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
