"""Count the kernel launches and the host-device syncs of code on CUDA tensors."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import openclip_ext

_PACKAGE = Path(openclip_ext.__file__).parent
# Operations without a kernel: they compute a size, or share or allocate memory.
_NO_KERNEL = re.compile(
    r"detach|alias|is_pinned|promote_types|lift_fresh|_unsafe_view|sym_(size|numel)|(new_)?empty(_like|_strided)?"
)
# Operations that sync: their result is on the host, or the size of the result depends on values.
_WAITS = re.compile(
    r"_local_scalar_dense|item|equal|is_nonzero|nonzero(_numpy)?|masked_select|_unique2|unique_(dim|consecutive)"
    r"|bincount|histc|repeat_interleave|linalg_svd"
)
_INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
_LIFTS = ("lift_fresh", "lift_fresh_copy")


# Accepted syncs: the beginning of the description, and the reason. scripts/bench/README.md also lists them.
KNOWN_WAITS = {
    "copy cpu to cuda at amorlip.py:initialize": "once per epoch: initial values come from the CPU, equal for all devices",
    "_local_scalar_dense at guard.py:step": "timm's optimizers cannot skip a step on the device, so the host decides",
}


class Launches(TorchDispatchMode):
    """A dispatch mode that records operations on CUDA tensors.

    Attributes:
        number: number of operations that launch a kernel or a copy.
        waits: number of host-device syncs by description. A description lists the callers in the package, innermost first.
        unknown_waits: the syncs that :data:`KNOWN_WAITS` does not contain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.number = 0
        self.waits: Counter[str] = Counter()

    @property
    def unknown_waits(self) -> dict[str, int]:
        return {wait: number for wait, number in self.waits.items() if not wait.startswith(tuple(KNOWN_WAITS))}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace in ("prim", "profiler"):
            return op(*args, **kwargs)  # such as a query of a tensor's device: no launch
        name = op.overloadpacket.__name__
        inputs = [*_tensors(args), *_tensors(kwargs)]
        on_cuda = any(tensor.is_cuda for tensor in inputs)
        # Record the sync before the call: a fake tensor raises an error if a shape depends on its values.
        for reason in _waits(name, args, kwargs, on_cuda):
            self.waits[f"{reason} at {_caller()}"] += 1
        if name == "_local_scalar_dense" and on_cuda:
            # Return an arbitrary value instead of an error, so that the step continues and later syncs are also found.
            return True if args[0].dtype == torch.bool else 1
        out = op(*args, **kwargs)
        launches = not (op.is_view or _NO_KERNEL.fullmatch(name))
        if launches and (on_cuda or any(tensor.is_cuda for tensor in _tensors(out))):
            self.number += 1
        return out


def _waits(name: str, args: Any, kwargs: Any, on_cuda: bool) -> Iterator[str]:
    if on_cuda and _WAITS.fullmatch(name):
        yield name
    if name in _INDEXING and args[0].is_cuda:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                yield f"{name} by a mask"
            elif index is not None and index.is_cpu:
                yield f"{name} by an index on the CPU"
    if name in _LIFTS and args[0].is_cuda:
        yield "a tensor made of Python numbers on the device"
    if name == "_to_copy" and not kwargs.get("non_blocking"):
        target = torch.device(kwargs.get("device") or args[0].device)
        if target.type != args[0].device.type:
            yield f"copy {args[0].device.type} to {target.type}"
    if name == "copy_" and args[0].device != args[1].device:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        if not non_blocking:
            yield f"copy {args[1].device.type} to {args[0].device.type}"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _caller() -> str:
    """Return the innermost three calls of package functions on the stack, as ``file:function < file:function``."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 3:
        code = frame.f_code
        if _PACKAGE in Path(code.co_filename).parents:
            places.append(f"{Path(code.co_filename).name}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "no file of the package"
