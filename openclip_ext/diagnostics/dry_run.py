"""Measure the communication and temporary memory of a step for any number of ranks, on a machine without GPUs.

The loss and the model of the run process meta tensors, which have sizes but no values. The loss's communication is counted.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training.guard import StepGuard

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND = "all-gather", "all-reduce", "reduce-scatter", "send"
PRECISIONS = ("fp32", "amp", "amp_bf16")


@dataclass(frozen=True)
class DryRun:
    """Communication and memory of a step of the loss.

    Attributes:
        exchanged: Bytes by kind of communication: the size of the result (all-gather) or of the input (other kinds).
        work_bytes: Peak memory that the loss allocates in the forward and backward pass, without the inputs.
    """

    exchanged: Mapping[str, float]
    work_bytes: int


def sent_bytes(exchanged: Mapping[str, float], world_size: int) -> float:
    """Return the bytes that each rank sends with ring algorithms. No all-gather or all-reduce can send fewer bytes."""
    share = (world_size - 1) / world_size
    factors = {ALL_GATHER: share, REDUCE_SCATTER: share, ALL_REDUCE: 2 * share, SEND: 1.0}
    return sum(factors[kind] * size for kind, size in exchanged.items())


def dry_run(
    create: Callable[[], ContrastiveLoss], local_batch: int, embed_dim: int, world_size: int, steps: int = 1
) -> DryRun:
    """Run the first training steps of an epoch on meta tensors. Return the mean communication and the peak memory of a step.

    ``create`` returns the loss of one rank, with state for any number of samples. ``local_batch`` is the number of samples
    per rank (for a loss with two views, the number of images).
    """
    exchanged: Counter[str] = Counter()
    with _pretended_ranks(world_size, exchanged):
        loss = create().to("meta")
        loss.start_epoch(0)
        head = loss.model_head()
        memory = PeakMemory()
        for _ in range(steps):
            inputs = _inputs(loss, local_batch, embed_dim)
            with memory:
                guard = StepGuard(nn.Module(), loss)
                guard.before_loss()
                functools.reduce(torch.add, loss(**inputs, output_dict=True).values()).backward()
                distributed.all_reduce_max(torch.empty(2, device="meta"))  # as the check for non-finite gradients does
                if head is not None:  # training/step.py also averages the gradients of projection heads
                    distributed.all_reduce_sum(torch.cat([parameter.flatten() for parameter in head.parameters()]))
    return DryRun({kind: size / steps for kind, size in exchanged.items()}, memory.peak)


def _inputs(loss: ContrastiveLoss, local_batch: int, embed_dim: int) -> dict[str, Any]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    features = {name: empty(local_batch, embed_dim) for name in ("image_features", "text_features")}
    bias = {} if loss.initial_logit_bias is None else {"logit_bias": empty()}
    needed = {"index": loss.needs_index, "positives": loss.needs_positives}
    integers = {name: torch.empty(local_batch, dtype=torch.int64, device="meta") for name in needed if needed[name]}
    wide = loss.reference_dim
    reference: dict[str, Any] = {"reference": (empty(local_batch, wide), empty(local_batch, wide))} if wide else {}
    return {**features, "logit_scale": empty(), **bias, **integers, **reference}


@contextlib.contextmanager
def _pretended_ranks(world_size: int, exchanged: Counter[str]) -> Iterator[None]:
    """Simulate rank 0 of several ranks inside the ``with`` block, and count the bytes that it would communicate."""

    def note(kind: str, size: int) -> None:
        if world_size > 1:
            exchanged[kind] += size

    def all_gather(tensor: Tensor) -> Tensor:
        note(ALL_GATHER, world_size * tensor.nbytes)
        return tensor.detach().repeat(world_size, *[1] * (tensor.ndim - 1)) if world_size > 1 else tensor.detach()

    def all_reduce(tensor: Tensor) -> Tensor:
        note(ALL_REDUCE, tensor.nbytes)
        return tensor.detach().clone()

    # OpenCLIP's losses call torch.distributed, not openclip_ext.distributed, and also communicate in the backward pass.
    def gather_with_gradient(tensor: Tensor) -> list[Tensor]:
        note(ALL_GATHER, world_size * tensor.nbytes)
        note(REDUCE_SCATTER, world_size * tensor.nbytes)
        return [tensor * 1 for _ in range(world_size)]

    def exchange(left: int, right: int, *tensors: Tensor) -> Any:
        for tensor in tensors:
            note(SEND, 2 * tensor.nbytes)
        received = tuple(tensor * 1 for tensor in tensors)
        return received if len(received) > 1 else received[0]

    ours: dict[str, Any] = {"world_size": lambda: world_size, "rank": lambda: 0, "all_gather": all_gather}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(distributed, **ours, all_reduce_sum=all_reduce, all_reduce_max=all_reduce)
        )
        stack.enter_context(mock.patch("torch.distributed.nn.all_gather", gather_with_gradient))
        for name in compat.SIGLIP_EXCHANGES:
            stack.enter_context(mock.patch(name, exchange))
        yield


def activation_bytes(
    model: Any, batches: Sequence[int], precision: str = "fp32", grad_checkpointing: bool = False, views: int = 1
) -> list[int]:
    """Return the peak bytes of a model's forward and backward pass, including the images, for each batch size.

    ``model`` is on the meta device, with ``output_dict=True``. ``precision`` is one of :data:`PRECISIONS`. With two
    ``views`` of each image, there are no texts.
    """
    autocast = compat.autocast_context(precision, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        model.set_grad_checkpointing(grad_checkpointing)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return [_peak_of_pass(model, batch, autocast, views) for batch in batches]


def _peak_of_pass(model: Any, batch: int, autocast: Callable[[], contextlib.AbstractContextManager], views: int) -> int:
    size = model.visual.image_size
    images = torch.empty(batch * views, 3, *((size, size) if isinstance(size, int) else size))
    texts = torch.empty(batch, model.context_length, dtype=torch.int64) if views == 1 else None
    memory = PeakMemory()
    with memory:
        with autocast():
            outputs = model(images, texts)
        features = [outputs[name] for name in ("image_features", "text_features") if outputs.get(name) is not None]
        torch.autograd.backward(features, [torch.empty_like(value) for value in features])
    return memory.peak + images.nbytes


class PeakMemory(TorchDispatchMode):
    """A context manager that tracks the peak memory of tensors that are allocated inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {id(value.untyped_storage()) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        results = func(*args, **(kwargs or {}))
        for storage in (value.untyped_storage() for value in tree_leaves(results) if isinstance(value, Tensor)):
            key, size = id(storage), storage.nbytes()
            if key not in self._known and key not in given:  # a new allocation, not a view of an older tensor
                self._known.add(key)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._forget, key, size)
        return results

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
