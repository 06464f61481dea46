"""Numbers of many samples outside of the device's memory: in the host's, or in a memory-mapped file."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# Rows that are converted or copied at once; 4 to 16 MiB in the losses' tables.
CHUNK_ROWS = 1 << 19
_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOAT_OF = {integer: floating for floating, integer in _INTEGER_OF.items()}


def encode(values: Tensor) -> Tensor:
    """The bits of ``values`` XOR those of NaN, as integers: 0 stands for NaN, which is what was never written.

    So memory and files of zeros, which cost nothing until they are written to, hold no value. Lower precisions become
    float32; :func:`decode` gives back every other value, bit for bit.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.view(_INTEGER_OF[values.dtype]) ^ _nan_bits(values.dtype)


def decode(bits: Tensor) -> Tensor:
    """The values that :func:`encode` was given."""
    dtype = _FLOAT_OF[bits.dtype]
    return (bits ^ _nan_bits(dtype)).view(dtype)


def recode(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Encoded values in another precision."""
    return bits if _FLOAT_OF[bits.dtype] == dtype else encode(decode(bits).to(dtype))


def chunks(rows: int) -> list[tuple[int, int]]:
    """Ranges of :data:`CHUNK_ROWS` rows."""
    return [(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


def _nan_bits(dtype: torch.dtype) -> int:
    return int(torch.tensor(float("nan"), dtype=dtype).view(_INTEGER_OF[dtype]))


class HostTable:
    """``rows`` × ``columns`` encoded numbers (:func:`encode`) of which pages that nobody wrote to take no room.

    One background thread does all reading and writing of single rows, in the order in which it was asked for; so nobody
    waits for memory, the disk or the device, and whoever reads sees what was written before.

    Args:
        rows, columns: size.
        dtype: float32 or float64.
        folder: where a memory-mapped file holds the numbers; None: in memory. The file has no name and goes with the
            process, however that ends.

    Raises:
        OSError: ``folder`` cannot be written to, or has too little room for the full table.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, folder: str | None = None) -> None:
        self.dtype = dtype
        self.folder = folder
        memory = _zeros(rows * columns * dtype.itemsize, folder)
        self._bits = torch.frombuffer(memory, dtype=_INTEGER_OF[dtype]).view(rows, columns)
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future | None = None
        self._failure: BaseException | None = None

    @property
    def bits(self) -> Tensor:
        """All rows, ``(rows, columns)``, after everything that was asked for is done."""
        self.finish()
        return self._bits

    def gather(self, slots: Tensor, pinned: bool = False) -> "Future[Tensor]":
        """Read the rows ``slots`` ``(B,)`` in the background.

        Args:
            slots: on the CPU.
            pinned: into memory from which a GPU copies without waiting.
        """
        # Allocated here: a new thread would pin memory for the first GPU.
        rows = torch.empty((len(slots), self._bits.shape[1]), dtype=self._bits.dtype, pin_memory=pinned)
        return self._submit(lambda: torch.index_select(self._bits, 0, slots, out=rows))

    def scatter(self, slots: Tensor, rows: Tensor) -> None:
        """Write ``rows`` ``(B, columns)`` to ``slots`` ``(B,)`` in the background; both may be on a GPU.

        Neither may be changed by the caller afterwards.
        """
        arrived = None
        if slots.is_cuda:
            slots, rows = _on_its_way_to_host(slots), _on_its_way_to_host(rows)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()

        def write() -> None:
            if arrived is not None:
                arrived.synchronize()
            self._bits[slots] = rows

        self._submit(write)

    def finish(self) -> None:
        """Wait until everything that was asked for is done; raises what has failed in the background."""
        if self._last is not None:
            self._last.result()

    def converted(self, dtype: torch.dtype) -> "HostTable":
        """The same numbers in another precision."""
        other = HostTable(*self._bits.shape, dtype, self.folder)
        for start, stop in chunks(len(self._bits)):
            put(other._bits[start:stop], recode(self.bits[start:stop], dtype))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the numbers without the thread."""
        self.finish()
        return {**self.__dict__, "_thread": None, "_last": None}

    def _submit(self, work: Callable[[], Any]) -> Future:
        if self._thread is None:
            self._thread = _new_thread()
        self._last = self._thread.submit(self._unless_failed, work)
        return self._last

    def _unless_failed(self, work: Callable[[], Any]) -> Any:
        """Do what was asked for, or raise what went wrong before: then the numbers are no longer complete."""
        if self._failure is None:
            try:
                return work()
            except BaseException as error:
                self._failure = error
        raise self._failure


def _new_thread() -> ThreadPoolExecutor:
    # A thread begins on the first GPU, and waiting for an event would take memory there (as torch's pinning thread knows).
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    start = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)} if on_gpu else {}
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="per-sample state", **start)


def put(target: Tensor, rows: Tensor) -> None:
    """Overwrite encoded rows, without touching memory for zeros that are there already."""
    if not (is_zero(rows) and is_zero(target)):
        target.copy_(rows)


def is_zero(rows: Tensor) -> bool:
    """Whether encoded rows on the CPU were never written. numpy looks six times as fast as torch does."""
    return not rows.numpy().any()


def _on_its_way_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete once the current stream has come so far."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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
        # Else every page would be copied when it is written to while a data loader's worker lives.
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
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
