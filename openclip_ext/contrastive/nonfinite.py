"""Log, on the device, of samples that were left out because they were not finite."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# More than anybody reads between two log lines; later entries are counted only.
_CAPACITY = 256
_LOGIT_SCALE = -1
# Calls whose verdicts are kept as they came. Sorting them out takes a dozen operations, so it is done for all of them at once.
_MOST_RECENT = 64


class NonfiniteLog(nn.Module):
    """Collects ``(step, index)`` without waiting for the device; keeps the first 256 since the last :meth:`pop`."""

    @dataclass
    class _Call:
        """``names`` and ``finite`` are ``(B_local,)``, ``scale_ok`` is 0-d."""

        step: int
        names: Tensor
        finite: Tensor
        scale_ok: Tensor

    entries: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(_CAPACITY + 1, 2, dtype=torch.int64), persistent=False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64), persistent=False)
        self._recent: list[NonfiniteLog._Call] = []

    @torch.compiler.disable  # the list's length would be a reason to compile again
    @torch.no_grad()
    def add(self, step: int, index: Tensor, finite: Tensor, scale_ok: Tensor) -> None:
        """Log the samples that are not finite.

        Args:
            step: number of the call.
            index: ``(B_local,)`` names of the samples.
            finite: ``(B_local,)`` bool.
            scale_ok: 0-d bool; if False, logged as a step without indices.
        """
        if finite.is_cpu and scale_ok and finite.all():
            return
        if len(self._recent) == _MOST_RECENT:
            self._sort_out()
        # A copy: the caller may reuse the memory of an index.
        self._recent.append(self._Call(step, index.clone(), finite, scale_ok))

    def forget(self, step: int, unless: Tensor | None = None) -> None:
        """Take back what was logged of the last call.

        Args:
            step: its number; another one changes nothing.
            unless: 0-d bool, where it holds the call stays logged; None: nowhere.
        """
        if not (self._recent and self._recent[-1].step == step):
            return
        if unless is None:
            self._recent.pop()
            return
        last = self._recent[-1]
        last.finite, last.scale_ok = last.finite | ~unless, last.scale_ok | ~unless

    def _sort_out(self) -> None:
        """Move what is not finite from the recent calls to the entries."""
        recent, self._recent = self._recent, []
        if not recent:
            return
        device = self.entries.device
        on_scale = torch.full((1,), _LOGIT_SCALE, dtype=torch.int64, device=device)
        names = torch.cat([part for call in recent for part in (call.names.to(device), on_scale)])
        fine = torch.cat([part.to(device) for call in recent for part in (call.finite, call.scale_ok[None])])
        steps = torch.cat([torch.full((len(call.names) + 1,), call.step, device=device) for call in recent])
        number = (~fine).cumsum(0)
        # The last entry takes the rest.
        slots = (self.filled - 1 + number).clamp_(max=_CAPACITY).masked_fill_(fine, _CAPACITY)
        self.entries[slots] = torch.stack([steps, names], dim=1)
        self.filled += number[-1]

    def pop(self) -> list[tuple[int, list[int]]]:
        """Return the entries since the last call: ``(step, indices)``. Waits for the device."""
        self._sort_out()
        number = min(int(self.filled), _CAPACITY)
        found: dict[int, list[int]] = {}
        for step, index in self.entries[:number].tolist():
            found.setdefault(step, [])
            if index != _LOGIT_SCALE:
                found[step].append(index)
        self.filled.zero_()
        return list(found.items())
