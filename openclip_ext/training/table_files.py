"""Tables of per-sample state on disk, written and read in parts: never a second copy of one in memory.

A file holds one rank's part in numpy's format: a row of numbers for each sample, zeros if it was never seen
(``state/host_table.py``). ``numpy.load`` reads it. Parts that were never written are holes in the file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from openclip_ext.state.host_table import chunks, is_zero, recode
from openclip_ext.state.sharded_table import ShardedTable
from openclip_ext.training.errors import UsageError

_FORMAT = np.lib.format


def write_table(table: ShardedTable, file: BinaryIO) -> None:
    """Write this rank's part into an empty file.

    Raises:
        OSError: as ``file.write``.
    """
    dtype = _numpy_type(table.rows(0, 0))
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


@dataclass(frozen=True)
class TablePart:
    """One rank's part of a saved table.

    Attributes:
        name: what to call it in messages.
        size, columns: samples, and numbers of each.
        dtype: precision of the numbers.
        read: returns the stored rows of a range, ``(stop - start, columns)``.
    """

    name: str
    size: int
    columns: int
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]


def open_table(path: Path) -> TablePart:
    """A part that :func:`write_table` wrote.

    Raises:
        UsageError: not such a file, or not all of it.
    """
    try:
        with open(path, "rb") as file:
            version = _FORMAT.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"numpy format {version}, expected (1, 0)")
            (size, columns), _, dtype = _FORMAT.read_array_header_1_0(file)
            offset = file.tell()
        expected, found = offset + dtype.itemsize * size * columns, path.stat().st_size
        if found != expected:
            raise ValueError(f"it has {found} bytes, expected {expected}")
        precision = {4: torch.float32, 8: torch.float64}[dtype.itemsize]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error

    def read(start: int, stop: int) -> Tensor:
        first = offset + dtype.itemsize * columns * start
        values = np.fromfile(path, dtype, columns * (stop - start), offset=first)
        return torch.from_numpy(values.astype(dtype.newbyteorder("="), copy=False)).view(stop - start, columns)

    return TablePart(str(path), size, columns, precision, read)


def restore_table(table: ShardedTable, parts: Sequence[TablePart]) -> None:
    """Fill this rank's part of a table from all ranks' parts at the save, in their order; any number of ranks.

    Raises:
        UsageError: the parts are of a table of another size, or one of them cannot be read.
    """
    found = sum(part.size for part in parts), parts[0].columns
    if found != (table.num_samples, table.columns):
        raise UsageError(
            f"{parts[0].name} is of a table of {found[0]} samples with {found[1]} numbers each, this run's has "
            f"{table.num_samples} with {table.columns}: resume with the data and the options of the saved run"
        )
    first = 0
    for part in parts:
        begin, end = max(first, table.first), min(first + part.size, table.end)
        for start, stop in chunks(max(end - begin, 0)):
            rows = part.read(begin + start - first, begin + stop - first)
            table.set_rows(begin + start - table.first, recode(rows, table.dtype))
        first += part.size


def _numpy_type(rows: Tensor) -> np.dtype:
    """Of files: the same on every machine."""
    return rows.numpy().dtype.newbyteorder("<")
