"""An exponential moving average of the model's weights (``--model-ema-decay``), used for evaluation and export."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import compat

_WARMUP_POWER = 2 / 3
# Number of elements to update at a time. Their temporary float32 copy needs 128 MiB.
_GROUP = 1 << 25


class ModelEma:
    """The average of the weights. Each optimizer step replaces the average by ``d·average + (1−d)·weights``.

    ``d = min(decay, 1 − (1+t)^(−2/3))``, where ``t`` counts optimizer steps from 0, including skipped steps. ``d`` starts at 0
    and grows, so the initial weights enter the average only if step 0 is skipped, and then with a weight that falls fast.
    BatchNorm's statistics are also averaged. Averages have at least float32 precision. All processes have equal
    replicas of the model, so their averages are equal without communication.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = compat.unwrap(model)
        # These tensors share the model's memory, so they always contain the current weights.
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
        """Update the average after a step, if the step was ``good`` (0-d bool on the device). This needs no sync."""
        decay = min(self.decay, 1 - (1 + step) ** -_WARMUP_POWER)
        share = torch.where(good, 1 - decay, 0.0)
        for names in self._groups:
            averages = [self._averages[name] for name in names]
            like = averages[0]
            change = torch._foreach_sub([self._weights[name].to(like.dtype) for name in names], averages)
            torch._foreach_mul_(change, share.to(like))
            torch._foreach_add_(averages, change)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's ``state_dict`` with averages instead of weights."""
        return {**self._model.state_dict(), **self._averages}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(state[name])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the averages inside the ``with`` block; then restore the exact weights."""
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
