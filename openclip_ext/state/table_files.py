"""Tables of per-sample state on disk, written and read in parts: never a second copy of one in memory.

A file holds one rank's part in numpy's format: a row of numbers for each sample, NaN if it was never seen. ``numpy.load``
reads it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.state.sharded_table import ShardedTable

_FORMAT = np.lib.format
# Rows to copy at a time; 4 to 16 MiB in the losses' tables.
CHUNK_ROWS = 1 << 19


def write_table(table: ShardedTable, file: BinaryIO) -> None:
    """Write this rank's part into an empty file."""
    dtype = table.rows(0, 0).numpy().dtype.newbyteorder("<")  # the same on every machine
    shape = (table.size, table.columns)
    header = {"descr": _FORMAT.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    _FORMAT.write_array_header_1_0(file, header)
    for start in range(0, table.size, CHUNK_ROWS):
        rows = table.rows(start, min(start + CHUNK_ROWS, table.size))
        file.write(rows.numpy().astype(dtype, copy=False).data)


def open_table(path: Path) -> np.ndarray:
    """Return what :func:`write_table` wrote, ``(samples, columns)``, mapped from the file and not read."""
    rows, reason = None, ""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = f" ({error})"
    except Exception as error:  # numpy raises many kinds for a damaged header
        logging.debug(f"{path}: {error!r}")
    if not isinstance(rows, np.memmap) or rows.ndim != 2 or rows.dtype not in (np.float32, np.float64):
        raise UsageError(
            f"{path} is no table, or damaged{reason}: expected rows of floating-point numbers. Give another checkpoint"
        )
    return rows


def restore_table(table: ShardedTable, parts: Sequence[np.ndarray], source: object = "the checkpoint") -> None:
    """Fill this rank's part of a table from all ranks' parts at the save, in their order; any number of ranks.

    The parts are ``(samples of the rank, columns)`` each, as :func:`open_table` returns them.
    """
    found = sum(map(len, parts)), parts[0].shape[1]
    if found != (table.num_samples, table.columns):
        raise UsageError(
            f"{source} has a table of {found[0]} samples with {found[1]} numbers each, this run's has {table.num_samples} "
            f"with {table.columns}: resume with the data and the options of the saved run"
        )
    first = 0
    for part in parts:
        begin, end = max(first, table.first), min(first + len(part), table.end)
        for start in range(begin, end, CHUNK_ROWS):
            rows = part[start - first : min(start + CHUNK_ROWS, end) - first]
            values = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=True))
            table.set_rows(start - table.first, values)
        first += len(part)
