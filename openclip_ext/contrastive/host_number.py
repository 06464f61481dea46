"""A number on the host that can change between steps without recompiling a graph."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class HostNumber:
    """An integer that is a Python number in eager mode and a 0-d tensor on the CPU in a compiled graph.

    ``torch.compile`` would compile a new graph for each value of a Python number. The tensor is float64, because the product
    of an int64 tensor and a Python float is float32.
    """

    def __init__(self, value: int = 0) -> None:
        # The array and the tensor share memory. Eager code uses the array, because a FakeTensorMode cannot intercept it.
        self._number = np.array(value, dtype=np.float64)
        self._tensor = torch.from_numpy(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostNumber, (self.get(),)

    def get(self) -> int | Tensor:
        return self._tensor if torch.compiler.is_compiling() else int(self._number)

    def set(self, value: int) -> None:
        self._number.fill(value)

    def add(self, number: int) -> None:
        if torch.compiler.is_compiling():
            self._tensor.add_(number)
        else:
            self._number += number


def choose(condition: bool | Tensor, if_true: float, if_false: float) -> float | Tensor:
    """Return ``if_true`` or ``if_false``. For a tensor ``condition`` (in a compiled graph), return a 0-d float64 tensor."""
    if isinstance(condition, Tensor):
        low, high = (torch.full((), value, dtype=torch.float64) for value in (if_false, if_true))
        return torch.where(condition, high, low)
    return if_true if condition else if_false
