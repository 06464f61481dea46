"""Tables of per-sample state, sharded over processes. Each process stores a contiguous range of indices."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import distributed

_SHARD = "shard"
# Its exponential is finite in double precision.
_LARGEST_EXPONENT = 700.0


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first index and the end of the range that ``rank`` stores. The last ranks may have fewer indices."""
    per_rank = math.ceil(num_samples / world_size)
    first = min(rank * per_rank, num_samples)
    return first, min(first + per_rank, num_samples)


class ShardedTable(nn.Module):
    """A table with ``columns`` elements for each of ``num_samples`` samples. Each process stores its range on its device.

    A read of ``B`` samples needs one all-reduce of ``columns·B`` scalars: the process with a sample adds the values, and all
    other processes add 0. A write needs no communication. Values of samples that were never written are NaN.

    Attributes:
        values: The shard of this process, ``(columns, size + 1)``. NaN means that nothing was written.
        overwritten: The rows of the last :meth:`write` and their earlier values, for :meth:`undo_write`. None means that there
            is no write to undo.
    """

    values: Tensor

    def __init__(self, columns: int, num_samples: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.columns = columns
        self.world_size = distributed.world_size()
        self.first, self.end = shard_bounds(num_samples, distributed.rank(), self.world_size)
        # The additional last row receives the writes for samples of other processes. So no tensor shape depends on the data.
        self.register_buffer("values", torch.full((columns, self.size + 1), torch.nan), persistent=False)
        self.overwritten: tuple[Tensor, Tensor] | None = None
        self._in_state_dict = True

    @property
    def size(self) -> int:
        """Number of samples in this process's range."""
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of this process's shard."""
        return self.columns * self.size * self.values.itemsize

    def _slots(self, index: Tensor) -> Tensor:
        """Return the row of each sample. Samples of other processes get −1 or :attr:`size`, which both mean the last row."""
        distributed.check_world_size(self.world_size)
        offset = index - self.first if self.first else index
        return offset.clamp(-1, self.size)

    @torch.no_grad()
    def read(self, index: Tensor, columns: slice = slice(None), missing: Tensor | None = None) -> Tensor:
        """Return the values of samples, ``(columns, B)``, equal on all processes. Collective: all ranks call it.

        Args:
            index: ``(B,)`` sample indices. The result for an index outside of ``[0, num_samples)`` is arbitrary.
            columns: the columns to read. The default is all columns.
            missing: ``(columns, B)``, results for samples that were never written. None (default) means NaN.
        """
        slots = self._slots(index)
        values = self.values[columns, slots]
        if missing is not None:
            values = torch.where(torch.isnan(values), missing, values)
        if self.world_size == 1:
            return values
        return distributed.all_reduce_sum(values.masked_fill_((slots < 0) | (slots == self.size), 0))

    @torch.no_grad()
    def write(self, index: Tensor, values: Tensor, where: Tensor) -> None:
        """Store ``values`` ``(columns, B)`` of those samples whose ``where`` ``(B,)`` is True.

        Samples with equal indices must have equal values. Call it once per step: :meth:`undo_write` undoes only one call.
        """
        slots = self._slots(index).masked_fill(~where, self.size)
        self.overwritten = slots, self.values[:, slots]
        self.values[:, slots] = values.to(self.values.dtype)

    @torch.no_grad()
    def undo_write(self, skip_if: Tensor | None = None) -> None:
        """Undo the last :meth:`write` if :attr:`overwritten` contains it. Do nothing if ``skip_if`` (0-d bool) is True."""
        if self.overwritten is not None:
            slots, before = self.overwritten
            self.values[:, slots] = before if skip_if is None else torch.where(skip_if, self.values[:, slots], before)
            self.overwritten = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop`` of this process's shard on the CPU, ``(rows, columns)``."""
        return self.values[:, start:stop].T.cpu().contiguous()

    @torch.no_grad()
    def set_rows(self, start: int, rows: Tensor) -> None:
        """Overwrite the rows ``start`` to ``start + k`` with ``rows`` ``(k, columns)``, of any dtype and device."""
        self.values[:, start : start + len(rows)] = rows.T.to(self.values)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._in_state_dict:
            # The entry is a contiguous copy, which safetensors needs.
            destination[prefix + _SHARD] = self.values[:, :-1].clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        missing = args[2]
        key = prefix + _SHARD
        if not self._in_state_dict:
            return
        if key not in state_dict:
            missing.append(key)
            return
        shard = state_dict[key]
        if shard.shape != (self.columns, self.size):
            raise ValueError(
                f"{key}: expected shape {(self.columns, self.size)}, found {tuple(shard.shape)}. Load the state with the same "
                "number of samples and processes"
            )
        # Copy each column separately, because converting the full shard to another dtype would need twice the memory.
        for column, given in zip(self.values, shard, strict=True):
            column[:-1].copy_(given)


@contextlib.contextmanager
def exclude_tables(tables: Iterable[ShardedTable]) -> Iterator[None]:
    """Exclude tables from ``state_dict()`` and ``load_state_dict()`` inside the ``with`` block.

    Checkpoints need this, because they write and read tables separately, in chunks.
    """
    tables = list(tables)
    for table in tables:
        table._in_state_dict = False
    try:
        yield
    finally:
        for table in tables:
            table._in_state_dict = True


def group_log_mean(index: Tensor, log_values: Tensor, valid: Tensor) -> Tensor:
    """Average the values of all valid samples with equal index; return the log of the mean for each sample, ``(rows, B)``.

    ``log_values`` ``(rows, B)`` contains the logarithms of the values. They are clamped to ±700. Results of masked samples are
    arbitrary.
    """
    values = log_values.double().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp_()
    return group_mean(index, values, valid).log_().to(log_values.dtype)


def group_mean(index: Tensor, values: Tensor, valid: Tensor) -> Tensor:
    """Average the values of all valid samples with equal index; return the mean for each sample, ``(rows, B)``."""
    rows = [values.double().masked_fill(~valid, 0), valid.double()[None]]
    sums, counts = _group_sums(index, torch.cat(rows)).split([len(values), 1])
    return (sums / counts.clamp(min=1)).to(values.dtype)


def group_count(index: Tensor, valid: Tensor) -> Tensor:
    """Count the valid samples with equal index; return the number for each sample, ``(B,)`` int64, at least 1."""
    return _group_sums(index, valid.double()[None])[0].clamp(min=1).to(torch.int64)


def merge_labels(labels: Tensor) -> Tensor:
    """Merge several labels per sample, ``(B, k)``, into one, ``(B,)``. This causes no host-device sync.

    Samples that agree in one of their labels get equal labels, also if only other samples connect them.
    """
    if labels.ndim == 1:
        return labels
    groups = [torch.searchsorted(column.sort().values, column) for column in labels.T.contiguous()]
    # Each sample points to the smallest known sample that is connected with it. As in FastSV (Zhang et al., 2020), the sample
    # that it points to receives a smaller number, too, so a few rounds are enough.
    merged = torch.arange(len(labels), device=labels.device)
    for _ in range(len(labels).bit_length()):
        for group in groups:
            smallest = merged.scatter_reduce(0, group, merged, "amin", include_self=False).gather(0, group)
            merged = merged.scatter_reduce(0, merged, smallest, "amin").minimum(smallest)
        merged = merged.gather(0, merged)
    return merged


def _group_sums(index: Tensor, values: Tensor) -> Tensor:
    """Add the values of all samples with equal index; return the sum for each sample, ``(rows, B)`` like ``values``.

    On a GPU, the order of summation varies. Sums in double precision still give equal results after rounding to float32.
    """
    group = torch.searchsorted(index.sort().values, index).expand_as(values)
    return torch.zeros_like(values).scatter_add_(1, group, values).gather(1, group)
