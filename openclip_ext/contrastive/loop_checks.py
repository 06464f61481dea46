"""Warn once about each mistake in a training loop that changes results without an error.

Values of tensors are read only in the first two calls of a loss, because reading synchronizes with the device.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch

CHECKED_CALLS = 2
# Accepted difference from unit norm. Rounding to half precision causes a smaller difference.
_TOLERANCE = 0.05
# The largest value of OpenCLIP's parameter log(1/τ). A logit scale up to this value is probably a logarithm that was passed by
# mistake. A correct logit scale is rarely so small, because it starts at 10 or 14.3.
_LARGEST_LOG_SCALE = math.log(100)

_STATE = "Each such call updates the state of the loss like an optimizer step. "
_WARNINGS = {
    "processes": "{processes} processes were started (WORLD_SIZE), but torch.distributed.init_process_group was not called: "
    "each process compares only its own samples. Call it before the loss is created",
    "no epoch": "start_epoch() was not called before the first training step, but schedules of this loss depend on the epoch. "
    "Call loss.start_epoch(epoch) at the start of each epoch, from 0",
    "no gradient": f"the loss was called in training mode under torch.no_grad(). {_STATE}"
    "To read the value of the loss, call the loss after loss.eval(), then call loss.train()",
    "no backward": f"the loss was called again in training mode before the backward pass of the previous call. {_STATE}"
    "To read the value of the loss, call the loss after loss.eval(). To accumulate gradients, call the loss once on the "
    "features of all micro-batches",
    "scale": "logit_scale: expected 1/temperature, such as 14.3 at the start of training, found {scale:.4g}. If this is "
    "OpenCLIP's parameter, a logarithm, pass model.logit_scale.exp()",
    "length": "image_features, text_features: expected rows of unit norm, found norms from {shortest:.4g} to {longest:.4g}. "
    "Pass torch.nn.functional.normalize(features, dim=-1)",
}


class LoopChecks:
    """Checks of the loop that calls a loss. They are not part of the loss's state.

    ``epoch_is_known`` is True after ``start_epoch`` or after a restore.
    """

    def __init__(self) -> None:
        self.epoch_is_known = False
        self._warned: set[str] = set()
        # Whether the backward pass of the last checked call has run. None means that the call needs no backward pass.
        self._backward_ran: bool | None = None

    def warn(self, mistake: str, **found: Any) -> None:
        """Log the warning about a mistake, unless it was logged before."""
        if mistake not in self._warned:
            self._warned.add(mistake)
            warnings.warn(_WARNINGS[mistake].format(**found), stacklevel=2)

    def check_processes(self) -> None:
        """Warn if a launcher started several processes but there is no process group."""
        if processes := distributed.unconnected_processes():
            self.warn("processes", processes=processes)

    def check_values(
        self, batch: LocalBatch, unit_norm: bool, uses_logit_scale: bool, initial_logit_scale: float | None
    ) -> None:
        """Warn if features lack unit norm or the logit scale looks like its log. Raise ValueError for an invalid scale."""
        lengths = torch.linalg.vector_norm(torch.stack([batch.image, batch.text]).detach().float(), dim=2)
        lengths = torch.where(batch.finite, lengths, 1)
        values = torch.stack([lengths.min(), lengths.max(), batch.logit_scale.detach().float()])
        shortest, longest, scale = values.tolist()
        if not 0 < scale < math.inf:
            raise ValueError(
                f"logit_scale: expected 1/temperature, a finite positive number, found {scale:.4g}. Pass "
                "model.logit_scale.exp()"
            )
        start = initial_logit_scale
        is_asked_for = start is not None and math.isclose(scale, math.exp(start), rel_tol=_TOLERANCE)
        if uses_logit_scale and scale <= _LARGEST_LOG_SCALE and not is_asked_for:
            self.warn("scale", scale=scale)
        if unit_norm and max(longest - 1, 1 - shortest) > _TOLERANCE:
            self.warn("length", shortest=shortest, longest=longest)

    def begin_call(self) -> None:
        """Warn if the backward pass of the previous call has not run."""
        if self._backward_ran is False:
            self.warn("no backward")
        self._backward_ran = None

    def finish_call(self, terms: Iterable[Tensor]) -> None:
        """Register hooks that record whether the backward pass of this call runs."""

        def note(gradient: Tensor) -> None:
            self._backward_ran = True

        for term in terms:
            if term.requires_grad:
                self._backward_ran = False
                term.register_hook(note)
