"""The run folder's copy in a remote place (OpenCLIP's ``--remote-sync``)."""

import argparse
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openclip_ext import compat, distributed
from openclip_ext.training.errors import UsageError


@contextmanager
def synchronised(args: argparse.Namespace, folder: Path | None) -> Iterator[None]:
    """Copy the run folder every ``--remote-sync-frequency`` seconds, and once more at the end.

    Raises:
        UsageError: the first copy failed; better now than after a week.
    """
    if args.remote_sync is None or folder is None or not distributed.is_master():
        yield
        return
    local, target, protocol = str(folder), _target(args), args.remote_sync_protocol
    if not compat.remote_sync(local, target, protocol):
        raise UsageError(f"the first copy to --remote-sync {args.remote_sync} failed; see the log above")
    process = compat.start_remote_sync(args.remote_sync_frequency, local, target, protocol)
    try:
        yield
    finally:
        process.terminate()
        if not compat.remote_sync(local, target, protocol):
            logging.error("The final copy of the run folder to --remote-sync failed.")


def fetch_checkpoints(args: argparse.Namespace, folder: Path) -> None:
    """Bring checkpoints that only the remote place has: a requeued job can land on another node.

    Raises:
        UsageError: the protocol cannot be read from (only s3 can, as in OpenCLIP), or the copy failed.
    """
    if args.remote_sync is None:
        return
    if args.remote_sync_protocol != "s3":
        raise UsageError("--resume latest with --remote-sync works with --remote-sync-protocol s3 only")
    source = os.path.join(_target(args), "checkpoints")
    result = subprocess.run(["aws", "s3", "sync", source, str(folder / "checkpoints")], capture_output=True, text=True)
    if result.returncode != 0:
        raise UsageError(f"cannot fetch checkpoints from {source}: {result.stderr.strip()}")


def _target(args: argparse.Namespace) -> str:
    return os.path.join(args.remote_sync, args.name)
