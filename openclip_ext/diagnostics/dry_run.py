"""Measure the communication and temporary memory of a step for any number of ranks, on a machine without GPUs.

The loss and the model of the run process meta tensors, which have sizes but no values. The loss's communication is counted.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import open_clip
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.training.guard import StepGuard


def dry_run(
    create: Callable[[], ContrastiveLoss], local_batch: int, embed_dim: int, world_size: int, steps: int = 1
) -> tuple[float, int]:
    """Run the first training steps of an epoch on meta tensors. Return the mean communication of a step, and its memory.

    Args:
        create: Function that returns the loss of one rank, with state for any number of samples.
        local_batch: Number of samples per rank (for a loss with two views, the number of images).

    Returns:
        The bytes that a rank sends with ring algorithms (no all-gather or all-reduce can send fewer bytes), and the peak of
        the bytes that the loss allocates in the forward and backward pass, without the inputs.
    """
    sent: list[float] = []
    with _pretended_ranks(world_size, sent) if world_size > 1 else contextlib.nullcontext():
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
    return sum(sent) / steps, memory.peak


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
def _pretended_ranks(world_size: int, sent: list[float]) -> Iterator[None]:
    """Simulate rank 0 of several ranks inside the ``with`` block, and append the bytes that it would send."""

    def all_gather(tensor: Tensor) -> Tensor:
        sent.append((world_size - 1) * tensor.nbytes)
        return tensor.detach().repeat(world_size, *[1] * (tensor.ndim - 1))

    def all_reduce(tensor: Tensor) -> Tensor:
        sent.append(all_reduce_bytes(tensor.nbytes, world_size))
        return tensor.detach().clone()

    # OpenCLIP's losses call torch.distributed, not openclip_ext.distributed, and also communicate in the backward pass.
    def gather_with_gradient(tensor: Tensor) -> list[Tensor]:
        sent.append(2 * (world_size - 1) * tensor.nbytes)  # the backward pass is a reduce-scatter
        return [tensor * 1 for _ in range(world_size)]

    def exchange(left: int, right: int, *tensors: Tensor) -> Any:
        sent.append(sum(2 * tensor.nbytes for tensor in tensors))
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


def all_reduce_bytes(size: int, world_size: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of ``size`` bytes with a ring algorithm."""
    return 2 * (world_size - 1) / world_size * size


def activation_bytes(model: Any, batches: Sequence[int], precision: str = "fp32", views: int = 1) -> list[int]:
    """Return the peak bytes of a model's forward and backward pass, including the images, for each batch size.

    Args:
        model: A model on the meta device with ``output_dict=True``. Its tensors are replaced by CPU tensors without values.
        precision: A value of ``--precision``.
        views: 2 for a loss that compares two views of each image. There are then no texts.
    """
    autocast = compat.autocast_context(precision, torch.device("cpu"))
    dtype = open_clip.get_input_dtype(precision) or torch.float32
    size = model.visual.image_size
    peaks = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        set_training_mode(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        for batch in batches:
            images = torch.empty(batch * views, 3, *((size, size) if isinstance(size, int) else size), dtype=dtype)
            texts = torch.empty(batch, model.context_length, dtype=torch.int64) if views == 1 else None
            with PeakMemory() as memory:
                with autocast():
                    outputs = model(images, texts)
                features = [outputs.get(name) for name in ("image_features", "text_features")]
                trained = [value for value in features if value is not None and value.requires_grad]
                torch.autograd.backward(trained, [torch.empty_like(value) for value in trained])
            peaks.append(memory.peak + images.nbytes)
    return peaks


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
