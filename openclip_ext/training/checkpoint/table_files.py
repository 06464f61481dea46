"""Tables of per-sample state on disk, written and read in parts: never a second copy of one in memory.

A file holds one rank's part in numpy's format: a row of numbers for each sample, zeros if it was never seen
(``state/host_table.py``). ``numpy.load`` reads it. Parts that were never written are holes in the file.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.state.host_table import chunks, is_zero, recode
from openclip_ext.state.sharded_table import ShardedTable

_FORMAT = np.lib.format


def write_table(table: ShardedTable, file: BinaryIO) -> None:
    """Write this rank's part into an empty file."""
    dtype = table.rows(0, 0).numpy().dtype.newbyteorder("<")  # the same on every machine
    shape = (table.size, table.columns)
    header = {"descr": _FORMAT.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    _FORMAT.write_array_header_1_0(file, header)
    size = file.tell() + dtype.itemsize * table.size * table.columns
    for start, stop in chunks(table.size):
        rows = table.rows(start, stop)
        if is_zero(rows):
            file.seek(rows.nbytes, 1)
        else:
            file.write(rows.numpy().astype(dtype, copy=False).data)
    file.truncate(size)


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
        for start, stop in chunks(max(end - begin, 0)):
            rows = part[begin + start - first : begin + stop - first]
            values = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=True))
            table.set_rows(begin + start - table.first, recode(values, table.dtype))
        first += len(part)
