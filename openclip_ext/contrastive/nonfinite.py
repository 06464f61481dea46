"""Samples that are not finite: excluded from a step, and listed without a host-device sync."""

import torch
from torch import Tensor, nn

# Entries kept between two log lines; later ones are only counted.
_CAPACITY = 256
_LOGIT_SCALE = -1


class NonfiniteLog(nn.Module):
    """The first 256 entries ``(call, index)`` since the last :meth:`pop`, collected without a host-device sync."""

    entries: Tensor
    filled: Tensor
    filled_before: Tensor

    def __init__(self) -> None:
        super().__init__()
        # The last entry receives what is finite or does not fit, so that no shape depends on data.
        self.register_buffer("entries", torch.zeros(_CAPACITY + 1, 2, dtype=torch.int64), persistent=False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("filled_before", torch.zeros((), dtype=torch.int64), persistent=False)
        self._last_call = -1

    @torch.no_grad()
    def add(self, call: int, index: Tensor | None, finite: Tensor, scale_ok: Tensor) -> None:
        """Log the non-finite samples of a call.

        Args:
            call: number of the call.
            index: ``(B_local,)`` index of the samples. None means their positions.
            finite: ``(B_local,)`` bool.
            scale_ok: 0-d bool; False is logged as a call without indices.
        """
        if not torch.compiler.is_compiling() and finite.is_cpu and scale_ok and finite.all():
            return
        device = self.entries.device
        if index is None:
            index = torch.arange(len(finite), device=device)
        logit_scale = torch.full((1,), _LOGIT_SCALE, dtype=torch.int64, device=device)
        names = torch.cat([index.to(device, torch.int64, non_blocking=True), logit_scale])
        fine = torch.cat([finite, scale_ok[None]]).to(device)
        position = (~fine).cumsum(0)
        slots = (self.filled - 1 + position).clamp_(max=_CAPACITY).masked_fill_(fine, _CAPACITY)
        self.entries[slots] = torch.stack([torch.full_like(names, call), names], dim=1)
        self.filled_before.copy_(self.filled)
        self.filled += position[-1]
        self._last_call = call

    def forget(self, call: int, skip_if: Tensor | None = None) -> None:
        """Remove the entries of the last logged call, if it has this number, except where ``skip_if`` (0-d bool) is True."""
        if self._last_call == call:
            before = self.filled_before
            self.filled.copy_(before if skip_if is None else torch.where(skip_if, self.filled, before))

    def pop(self) -> list[tuple[int, list[int]]]:
        """Return the entries since the last call of this method: ``(call, indices)``. Synchronizes with the device."""
        number = min(int(self.filled), _CAPACITY)
        found: dict[int, list[int]] = {}
        for call, index in self.entries[:number].tolist():
            found.setdefault(call, [])
            if index != _LOGIT_SCALE:
                found[call].append(index)
        self.filled.zero_()
        self._last_call = -1
        return list(found.items())
