"""Samples that are not finite: left out of a step, and listed without waiting for the device."""

import torch
from torch import Tensor, nn

# More than anybody reads between two log lines; later entries are counted only.
_CAPACITY = 256
_LOGIT_SCALE = -1
# Calls that are kept as they came. Sorting them out takes a dozen operations, so it is done for all of them at once.
_MOST_RECENT = 64
# Number of the call, names of the samples (B_local,), which of them are finite (B_local,), whether the scale is 0-d.
_NotedCall = tuple[int, Tensor, Tensor, Tensor]


class NonfiniteLog(nn.Module):
    """Collects ``(call, index)`` without waiting for the device; keeps the first 256 since the last :meth:`pop`."""

    entries: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(_CAPACITY + 1, 2, dtype=torch.int64), persistent=False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64), persistent=False)
        self._recent: list[_NotedCall] = []

    @torch.no_grad()
    def add(self, call: int, index: Tensor | None, finite: Tensor, scale_ok: Tensor) -> None:
        """Log the samples that are not finite.

        Args:
            call: its number.
            index: ``(B_local,)`` names of the samples; None: their positions.
            finite: ``(B_local,)`` bool.
            scale_ok: 0-d bool; if False, logged as a call without indices.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and finite.is_cpu and scale_ok and finite.all():
            return
        if index is None:
            names = torch.arange(len(finite), device=finite.device)
        else:
            # A copy: the caller may reuse the memory.
            names = index.to(finite.device, torch.int64, non_blocking=True, copy=True)
        noted = (call, names, finite, scale_ok)
        if compiling:
            # The length of a list would be a reason to compile again.
            self._sort_out([noted])
            return
        if len(self._recent) == _MOST_RECENT:
            self._sort_out_recent()
        self._recent.append(noted)

    def forget(self, call: int, unless: Tensor | None = None) -> None:
        """Take back what was logged of the last call, if it has this number; not where ``unless``, 0-d bool, holds."""
        if not (self._recent and self._recent[-1][0] == call):
            return
        _, names, finite, scale_ok = self._recent.pop()
        if unless is not None:
            self._recent.append((call, names, finite | ~unless, scale_ok | ~unless))

    def _sort_out_recent(self) -> None:
        if self._recent:
            self._sort_out(self._recent)
            self._recent = []

    def _sort_out(self, calls: list[_NotedCall]) -> None:
        """Add what is not finite of some calls to the entries."""
        device = self.entries.device
        on_scale = torch.full((1,), _LOGIT_SCALE, dtype=torch.int64, device=device)
        names = torch.cat([part for _, names, _, _ in calls for part in (names.to(device), on_scale)])
        fine = torch.cat([part.to(device) for _, _, finite, ok in calls for part in (finite, ok[None])])
        numbers = torch.cat([torch.full((len(names) + 1,), call, device=device) for call, names, _, _ in calls])
        position = (~fine).cumsum(0)
        # The last entry takes the rest.
        slots = (self.filled - 1 + position).clamp_(max=_CAPACITY).masked_fill_(fine, _CAPACITY)
        self.entries[slots] = torch.stack([numbers, names], dim=1)
        self.filled += position[-1]

    def pop(self) -> list[tuple[int, list[int]]]:
        """Return the entries since the last call: ``(call, indices)``. Waits for the device."""
        self._sort_out_recent()
        number = min(int(self.filled), _CAPACITY)
        found: dict[int, list[int]] = {}
        for call, index in self.entries[:number].tolist():
            found.setdefault(call, [])
            if index != _LOGIT_SCALE:
                found[call].append(index)
        self.filled.zero_()
        return list(found.items())
