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
    def add(self, step: int, index: Tensor, finite: Tensor, scale_ok: Tensor) -> None:
        """Log the samples that are not finite.

        Args:
            step: number of the call.
            index: ``(B_local,)`` names of the samples.
            finite: ``(B_local,)`` bool.
            scale_ok: 0-d bool; if False, logged as a step without indices.
        """
        fine = torch.cat([finite, scale_ok[None]])
        if fine.is_cpu and fine.all():
            return
        names = torch.cat([index, index.new_full((1,), _LOGIT_SCALE)])
        number = (~fine).cumsum(0)
        # The last entry takes the rest.
        slots = (self.filled - 1 + number).clamp_(max=_CAPACITY).masked_fill_(fine, _CAPACITY)
        self.entries[slots] = torch.stack([torch.full_like(names, step), names], dim=1)
        self.filled += number[-1]

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
