"""Collectives without gradients, which also work with a single process.

No collective here is differentiable, because the exact gradients of the losses need no communication in the backward pass (see
``contrastive/global_loss.py``). Without ``torch.distributed``, the functions return their input, or the result for one
process.
"""

import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from openclip_ext.cli.errors import UsageError

T = TypeVar("T")

# Long, because other ranks wait while one rank evaluates or saves for hours. A stopped rank is detected earlier, because
# its heartbeat is missing (``training/runtime/heartbeat.py``).
_CONTROL_TIMEOUT = timedelta(hours=48)
# Timeouts of a collective on GPUs: in the first step, in which compilation may take long, and in later steps.
START_TIMEOUT, STEP_TIMEOUT = timedelta(hours=1), timedelta(minutes=10)


def is_initialized() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 to ``world_size() - 1``."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_initialized() else 1


def check_world_size(created_with: int) -> None:
    """Raise ValueError if the number of processes has changed since a loss was created."""
    if world_size() != created_with:
        raise ValueError(
            f"the loss was created with {created_with} process(es) and is used with {world_size()}. Create it after "
            "torch.distributed.init_process_group (in Lightning: pass a function that creates it)"
        )


def unconnected_processes() -> int:
    """Return the number of processes that a launcher started; 0 if it is 1, or if there is a process group."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return launched if launched > 1 and not is_initialized() else 0


def check_launcher() -> int:
    """Return the number of processes that a launcher started; raise UsageError if a variable that connects them is missing."""
    number = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    if number > 1 and ("MASTER_ADDR" not in os.environ or os.environ.keys().isdisjoint(("RANK", "SLURM_PROCID"))):
        raise UsageError(
            f"launcher: WORLD_SIZE or SLURM_NTASKS is {number}, but MASTER_ADDR or the rank is not set. Use torchrun or "
            "scripts/slurm/train.sh, or set WORLD_SIZE=1 for a single process"
        )
    return number


def check_equal_sizes(batch: Tensor) -> None:
    """Raise ValueError on all ranks if their batch sizes differ. Without this check, gloo would abort the processes.

    Batches on a GPU are not checked, because the check's communication may take as long as a step. Compiled graphs do not
    check batches either.
    """
    if world_size() > 1 and batch.is_cpu and not torch.compiler.is_compiling():
        sizes = all_gather_object(len(batch))
        if len(set(sizes)) > 1:
            raise ValueError(
                f"batch sizes of the ranks: expected equal sizes, found {', '.join(map(str, sizes))}. Use drop_last=True, and "
                "a sampler with equally many samples per rank"
            )


def is_rank0() -> bool:
    """Return whether this process is rank 0, which writes logs and checkpoints."""
    return rank() == 0


@torch.no_grad()
def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate a tensor from all ranks along dimension 0, in rank order, without gradient. Collective: all ranks call it.

    Args:
        tensor: This rank's rows, ``(N, ...)``, with equal shape and dtype on every rank.

    Returns:
        The rows of all ranks, ``(world_size * N, ...)``. With one process, the detached input.
    """
    if world_size() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor)
    return gathered


@torch.no_grad()
def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, without gradient. Collective: all ranks call it."""
    tensor = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def all_reduce_max(tensor: Tensor) -> Tensor:
    """Return the maximum of a tensor over all ranks, without gradient. Collective: all ranks call it."""
    tensor = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def _control_group() -> dist.ProcessGroup:
    """Return a gloo process group for objects and barriers. It does not use the GPU, and has a long timeout."""
    return _control_group_of(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _control_group_of(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the group on first use, and again if ``torch.distributed`` has been restarted."""
    group = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member of the group"
    return group


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process exited. gloo's error is recognized by its message."""
    return isinstance(error, dist.DistBackendError) or ("gloo" in str(error) and "by peer" in str(error))


def shutdown() -> None:
    """Destroy the process group, if there is one."""
    _control_group_of.cache_clear()
    if is_initialized():
        if torch.__version__ < "2.8":
            # This torch waits for gloo's threads without releasing the GIL. A thread that still needs the GIL, to free the
            # tensors of the last collective, would wait forever.
            time.sleep(0.1)
        dist.destroy_process_group()


def broadcast_object(value: Any) -> Any:
    """Return the (picklable) value of rank 0. Collective: all ranks call it."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group())
    return box[0]


def all_gather_object(value: Any) -> list[Any]:
    """Return every rank's (picklable) value, in rank order. Collective: all ranks call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control_group())
    return values


def on_rank0(action: Callable[[], T]) -> T:
    """Run an action on rank 0; return its result on all ranks. Collective: all ranks call it.

    If the action fails, rank 0 raises its error, and the other ranks raise UsageError.
    """
    result, failure = None, None
    if is_rank0():
        try:
            result = action()
        except Exception as error:
            failure = error
    result, message = broadcast_object((result, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise UsageError(message)
    return result


def any_rank_soon(flag: int) -> Callable[[], int]:
    """Return a function that waits for the maximum of an integer over all ranks, without a GPU sync.

    Collective: all ranks call it.
    """
    if world_size() == 1:
        return lambda: flag
    box = torch.tensor(flag)
    reduction = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=_control_group(), async_op=True)

    def result() -> int:
        reduction.wait()
        return int(box)

    return result


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of NCCL's watchdog for later collectives. Synchronizes with the GPU. Collective: all ranks call it.

    Collectives that are already running keep their old timeout.
    """
    if is_initialized() and dist.get_backend() == "nccl":
        barrier()
        torch.cuda.synchronize()
        # The function is public since PyTorch 2.14.
        set_of_group = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
        set_of_group(timeout, dist.group.WORLD)


def barrier() -> None:
    """Wait until all ranks have called this function, for hours if necessary. Collective: all ranks call it."""
    if world_size() > 1:
        dist.barrier(group=_control_group())
