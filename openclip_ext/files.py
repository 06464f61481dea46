"""Writing files so that nobody ever sees half of one."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file under a temporary name, and rename it when it is complete and on the disk.

    Args:
        path: The file; one of that name is replaced. The temporary one is hidden and ends with ``.partial``.
        write: Writes the content to an open file.

    Raises:
        OSError: The folder cannot be written to, or the disk is full. The file is then as it was.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # a temporary file can be read by its owner only
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
