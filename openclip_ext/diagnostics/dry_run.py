"""Count what a step of a loss sends and the memory it works in, for any number of ranks, on a machine without them.

There is no separate formula: the real loss runs on PyTorch's meta device, where tensors have sizes but no values, and what
it would send to other ranks is noted instead.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training.guard import StepGuard

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND = "all-gather", "all-reduce", "reduce-scatter", "send"


@dataclass(frozen=True)
class Exchange:
    """One communication with other ranks.

    Attributes:
        kind: :data:`ALL_GATHER`, :data:`ALL_REDUCE`, :data:`REDUCE_SCATTER` or :data:`SEND` (to a neighbor).
        size: bytes of the whole: of the gathered result, of the tensor that is reduced, or of what is sent.
    """

    kind: str
    size: float

    def sent(self, world_size: int) -> float:
        """Bytes that each rank sends in a ring, which is the least that a rank can send for an all-gather or all-reduce."""
        if self.kind == SEND:
            return self.size
        return self.size * (2 if self.kind == ALL_REDUCE else 1) * (world_size - 1) / world_size


@dataclass(frozen=True)
class DryRun:
    """Result of :func:`dry_run`.

    Attributes:
        exchanges: what is sent, in all steps that were run.
        steps: number of steps that were run.
        work_bytes: peak of the memory that a step allocates, forward and backward, inputs not counted.
    """

    exchanges: list[Exchange]
    steps: int
    work_bytes: int

    def size(self, kind: str) -> float:
        """Bytes of all exchanges of a kind, in the mean over the steps."""
        return sum(exchange.size for exchange in self.exchanges if exchange.kind == kind) / self.steps

    def sent(self, world_size: int) -> float:
        """Bytes that each rank sends, in the mean over the steps."""
        return sum(exchange.sent(world_size) for exchange in self.exchanges) / self.steps


def dry_run(
    create: Callable[[], ContrastiveLoss], local_batch: int, embed_dim: int, world_size: int, steps: int = 1
) -> DryRun:
    """Run training steps of a loss without values.

    Args:
        create: makes the loss; called as on one of ``world_size`` ranks. A few samples of per-sample state are enough.
        local_batch: samples of a rank (images, for a loss of two views).
        embed_dim: width of the embeddings; they are float32.
        world_size: number of ranks.
        steps: number of steps, from the start of an epoch.

    Raises:
        ValueError: the loss does not take such a batch.
    """
    exchanges: list[Exchange] = []
    with _pretended_ranks(world_size, exchanges):
        loss = create().to("meta")
        loss.start_epoch(0)
        head = loss.model_head()
        memory = PeakMemory()
        for _ in range(steps):
            inputs = _inputs(loss, local_batch, embed_dim)
            with memory:
                guard = StepGuard(nn.Module(), loss)
                guard.before_loss(inputs.get("index"))
                functools.reduce(torch.add, loss(**inputs, output_dict=True).values()).backward()
                distributed.all_reduce_max(torch.empty(2, device="meta"))  # the guard's verdict
                if head is not None:  # what the trainer does, see training/step.py
                    distributed.all_reduce_sum(torch.cat([parameter.flatten() for parameter in head.parameters()]))
    return DryRun(exchanges, steps, memory.peak)


def _inputs(loss: ContrastiveLoss, local_batch: int, embed_dim: int) -> dict[str, Tensor]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    features = {name: empty(local_batch, embed_dim) for name in ("image_features", "text_features")}
    bias = {} if loss.initial_logit_bias is None else {"logit_bias": empty()}
    needed = {"index": loss.needs_index, "positives": loss.needs_positives}
    integers = {name: torch.empty(local_batch, dtype=torch.int64, device="meta") for name in needed if needed[name]}
    return {**features, "logit_scale": empty(), **bias, **integers}


@contextlib.contextmanager
def _pretended_ranks(world_size: int, exchanges: list[Exchange]) -> Iterator[None]:
    """Act as rank 0 of several, and note what would be exchanged with the others."""

    def note(kind: str, size: int) -> None:
        if world_size > 1:
            exchanges.append(Exchange(kind, size))

    def all_gather(tensor: Tensor) -> Tensor:
        note(ALL_GATHER, world_size * tensor.nbytes)
        return tensor.detach().repeat(world_size, *[1] * (tensor.ndim - 1)) if world_size > 1 else tensor.detach()

    def all_reduce(tensor: Tensor) -> Tensor:
        note(ALL_REDUCE, tensor.nbytes)
        return tensor.detach().clone()

    # OpenCLIP's own losses communicate by themselves, and in the backward pass once more.
    def gather_with_gradient(tensor: Tensor) -> list[Tensor]:
        note(ALL_GATHER, world_size * tensor.nbytes)
        note(REDUCE_SCATTER, world_size * tensor.nbytes)
        return [tensor * 1 for _ in range(world_size)]

    def exchange(left: int, right: int, *tensors: Tensor) -> Any:
        for tensor in tensors:
            note(SEND, 2 * tensor.nbytes)
        received = tuple(tensor * 1 for tensor in tensors)
        return received if len(received) > 1 else received[0]

    ours: dict[str, Any] = {
        "world_size": lambda: world_size,
        "rank": lambda: 0,
        "all_gather": all_gather,
        "all_reduce_sum": all_reduce,
        "all_reduce_max": all_reduce,
    }
    with (
        mock.patch.multiple(distributed, **ours),
        mock.patch("torch.distributed.nn.all_gather", gather_with_gradient),
        contextlib.ExitStack() as siglip,
    ):
        for name in compat.SIGLIP_EXCHANGES:
            siglip.enter_context(mock.patch(name, exchange))
        yield


class PeakMemory(TorchDispatchMode):
    """Context that tracks the memory of all tensors allocated in it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        before = {id(value.untyped_storage()) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        results = func(*args, **(kwargs or {}))
        for value in tree_leaves(results):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage(), before)
        return results

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in before:  # or a view of what was there before
            return
        size = storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
