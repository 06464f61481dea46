"""Tables of per-sample state, split over the processes by contiguous ranges of the index."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import distributed
from openclip_ext.state.host_table import HostTable, chunks, decode, encode, put, recode

_SHARD = "shard"
# With device="auto" a larger part of a table goes to the host.
_LARGEST_ON_DEVICE = 1 << 30


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of indices of process ``rank``: ``⌈n/K⌉`` each, fewer at the end."""
    per_rank = math.ceil(num_samples / world_size)
    first = min(rank * per_rank, num_samples)
    return first, min(first + per_rank, num_samples)


@dataclass(frozen=True)
class _Fetched:
    """A pending read: the index, its slots in this process, and the future of the stored rows ``(B, columns)`` on the CPU."""

    index: Tensor
    own_slots: Tensor
    rows: "Future[Tensor]"


class ShardedTable(nn.Module):
    """``columns`` numbers for each of ``num_samples`` samples; each process keeps its range.

    A read costs one all-reduce of ``columns·B`` scalars (the owner contributes, the others add zero). A write is local.
    Samples that were never written read as NaN.

    The table is on the model's device, in host memory, or in a memory-mapped file (:class:`HostTable`). On the host, parts
    that were never written take no memory. Tell :meth:`prefetch` which samples come next: otherwise :meth:`read` waits for
    the device to learn it.

    Args:
        columns: numbers per sample.
        num_samples: size ``n`` of the index space.
        device: ``model``: the model's device; ``cpu``: host memory; ``auto``: the model's device if this process's part is at
            most 1 GiB in float32, else host memory.
        folder: keep the table in a memory-mapped file in this folder; the file disappears with the process.

    Attributes:
        values: ``(columns, size + 1)`` stored numbers (:func:`encode`). If the table is on the host, it is empty and only has
            the precision and the device.
        host: the rows, if the table is on the host.
        foreign: 0-d bool: a read came with other samples than :meth:`prefetch` was given.

    Raises:
        ValueError: ``device="model"`` together with a folder.
        OSError: too little memory, or too little room in the folder.
    """

    values: Tensor
    foreign: Tensor

    def __init__(self, columns: int, num_samples: int, device: str = "auto", folder: str | None = None) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.columns = columns
        self.world_size = distributed.world_size()
        self.first, self.end = shard_bounds(num_samples, distributed.rank(), self.world_size)
        self.host: HostTable | None = None
        # The last row takes the writes of other processes' samples, so that no shape depends on data.
        rows = self.size + 1
        if goes_to_host(device, folder, columns * rows * torch.float32.itemsize):
            self.host, rows = HostTable(rows, columns, torch.float32, folder), 0
        self.register_buffer("values", torch.zeros(columns, rows), persistent=False)
        self.register_buffer("foreign", torch.zeros((), dtype=torch.bool), persistent=False)
        self._fetched: _Fetched | None = None
        self._keeps_overwritten = False
        self._overwritten: tuple[Tensor, Tensor, Tensor] | None = None
        self._apart = False

    @property
    def size(self) -> int:
        """Samples in this process's range."""
        return self.end - self.first

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.values.dtype if self.host is None else self.host.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this process's part."""
        return self.columns * self.size * self.dtype.itemsize

    def _slots(self, index: Tensor) -> Tensor:
        """Return the row of each sample. Samples of other processes get −1 or :attr:`size`, which both are the last row."""
        distributed.check_world_size(self.world_size)
        offset = index - self.first if self.first else index
        return offset.clamp(-1, self.size)

    # --- single samples ----------------------------------------------------------------------------------------------

    def prefetch(self, index: Tensor) -> None:
        """Begin to read the samples ``index`` ``(B,)``, on the CPU, for the next :meth:`read`, if the table is on the host."""
        if self.host is not None:
            self._fetched = self._fetch(self.host, index)

    @torch.no_grad()
    def read(self, index: Tensor, columns: slice = slice(None), missing: Tensor | None = None) -> Tensor:
        """Return the values of the samples ``index``, the same on every process: ``(columns, B)``, or some of the columns.

        Args:
            index: ``(B,)``; the values of an index outside of ``[0, num_samples)`` are arbitrary.
            columns: the columns to return.
            missing: ``(columns, B)`` for samples that were never written; None: NaN.
        """
        slots = self._slots(index)
        stored = self.values[columns, slots] if self.host is None else self._from_host(self.host, index)[columns]
        values = decode(stored, missing)
        if self.world_size == 1:
            return values
        return distributed.all_reduce_sum(values.masked_fill_((slots < 0) | (slots == self.size), 0))

    @torch.no_grad()
    def write(self, index: Tensor, values: Tensor, where: Tensor) -> None:
        """Store ``values`` ``(columns, B)`` where ``where`` ``(B,)`` holds; equal indices must come with equal values."""
        slots = self._slots(index).masked_fill_(~where, self.size)
        rows = encode(values.to(self.dtype))
        if self.host is None:
            if self._keeps_overwritten:
                self._overwritten = slots, self.values[:, slots], rows
            self.values[:, slots] = rows
            return
        fetched, self._fetched = self._fetched, None
        among = None if fetched is None else fetched.own_slots
        self.host.scatter(slots, rows.T, among, keep=self._keeps_overwritten)

    def keep_overwritten(self) -> None:
        """Let the next step's :meth:`write` be one that :meth:`take_back` can undo."""
        self._keeps_overwritten, self._overwritten = True, None

    @torch.no_grad()
    def take_back(self, unless: Tensor | None = None) -> None:
        """Undo the :meth:`write` since :meth:`keep_overwritten`, if there was one.

        Args:
            unless: 0-d bool on the device; if it holds, nothing changes. The host does not wait for it.
        """
        if self.host is not None:
            self.host.take_back(unless)
        elif self._overwritten is not None:
            slots, before, after = self._overwritten
            self.values[:, slots] = before if unless is None else torch.where(unless, after, before)
        self._keeps_overwritten, self._overwritten = False, None

    def _fetch(self, host: HostTable, index: Tensor) -> _Fetched:
        slots = self._slots(index) % (self.size + 1)
        on_gpu = self.values.is_cuda
        rows = host.gather(slots, pinned=on_gpu)
        # No read has to wait for a write to the rows of other processes.
        return _Fetched(index.pin_memory() if on_gpu else index, slots.masked_fill(slots == self.size, -1), rows)

    def _from_host(self, host: HostTable, index: Tensor) -> Tensor:
        """Return the stored values ``(columns, B)`` of this process's samples, and arbitrary ones of others."""
        fetched = self._fetched
        if (
            fetched is None
            or fetched.index.shape != index.shape
            or (index.is_cpu and not torch.equal(fetched.index, index))
        ):
            fetched, self._fetched = self._fetch(host, index.cpu()), None
        stored = fetched.rows.result().to(index.device, non_blocking=True)
        # Comparing indices on the host would force a sync. Compare on the device: rows that were not prefetched read as never
        # written, and ``foreign`` records it.
        expected = fetched.index.to(index.device, non_blocking=True) == index
        self.foreign = self.foreign.to(index.device) | ~expected.all()
        # As a table on the device lies in memory: vectorized and plain arithmetic differ in the last bit.
        return torch.where(expected, stored.T.contiguous(), 0)

    # --- the whole part ----------------------------------------------------------------------------------------------

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the stored rows ``start`` to ``stop`` of this process's part on the CPU; a view if the table is there."""
        if self.host is not None:
            return self.host.stored[start:stop]
        return self.values[:, start:stop].T.cpu().contiguous()

    @torch.no_grad()
    def set_rows(self, start: int, rows: Tensor) -> None:
        """Overwrite the rows from ``start`` with stored ones of this table's precision, ``(rows, columns)`` on the CPU."""
        stop = start + len(rows)
        self._fetched = None
        if self.host is not None:
            put(self.host.stored[start:stop], rows)
        else:
            self.values[:, start:stop] = rows.T.to(self.values.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "ShardedTable":
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.values.dtype, torch.float32)
        if self.host is not None and self.host.dtype != dtype:
            self.host, self._fetched = self.host.converted(dtype), None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave pending work out of copies."""
        return {**self.__dict__, "_fetched": None, "_overwritten": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._apart:
            # A copy: a memory-mapped table must not change in somebody's checkpoint, and safetensors wants it contiguous.
            values = self.values[:, :-1] if self.host is None else self.rows(0, self.size).T
            destination[prefix + _SHARD] = values.clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        missing = args[2]
        key = prefix + _SHARD
        if self._apart:
            return
        if key not in state_dict:
            missing.append(key)
            return
        shard = state_dict[key]
        if shard.shape != (self.columns, self.size):
            raise ValueError(
                f"{key} has shape {tuple(shard.shape)}, this process keeps {(self.columns, self.size)}: the state is of "
                "another number of samples or of processes"
            )
        for start, stop in chunks(self.size):
            self.set_rows(start, recode(shard[:, start:stop].T, self.dtype).cpu())


@contextlib.contextmanager
def kept_apart(tables: Iterable[ShardedTable]) -> Iterator[None]:
    """Return a context in which ``state_dict()`` and ``load_state_dict()`` skip these tables, which checkpoints stream."""
    tables = list(tables)
    for table in tables:
        table._apart = True
    try:
        yield
    finally:
        for table in tables:
            table._apart = False


def goes_to_host(device: str, folder: str | None, size: int) -> bool:
    """Return whether a part of a table of ``size`` bytes in float32 goes to the host; see :class:`ShardedTable`."""
    if folder is not None and device == "model":
        raise ValueError(f"state_device=model and state_dir={folder} contradict each other: give one of them")
    return folder is not None or device == "cpu" or (device == "auto" and size > _LARGEST_ON_DEVICE)


def log_mean_of_equal(index: Tensor, log_values: Tensor, valid: Tensor) -> Tensor:
    """Return the logarithm of the mean of the values that an index has, for each of its occurrences ``(rows, B)``.

    Args:
        index: ``(B,)``.
        log_values: ``(rows, B)`` logarithms of the values.
        valid: ``(B,)``, whether a sample counts; the result of one that does not is arbitrary.
    """
    if _all_differ(index):
        return log_values
    group, size = _groups(index, valid)
    group = group.expand_as(log_values)
    masked = log_values.masked_fill(~valid, -torch.inf)
    # A finite bound where all are −inf, so that their difference is no NaN.
    bound = torch.full_like(log_values, torch.finfo(log_values.dtype).min)
    largest = bound.scatter_reduce(1, group, masked, "amax").gather(1, group)
    # On a GPU the order of summation is not fixed. Sums in double precision round to the same result.
    shares = (masked - largest).double().exp()
    sums = torch.zeros_like(shares).scatter_add(1, group, shares).gather(1, group)
    return largest + (sums / size).log().to(log_values.dtype)


def mean_of_equal(index: Tensor, values: Tensor, valid: Tensor) -> Tensor:
    """Do as :func:`log_mean_of_equal` with the values ``(rows, B)`` themselves."""
    if _all_differ(index):
        return values
    group, size = _groups(index, valid)
    group = group.expand_as(values)
    wide = values.double().masked_fill_(~valid, 0)
    sums = torch.zeros_like(wide).scatter_add(1, group, wide).gather(1, group)
    return (sums / size).to(values.dtype)


def count_of_equal(index: Tensor, valid: Tensor) -> Tensor:
    """Return how many samples that count have each sample's index, ``(B,)`` int64, at least 1."""
    return _groups(index, valid)[1].to(torch.int64)


def _all_differ(index: Tensor) -> bool:
    """Return whether no index occurs twice; False on a GPU, where finding out takes a wait, and while compiling."""
    return index.is_cpu and not torch.compiler.is_compiling() and len(torch.unique(index)) == len(index)


def _groups(index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's group of equal indices ``(B,)``, and how many members of it count ``(B,)``, at least 1."""
    group = torch.searchsorted(index.sort().values, index)
    counts = valid.double()
    size = torch.zeros_like(counts).scatter_add_(0, group, counts).gather(0, group)
    return group, size.clamp_(min=1)
