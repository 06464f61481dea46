"""The run folder ``LOGS/NAME/``: what OpenCLIP writes there, and our ``config.json`` and ``metrics.jsonl``."""

import argparse
import json
import logging
import platform
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import openclip_ext
from openclip_ext import compat, distributed
from openclip_ext.training.errors import UsageError
from openclip_ext.training.flags import LossChoice


def default_name(args: argparse.Namespace) -> str:
    """OpenCLIP's name for a run without ``--name``, the same on all ranks."""
    date = distributed.broadcast_object(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
    model = args.model.replace("/", "-")
    return f"{date}-model_{model}-lr_{args.lr}-b_{args.batch_size}-j_{args.workers}-p_{args.precision}"


def prepare(args: argparse.Namespace) -> Path | None:
    """Make the run folder and start logging; sets the path attributes that OpenCLIP's functions read.

    Returns:
        The folder, or None with ``--logs none`` (nothing is written then).

    Raises:
        UsageError: the folder holds a run already, and this is not ``--resume latest``.
    """
    args.save_logs = bool(args.logs) and args.logs.lower() != "none"
    args.log_level = logging.DEBUG if args.debug else logging.INFO
    if not args.save_logs:
        args.log_path = args.checkpoint_path = None
        args.tensorboard_path = ""
        compat.setup_logging(None, args.log_level if distributed.is_master() else logging.WARNING)
        return None
    folder = Path(args.logs) / args.name
    _refuse_existing(folder, args)
    args.checkpoint_path = str(folder / "checkpoints")
    args.tensorboard_path = str(folder / "tensorboard") if "tensorboard" in args.reports else ""
    args.log_path = None
    writes_log = args.local_rank == 0 if args.log_local else distributed.is_master()
    if distributed.is_master():
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    if writes_log:
        folder.mkdir(parents=True, exist_ok=True)
        args.log_path = str(folder / (f"out-{args.rank}" if args.log_local else "out.log"))
    compat.setup_logging(args.log_path, args.log_level if writes_log else logging.WARNING)
    return folder


def _refuse_existing(folder: Path, args: argparse.Namespace) -> None:
    exists = any((folder / name).exists() for name in ("out.log", "out-0", "metrics.jsonl"))
    # All ranks answer what the master saw, so that none is left waiting.
    if distributed.broadcast_object(exists) and args.resume != "latest":
        raise UsageError(f"run folder {folder} exists; continue it with --resume latest, or give another --name")


def write_settings(folder: Path, args: argparse.Namespace, choice: LossChoice, loss_options: dict[str, Any]) -> None:
    """Write OpenCLIP's ``params.txt`` and our ``config.json``: resolved flags, versions, git commit."""
    flags = {name: value for name, value in sorted(vars(args).items()) if _is_plain(value)}
    (folder / "params.txt").write_text("".join(f"{name}: {getattr(args, name)}\n" for name in sorted(vars(args))))
    config = {
        "flags": flags,
        "loss": {"name": choice.name, "options": loss_options},
        "versions": versions(),
        "git_commit": _git_commit(),
        "world_size": distributed.world_size(),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple | dict)


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
