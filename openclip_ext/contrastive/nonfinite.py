"""A log of samples with non-finite features. Adding to it needs no host-device sync."""

import torch
from torch import Tensor, nn

# Entries kept between two log lines; later entries are only counted.
_CAPACITY = 256
_LOGIT_SCALE = -1
# Number of calls of ``add`` whose entries are computed together, to launch fewer kernels.
_MOST_RECENT = 64


class NonfiniteLog(nn.Module):
    """The first 256 entries ``(call, index)`` since the last :meth:`pop`, collected without a host-device sync."""

    entries: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Finite samples, and entries beyond the capacity, are written to the last row. So no tensor shape depends on the data.
        self.register_buffer("entries", torch.zeros(_CAPACITY + 1, 2, dtype=torch.int64), persistent=False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64), persistent=False)
        self._recent: list[tuple[int | Tensor, Tensor, Tensor, Tensor]] = []
        self._is_compiled = False

    @torch.no_grad()
    def add(self, call: int | Tensor, index: Tensor | None, finite: Tensor, scale_ok: Tensor) -> None:
        """Log the non-finite samples of a call.

        Args:
            call: number of the call. In a compiled graph, it is a 0-d tensor.
            index: ``(B_local,)`` index of the samples. None means their positions.
            finite: ``(B_local,)`` bool, whether all features of a sample are finite.
            scale_ok: 0-d bool, whether the logit scale is usable. False is logged as a call without indices.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and finite.is_cpu and scale_ok and finite.all():
            return
        if index is None:
            names = torch.arange(len(finite), device=finite.device)
        else:
            # The index is copied, because the caller may reuse its memory.
            names = index.to(finite.device, torch.int64, non_blocking=True, copy=True)
        if len(self._recent) == _MOST_RECENT:
            self._store_recent()
        self._recent.append((call.long() if isinstance(call, Tensor) else call, names, finite, scale_ok))
        if is_compiling:  # if the list grew, the graph would be recompiled
            self._store_recent()
            self._is_compiled = True

    def forget(self, call: int, skip_if: Tensor | None = None) -> None:
        """Remove the entries of call number ``call``, if it was logged last. If ``skip_if`` (0-d bool) is True, do nothing."""
        if self._is_compiled:
            is_used = torch.arange(_CAPACITY, device=self.entries.device) < self.filled
            number = (is_used & (self.entries[:-1, 0] == call)).sum()
            self.filled -= number if skip_if is None else number * ~skip_if
        elif self._recent and self._recent[-1][0] == call:
            _, names, finite, scale_ok = self._recent.pop()
            if skip_if is not None:
                self._recent.append((call, names, finite | ~skip_if, scale_ok | ~skip_if))

    def _store_recent(self) -> None:
        calls, self._recent = self._recent, []
        device = self.entries.device
        logit_scale = torch.full((1,), _LOGIT_SCALE, device=device)
        names = torch.cat([part for _, names, _, _ in calls for part in (names.to(device), logit_scale)])
        fine = torch.cat([part.to(device) for _, _, finite, ok in calls for part in (finite, ok[None])])
        numbers = torch.cat(
            [torch.zeros(len(names) + 1, dtype=torch.int64, device=device).add_(call) for call, names, _, _ in calls]
        )
        position = (~fine).cumsum(0)
        slots = (self.filled - 1 + position).clamp_(max=_CAPACITY).masked_fill_(fine, _CAPACITY)
        self.entries[slots] = torch.stack([numbers, names], dim=1)
        self.filled += position[-1]

    def pop(self) -> list[tuple[int, list[int]]]:
        """Return ``(call, indices)`` for all entries since the last call of this method. Synchronizes with the device."""
        if self._recent:
            self._store_recent()
        number = min(int(self.filled), _CAPACITY)
        found: dict[int, list[int]] = {}
        for call, index in self.entries[:number].tolist():
            found.setdefault(call, [])
            if index != _LOGIT_SCALE:
                found[call].append(index)
        self.filled.zero_()
        return list(found.items())
