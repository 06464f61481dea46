"""The run folder's copy in a remote place (OpenCLIP's ``--remote-sync``)."""

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openclip_ext import compat, distributed
from openclip_ext.options import flag
from openclip_ext.training.errors import UsageError


@dataclass(frozen=True)
class RemoteConfig:
    """Where the run folder is copied to.

    Attributes:
        address: the place of all runs and the run's name.
        every_seconds: time between two copies.
        protocol: ``s3`` or ``fsspec``.
    """

    address: str
    every_seconds: int = flag(300, dest="remote_sync_frequency")
    protocol: str = flag("s3", dest="remote_sync_protocol")


@contextmanager
def synchronised(config: RemoteConfig | None, folder: Path | None) -> Iterator[None]:
    """Copy the run folder again and again, and once more at the end.

    Raises:
        UsageError: the first copy failed; better now than after a week.
    """
    if config is None or folder is None or not distributed.is_master():
        yield
        return
    if not compat.remote_sync(str(folder), config.address, config.protocol):
        raise UsageError(f"the first copy to --remote-sync {config.address} failed; see the log above")
    process = compat.start_remote_sync(config.every_seconds, str(folder), config.address, config.protocol)
    try:
        yield
    finally:
        process.terminate()
        if not compat.remote_sync(str(folder), config.address, config.protocol):
            logging.error("The final copy of the run folder to --remote-sync failed.")


def fetch_checkpoints(config: RemoteConfig | None, folder: Path) -> None:
    """Bring checkpoints that only the remote place has: a requeued job can land on another node.

    Raises:
        UsageError: the protocol cannot be read from (only s3 can, as in OpenCLIP), or the copy failed.
    """
    if config is None:
        return
    if config.protocol != "s3":
        raise UsageError("--resume latest with --remote-sync works with --remote-sync-protocol s3 only")
    source = os.path.join(config.address, "checkpoints")
    result = subprocess.run(["aws", "s3", "sync", source, str(folder / "checkpoints")], capture_output=True, text=True)
    if result.returncode != 0:
        raise UsageError(f"cannot fetch checkpoints from {source}: {result.stderr.strip()}")
