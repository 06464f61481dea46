"""An exponential moving average of the model's weights (``--model-ema-decay``): what is evaluated, and what others load."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import compat

# Key of a checkpoint's trained weights where ``state_dict`` is their average.
TRAINED_KEY = "trained_state_dict"
_WARMUP_POWER = 2 / 3
# Numbers that are updated at a time, for which a copy of them needs room: 128 MiB.
_GROUP = 1 << 25


class ModelEma:
    """``average ← d·average + (1−d)·weights`` after each optimizer step, ``d = min(decay, 1 − (1+t)^(−2/3))``.

    ``t`` counts optimizer steps from 0; the growing ``d`` lets the start weights be forgotten. BatchNorm's statistics are
    averaged, too. It has float32 at least, whatever the model has. The model is replicated, so averages are the same on all
    processes, without communication.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = compat.unwrap(model)
        # These share the model's memory.
        state = self._model.state_dict()
        self._weights = {name: value for name, value in state.items() if value.is_floating_point()}
        self._averages = {
            name: value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self._weights.items()
        }
        groups, numbers = defaultdict(list), 0
        for name, average in self._averages.items():
            groups[average.device, average.dtype, numbers // _GROUP].append(name)
            numbers += average.numel()
        self._groups = list(groups.values())

    @torch.no_grad()
    def update(self, step: int, good: Tensor) -> None:
        """Follow the weights after a step of the run, unless it was not ``good`` (0-d). No wait for the device."""
        decay = min(self.decay, 1 - (1 + step) ** -_WARMUP_POWER)
        share = torch.where(good, 1 - decay, 0.0)
        for names in self._groups:
            averages = [self._averages[name] for name in names]
            like = averages[0]
            change = torch._foreach_sub([self._weights[name].to(like.dtype) for name in names], averages)
            torch._foreach_mul_(change, share.to(like))
            torch._foreach_add_(averages, change)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's own ``state_dict``, with the averages in place of its weights."""
        return {**self._model.state_dict(), **self._averages}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        for name, average in self._averages.items():
            average.copy_(state[name.removeprefix("module.")])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages in place of its weights, which come back bit for bit."""
        weights = {name: value.clone() for name, value in self._weights.items()}
        self._copy(self._averages)
        try:
            yield
        finally:
            self._copy(weights)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self._weights.items():
            value.copy_(values[name])
