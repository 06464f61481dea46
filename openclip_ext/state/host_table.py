"""Per-sample state in host memory or in a memory-mapped file.

In storage zero means "never written", because memory and files of zeros cost nothing until they are written to. A value of
zero is stored as ``-0.0``.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows to convert or copy at a time; 4 to 16 MiB in the losses' tables.
CHUNK_ROWS = 1 << 19
_INTEGER_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(values: Tensor) -> Tensor:
    """Return the values as they are stored, in float32 at least: ``-0.0`` for zero, and zero for NaN ("never written")."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.masked_fill(values == 0, -0.0).nan_to_num_(0.0, torch.inf, -torch.inf)


def decode(stored: Tensor, missing: Tensor | None = None) -> Tensor:
    """Return the values from what is stored; ``missing``, of the same shape, or NaN where nothing was ever written."""
    never = _bits(stored) == 0
    return stored.masked_fill(never, torch.nan) if missing is None else torch.where(never, missing, stored)


def recode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the stored values in another precision. A value that underflows stays written."""
    return stored if stored.dtype == dtype else encode(decode(stored).to(dtype))


def _bits(stored: Tensor) -> Tensor:
    return stored.contiguous().view(_INTEGER_OF[stored.itemsize])


def chunks(rows: int) -> list[tuple[int, int]]:
    """Return the ranges of :data:`CHUNK_ROWS` rows."""
    return [(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


@dataclass(frozen=True)
class _Write:
    """A write in the background: the slots that it may change (None: all), and the future of its end."""

    among: Tensor | None
    done: "Future[Any]"


class HostTable:
    """``rows`` × ``columns`` stored numbers (:func:`encode`). Pages that were never written to take no memory.

    Background threads read and write single rows, so that no caller waits for memory, the disk or the device. A read sees all
    earlier writes of its rows, and does not wait for writes of other rows, which the device may not have computed yet.

    Args:
        rows, columns: size.
        dtype: float32 or float64.
        folder: folder for a memory-mapped file, which has no name and disappears with the process; None: in memory.

    Raises:
        OSError: ``folder`` cannot be written to, or has too little room for the full table.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, folder: str | None = None) -> None:
        self.dtype = dtype
        self.folder = folder
        memory = _zeros(rows * columns * dtype.itemsize, folder)
        self._stored = torch.frombuffer(memory, dtype=dtype).view(rows, columns)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._reads: list[Future[Any]] = []
        self._writes: list[_Write] = []
        self._overwritten: tuple[Tensor, Tensor] | None = None
        self._failure: BaseException | None = None

    @property
    def stored(self) -> Tensor:
        """All rows, ``(rows, columns)``, after all pending writes."""
        self.finish()
        return self._stored

    def gather(self, slots: Tensor, pinned: bool = False) -> "Future[Tensor]":
        """Read the rows ``slots`` ``(B,)`` in the background.

        Args:
            slots: on the CPU.
            pinned: into memory from which a GPU copies without waiting.
        """
        # Allocated here, because a new thread would pin memory for the first GPU.
        rows = torch.empty((len(slots), self._stored.shape[1]), dtype=self._stored.dtype, pin_memory=pinned)
        self._writes = [write for write in self._writes if not write.done.done()]
        pending = self._writes

        def read() -> Tensor:
            for write in pending:
                if write.among is None or torch.isin(slots, write.among).any():
                    write.done.result()
            return torch.index_select(self._stored, 0, slots, out=rows)

        self._reads = [read for read in self._reads if not read.done()]
        self._reads.append(self._submit("reads", read))
        return self._reads[-1]

    def scatter(self, slots: Tensor, rows: Tensor, among: Tensor | None = None, keep: bool = False) -> None:
        """Write ``rows`` ``(B, columns)`` to ``slots`` ``(B,)`` in the background. The caller must not change the tensors.

        Args:
            slots, rows: on the CPU or on a GPU.
            among: on the CPU, slots whose reads must wait for this write; None: every read waits.
            keep: keep what is overwritten for :meth:`take_back`.
        """
        arrived, (slots, rows) = _on_host(slots, rows)

        def write() -> None:
            arrived()
            self._overwritten = (slots, self._stored[slots]) if keep else None
            self._stored[slots] = rows

        self._writes.append(_Write(among, self._submit("writes", write)))

    def take_back(self, unless: Tensor | None = None) -> None:
        """Undo the last :meth:`scatter` in the background.

        Args:
            unless: 0-d bool, which may be on a GPU; where it holds nothing changes.
        """
        arrived, (keep,) = _on_host(torch.zeros((), dtype=torch.bool) if unless is None else unless)

        def undo() -> None:
            arrived()
            if self._overwritten is not None and not keep:
                slots, rows = self._overwritten
                self._stored[slots] = rows
            self._overwritten = None

        among = self._writes[-1].among if self._writes else None
        self._writes.append(_Write(among, self._submit("writes", undo)))

    def finish(self) -> None:
        """Wait for all pending work; raise an error of the background threads."""
        for pending in [*self._reads, *(write.done for write in self._writes)]:
            pending.result()

    def converted(self, dtype: torch.dtype) -> "HostTable":
        """Return the same numbers in another precision."""
        rows, columns = self._stored.shape
        other = HostTable(rows, columns, dtype, self.folder)
        for start, stop in chunks(len(self._stored)):
            put(other._stored[start:stop], recode(self.stored[start:stop], dtype))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave the threads out of copies."""
        self.finish()
        return {**self.__dict__, "_threads": {}, "_reads": [], "_writes": [], "_overwritten": None}

    def _submit(self, thread: str, work: Callable[[], Any]) -> "Future[Any]":
        if thread not in self._threads:
            self._threads[thread] = _new_thread(thread)
        return self._threads[thread].submit(self._unless_failed, work)

    def _unless_failed(self, work: Callable[[], Any]) -> Any:
        """Run ``work``, or raise the error of earlier work: the numbers are then incomplete."""
        if self._failure is None:
            try:
                return work()
            except BaseException as error:
                self._failure = error
        raise self._failure


def _new_thread(work: str) -> ThreadPoolExecutor:
    name = f"per-sample state, {work}"
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ThreadPoolExecutor(1, name)
    # A thread begins on the first GPU, and waiting for an event would take memory there.
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(1, name, initializer=lambda: torch.cuda.set_device(device))


def put(target: Tensor, rows: Tensor) -> None:
    """Overwrite stored rows. Rows that are all zero before and after are not touched and keep taking no memory."""
    if not (is_zero(rows) and is_zero(target)):
        target.copy_(rows)


def is_zero(rows: Tensor) -> bool:
    """Return whether stored rows on the CPU were never written. numpy is six times as fast as torch here."""
    return not _bits(rows).numpy().any()


def _on_host(*tensors: Tensor) -> tuple[Callable[[], None], list[Tensor]]:
    """Begin to copy tensors of one device to the host; return a function that waits for the end, and the copies."""
    if not tensors[0].is_cuda:
        return lambda: None, list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensors[0].device))  # which need not be the current device
    return arrived.synchronize, copies


def _zeros(size: int, folder: str | None) -> mmap.mmap:
    if folder is not None:
        return _zeros_in_file(size, folder)
    # Private: reading a page that was never written to takes no memory, which it does in shared memory.
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(
            f"no {size / 2**30:.1f} GiB of host memory for the per-sample state ({error}): give a folder for it "
            "(state_dir, --state-dir), or use more processes"
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        # Otherwise every page would be copied when it is written to while a data loader's worker lives.
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _zeros_in_file(size: int, folder: str) -> mmap.mmap:
    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = shutil.disk_usage(folder).free
    if free < size * on_this_node:
        raise OSError(
            f"{folder} has {free / 2**30:.1f} GiB free, the per-sample state of {on_this_node} process(es) grows to "
            f"{size * on_this_node / 2**30:.1f} GiB there: choose another folder"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            # Otherwise a write would end the process where another program has filled the disk since.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            raise OSError(
                f"{folder} has no {size / 2**30:.1f} GiB for the per-sample state ({error.strerror})"
            ) from error
        return mmap.mmap(file.fileno(), size)
