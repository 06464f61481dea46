"""Collectives that are right with one process, too, and never carry a gradient.

The exact gradients of the losses need no communication in the backward pass (see ``contrastive/global_loss.py``), so
nothing here is differentiable. Every function is the identity (or trivial) without ``torch.distributed``.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from openclip_ext.cli.errors import UsageError

T = TypeVar("T")

# One rank may evaluate or save for hours. A rank that has stopped is noticed by ``training/heartbeat.py``.
_PATIENCE = timedelta(hours=48)
# Of a collective on GPUs: until the slowest rank has taken its first step, which compiles and tunes; afterwards.
START_PATIENCE, STEP_PATIENCE = timedelta(hours=1), timedelta(minutes=10)


def is_initialized() -> bool:
    """Return whether several processes may be working together."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's number, 0 to ``world_size() - 1``."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_initialized() else 1


def check_world_size(created_with: int) -> None:
    """Raise ValueError if a loss is used with another number of processes than it was created with."""
    if world_size() != created_with:
        raise ValueError(
            f"the loss was created with {created_with} process(es) and is used with {world_size()}: create it after "
            "torch.distributed.init_process_group (in Lightning: give the module a function that creates it)"
        )


def unconnected_processes() -> int:
    """Count the processes that a launcher such as torchrun says it started, where they do not know of each other; else 0."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return launched if launched > 1 and not is_initialized() else 0


def check_equal_sizes(batch: Tensor) -> None:
    """Raise ValueError on all ranks if their batches on the CPU have different sizes: gloo would end the processes.

    On a GPU the sizes are not exchanged, since that takes as long as some steps.
    """
    if world_size() > 1 and batch.is_cpu:
        sizes = all_gather_on_host(torch.tensor([len(batch)])).tolist()
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the ranks have batches of different sizes: {', '.join(map(str, sizes))}. Expected equal ones: use "
                "drop_last=True, and a sampler that gives each rank as many samples"
            )


def is_master() -> bool:
    """Return whether this process writes logs and checkpoints."""
    return rank() == 0


@torch.no_grad()
def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate a tensor of equal shape from all ranks along dimension 0, in rank order, without gradient.

    Args:
        tensor: ``(N, ...)``, the same shape and type on every rank.

    Returns:
        ``(world_size * N, ...)``; with one process the detached input itself.
    """
    if world_size() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor)
    return gathered


@torch.no_grad()
def all_gather_on_host(tensor: Tensor) -> Tensor:
    """Gather as :func:`all_gather` a tensor on the CPU, whatever the backend; does not wait for the GPU."""
    if world_size() == 1:
        return tensor
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=_control_group())
    return gathered


@torch.no_grad()
def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks into a new tensor, without gradient."""
    tensor = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def all_reduce_max(tensor: Tensor) -> Tensor:
    """Take the largest of all ranks' values into a new tensor, without gradient."""
    tensor = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def _control_group() -> dist.ProcessGroup:
    """Return a gloo group for objects and waiting: no GPU work, and patient, since one rank may evaluate for hours."""
    return _control_group_of(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _control_group_of(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make the group at the first use, and anew when ``torch.distributed`` was started anew."""
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
    return group


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process has ended: NCCL's error, or gloo's, which has no type."""
    return isinstance(error, dist.DistBackendError) or ("gloo" in str(error) and "by peer" in str(error))


def shutdown() -> None:
    """Leave the group of processes, where there is one."""
    _control_group_of.cache_clear()
    if is_initialized():
        dist.destroy_process_group()


def broadcast_object(value: Any) -> Any:
    """Give every rank the (picklable) value of rank 0."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group())
    return box[0]


def all_gather_object(value: Any) -> list[Any]:
    """Gather every rank's (picklable) value, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_control_group())
    return values


def on_master(action: Callable[[], T]) -> T:
    """Return on all ranks what an action gives on the master; its UsageError is raised on all of them, so that none waits.

    Raises:
        UsageError: the master's.
    """
    outcome: tuple[Any, str | None] = (None, None)
    if is_master():
        try:
            outcome = (action(), None)
        except UsageError as error:
            outcome = (None, str(error))
    result, failure = broadcast_object(outcome)
    if failure is not None:
        raise UsageError(failure)
    return result


def any_rank(flag: int) -> int:
    """Return the largest of all ranks' small non-negative numbers; does not wait for the GPU."""
    return any_rank_soon(flag)()


def any_rank_soon(flag: int) -> Callable[[], int]:
    """Begin :func:`any_rank`, and return the function that waits for its result."""
    if world_size() == 1:
        return lambda: flag
    box = torch.tensor(flag)
    reduction = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=_control_group(), async_op=True)

    def result() -> int:
        reduction.wait()
        return int(box)

    return result


def set_patience(patience: timedelta) -> None:
    """Set after which time NCCL's watchdog ends a process whose collective does not end; all ranks must call it.

    What was begun before keeps its time, so the GPU's work is waited for.
    """
    if is_initialized() and dist.get_backend() == "nccl":
        barrier()
        torch.cuda.synchronize()
        # PyTorch 2.14 made it public.
        set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
        set_timeout(patience, dist.group.WORLD)


def barrier() -> None:
    """Wait for all ranks, for hours if need be."""
    if world_size() > 1:
        dist.barrier(group=_control_group())
