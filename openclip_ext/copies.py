"""Copies of batches to a GPU on a stream of their own, so that they overlap with what the GPU still computes."""

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# A copied batch, and on a GPU the end of its copies.
_Copied = tuple[Any, "torch.cuda.Event | None"]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch, a tensor or any nesting of them, on a device.

    On a GPU the copies do not wait for what the current stream was given before, and what it is given next waits for them.
    The host waits for nothing where the tensors are pinned.
    """
    return _ready(_begin(batch, device), device)


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches as :func:`to_device` does, with the next one's copies begun: for a loop that waits for its results."""
    ahead: deque[_Copied] = deque()
    for batch in batches:
        ahead.append(_begin(batch, device))
        if len(ahead) > 1:
            yield _ready(ahead.popleft(), device)
    while ahead:
        yield _ready(ahead.popleft(), device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _begin(batch: Any, device: torch.device) -> _Copied:
    if device.type != "cuda":
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch), None
    arrived = torch.cuda.Event()
    with torch.cuda.stream(_stream(device)):
        copied = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
        arrived.record(_stream(device))
    return copied, arrived


def _ready(copied: _Copied, device: torch.device) -> Any:
    batch, arrived = copied
    if arrived is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)  # else its memory could be given away while it is read
    return batch
