"""Log, on the device, of samples that were left out because they were not finite."""

import torch
from torch import Tensor, nn

# More than anybody reads between two log lines; later entries are counted only.
_CAPACITY = 256
_LOGIT_SCALE = -1


class NonfiniteLog(nn.Module):
    """Collects ``(step, index)`` without waiting for the device; keeps the first 256 since the last :meth:`pop`."""

    entries: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(_CAPACITY + 1, 2, dtype=torch.int64), persistent=False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def add(self, step: int, index: Tensor, bad: Tensor, logit_scale_bad: Tensor) -> None:
        """Log the samples for which ``bad`` holds.

        Args:
            step: number of the call.
            index: ``(B_local,)`` names of the samples.
            bad: ``(B_local,)`` bool.
            logit_scale_bad: 0-d bool; logged as a step without indices.
        """
        if bad.is_cpu and not (bad.any() or logit_scale_bad):
            return
        names = torch.cat([index, index.new_full((1,), _LOGIT_SCALE)])
        bad = torch.cat([bad, logit_scale_bad[None]])
        slots = (self.filled + bad.cumsum(0) - 1).clamp(max=_CAPACITY)
        slots = torch.where(bad, slots, _CAPACITY)  # the last entry takes the rest
        self.entries[slots] = torch.stack([torch.full_like(names, step), names], dim=1)
        self.filled += bad.sum()

    def pop(self) -> list[tuple[int, list[int]]]:
        """Return the entries since the last call: ``(step, indices)``. Waits for the device."""
        number = min(int(self.filled), _CAPACITY)
        found: dict[int, list[int]] = {}
        for step, index in self.entries[:number].tolist():
            found.setdefault(step, [])
            if index != _LOGIT_SCALE:
                found[step].append(index)
        self.filled.zero_()
        return list(found.items())
