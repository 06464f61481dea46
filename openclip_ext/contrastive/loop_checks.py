"""Warn about mistakes in training loops that change results without an error. Each mistake is reported once.

Values of tensors are read only in the first two calls of a loss, because reading synchronizes with the device.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.checks import can_read_values

if TYPE_CHECKING:
    from openclip_ext.contrastive.loss import ContrastiveLoss

CHECKED_CALLS = 2
# Accepted difference from unit norm. Rounding to half precision causes a smaller difference.
_TOLERANCE = 0.05
# The largest value of OpenCLIP's parameter log(1/τ). A logit scale up to this value is probably a logarithm that was passed by
# mistake. A correct logit scale is rarely so small, because its initial value is 10 (SigLIP) or 14.3 (CLIP).
_LARGEST_LOG_SCALE = math.log(100)

_STATE = "Each call in training mode updates the state of the loss. "
_WARNINGS = {
    "processes": "{processes} processes were started (WORLD_SIZE), but torch.distributed.init_process_group was not called: "
    "each process compares only its own samples. Call init_process_group before the loss is created",
    "no epoch": "start_epoch() was not called before the first training step, but schedules of this loss depend on the epoch. "
    "Call loss.start_epoch(epoch) at the start of each epoch, from 0",
    "no gradient": f"the loss was called in training mode under torch.no_grad(). {_STATE}"
    "To compute the loss without an update, call loss.eval() before and loss.train() after",
    "no backward": f"the loss was called again in training mode before the backward pass of the previous call. {_STATE}"
    "To compute the loss without an update, call loss.eval() before and loss.train() after. To accumulate gradients, call the "
    "loss once on the features of all micro-batches",
    "scale": "logit_scale: expected 1/temperature, such as 14.3 at the start of training, found {scale:.4g}. OpenCLIP's "
    "parameter is the logarithm of this value: pass model.logit_scale.exp()",
    "length": "image_features, text_features: expected rows of unit norm, found norms from {shortest:.4g} to {longest:.4g}. "
    "Pass torch.nn.functional.normalize(features, dim=-1)",
    "positives": "positives: ignored, because the loss was created without equal_captions. Pass equal_captions='mask' to "
    "create_loss, or no positives",
    "index": "index: all samples of a batch have one index, so their states overwrite each other. Pass each sample's own "
    "position in the data set, such as openclip_ext.data.with_index adds",
}


class LoopChecks:
    """Checks of the loop that calls a loss. They are not part of the loss's state.

    ``epoch_is_known`` is True after ``start_epoch``, and after the state of the loss is restored.
    """

    def __init__(self) -> None:
        self.epoch_is_known = False
        self._warned: set[str] = set()
        self._watches = False
        # Whether the backward pass of the last watched call has run. None means that the call needs no backward pass.
        self._backward_ran: bool | None = None

    def before_call(self, loss: "ContrastiveLoss", batch: LocalBatch, outputs: Mapping[str, Any]) -> None:
        """Check a call in training mode. In the first two calls, raise ValueError if the logit scale is unusable."""
        if not can_read_values(batch.image):
            return
        if outputs.get("positives") is not None and not loss.needs_positives:
            self._warn("positives")
        if loss.depends_on_epoch and not self.epoch_is_known:
            self._warn("no epoch")
        if loss.keeps_state and not torch.is_grad_enabled():
            self._warn("no gradient")
        if loss.calls >= CHECKED_CALLS:
            return
        if processes := distributed.unconnected_processes():
            self._warn("processes", processes=processes)
        self._check_values(loss, batch)
        if loss.keeps_state and self._backward_ran is False:
            self._warn("no backward")
        self._watches = loss.keeps_state

    def after_call(self, terms: Iterable[Tensor]) -> None:
        """Register hooks that record whether the backward pass of a checked call runs."""
        if not self._watches:
            return

        def note(gradient: Tensor) -> None:
            self._backward_ran = True

        self._watches, self._backward_ran = False, None
        for term in terms:
            if term.requires_grad:
                self._backward_ran = False
                term.register_hook(note)

    def _warn(self, mistake: str, **found: Any) -> None:
        """Warn about a mistake. A second call for the same mistake does nothing."""
        if mistake not in self._warned:
            self._warned.add(mistake)
            warnings.warn(_WARNINGS[mistake].format(**found), stacklevel=2)

    def _check_values(self, loss: "ContrastiveLoss", batch: LocalBatch) -> None:
        lengths = torch.linalg.vector_norm(torch.stack([batch.image, batch.text]).detach().float(), dim=2)
        lengths = torch.where(lengths < math.inf, lengths, 1)
        values = [lengths.min(), lengths.max(), batch.logit_scale.detach().float()]
        if batch.index is not None and len(batch.index) > 1:
            values.append((batch.index == batch.index[0]).all().float())
        # All values are read together, because each reading synchronizes with the device.
        shortest, longest, scale, *has_one_index = torch.stack(values).tolist()
        if any(has_one_index):
            self._warn("index")
        if not 0 < scale < math.inf:
            raise ValueError(
                f"logit_scale: expected 1/temperature, a finite positive number, found {scale:.4g}. Pass "
                "model.logit_scale.exp()"
            )
        start = loss.initial_logit_scale
        is_asked_for = start is not None and math.isclose(scale, math.exp(start), rel_tol=_TOLERANCE)
        if loss.uses_logit_scale and scale <= _LARGEST_LOG_SCALE and not is_asked_for:
            self._warn("scale", scale=scale)
        if loss.expects_unit_norm and max(longest - 1, 1 - shortest) > _TOLERANCE:
            self._warn("length", shortest=shortest, longest=longest)
