"""Mistakes of the training loop that change the numbers without an error: each gives one warning.

Only the first two calls of a loss read values, because that waits for the device.
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
# Half-precision features differ from length 1 by less.
_TOLERANCE = 0.05
# The largest value of OpenCLIP's parameter log(1/τ). Its exponential is rarely so small: it starts at 10 or 14.3.
_LARGEST_LOG_SCALE = math.log(100)

_STATE = "Each such call updates its state, as one optimizer step. "
# A warning for each mistake; in braces what was found.
_WARNINGS = {
    "processes": "{processes} processes were started (WORLD_SIZE), but torch.distributed.init_process_group was not called: "
    "each contrasts its own samples only",
    "no epoch": "start_epoch() was not called before the first training step. Schedules of this loss follow the epoch. Call "
    "loss.start_epoch(epoch) at the start of each epoch, from 0",
    "no gradient": f"the loss was called in training mode under torch.no_grad(). {_STATE}"
    "To look at its value, call it after loss.eval(), and continue after loss.train()",
    "no backward": f"the loss was called again in training mode before the backward pass of the previous call. {_STATE}"
    "To look at its value, call it after loss.eval(). To accumulate gradients, call it once on the features of all "
    "micro-batches",
    "scale": "logit_scale: found {scale:.4g}, a temperature of {temperature:.2g}. Expected 1/temperature, such as 14.3 at the "
    "start of training. If this is the logarithm that OpenCLIP's models keep, pass model.logit_scale.exp()",
    "length": "image_features, text_features: found rows of length {shortest:.4g} to {longest:.4g}, expected 1. Otherwise the "
    "loss can become huge. Pass torch.nn.functional.normalize(features, dim=-1)",
}


class LoopChecks:
    """Watches the loop that calls a loss. It is not part of the loss's state.

    Attributes:
        epoch_is_known: whether the loop, or a restored state, has told the epoch.
    """

    def __init__(self) -> None:
        self.epoch_is_known = False
        self._warned: set[str] = set()
        # Whether the backward pass of the last checked call ran; None if it cannot.
        self._backward_ran: bool | None = None

    def warn(self, mistake: str, **found: Any) -> None:
        """Warn of a mistake, unless that was done before."""
        if mistake not in self._warned:
            self._warned.add(mistake)
            warnings.warn(_WARNINGS[mistake].format(**found), stacklevel=2)

    def check_processes(self) -> None:
        """Warn if other processes were started, too, and there is no process group to reach them."""
        if processes := distributed.unconnected_processes():
            self.warn("processes", processes=processes)

    def check_values(
        self, batch: LocalBatch, unit_norm: bool, uses_logit_scale: bool, initial_logit_scale: float | None
    ) -> None:
        """Warn about features of another length than 1, and about a scale that looks like its logarithm.

        Raises:
            ValueError: the scale is not finite and positive.
        """
        lengths = torch.linalg.vector_norm(torch.stack([batch.image, batch.text]).detach().float(), dim=2)
        lengths = torch.where(batch.finite, lengths, 1)
        values = torch.stack([lengths.min(), lengths.max(), batch.logit_scale.detach().float()])
        shortest, longest, scale = values.tolist()
        if not 0 < scale < math.inf:
            raise ValueError(
                f"logit_scale: found {scale:.4g}, expected a finite positive number, 1/temperature. OpenCLIP's models keep "
                "its logarithm: pass model.logit_scale.exp()"
            )
        start = initial_logit_scale
        is_asked_for = start is not None and math.isclose(scale, math.exp(start), rel_tol=_TOLERANCE)
        if uses_logit_scale and scale <= _LARGEST_LOG_SCALE and not is_asked_for:
            self.warn("scale", scale=scale, temperature=1 / scale)
        if unit_norm and max(longest - 1, 1 - shortest) > _TOLERANCE:
            self.warn("length", shortest=shortest, longest=longest)

    def begin_call(self) -> None:
        """Warn if the backward pass of the previous call has not run."""
        if self._backward_ran is False:
            self.warn("no backward")
        self._backward_ran = None

    def finish_call(self, terms: Iterable[Tensor]) -> None:
        """Notice when the backward pass of this call runs."""

        def note(gradient: Tensor) -> None:
            self._backward_ran = True

        for term in terms:
            if term.requires_grad:
                self._backward_ran = False
                term.register_hook(note)
