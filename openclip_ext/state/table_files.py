"""Tables of per-sample state on disk. They are written and read in chunks, without a second copy in memory.

A file contains one rank's shard, in a format that ``numpy.load`` reads: one row per sample, with NaN for samples that were
never written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.state.sharded_table import ShardedTable

_FORMAT = np.lib.format
# Number of rows that are copied at a time: 4 or 12 MiB for the float32 tables of our losses (2 or 6 columns).
CHUNK_ROWS = 1 << 19


def write_table(table: ShardedTable, file: BinaryIO) -> None:
    """Write this rank's shard to an empty file."""
    descr = _FORMAT.dtype_to_descr(table.rows(0, 0).numpy().dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (table.size, table.columns)}
    _FORMAT.write_array_header_1_0(file, header)
    for start in range(0, table.size, CHUNK_ROWS):
        rows = table.rows(start, min(start + CHUNK_ROWS, table.size))
        file.write(rows.numpy().data)


def open_table(path: Path) -> np.ndarray:
    """Memory-map the shard ``(samples, columns)`` in a file that :func:`write_table` wrote."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def restore_table(table: ShardedTable, parts: Sequence[np.ndarray], source: object = "the checkpoint") -> None:
    """Fill this rank's shard from the saved shards of all ranks. The number of ranks may have changed.

    Args:
        parts: The saved shards in rank order, from :func:`open_table`: ``(samples of the rank, columns)`` each.
        source: Name of the checkpoint in error messages.
    """
    found = sum(map(len, parts)), parts[0].shape[1]
    if found != (table.num_samples, table.columns):
        raise UsageError(
            f"{source}: expected a table of {table.num_samples} samples with {table.columns} numbers each, found {found[0]} "
            f"with {found[1]}. Resume with the data and the options of the saved run"
        )
    first = 0
    for part in parts:
        begin, end = max(first, table.first), min(first + len(part), table.end)
        for start in range(begin, end, CHUNK_ROWS):
            rows = part[start - first : min(start + CHUNK_ROWS, end) - first]
            table.set_rows(start - table.first, torch.from_numpy(rows.copy()))
        first += len(part)
