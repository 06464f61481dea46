"""Check the calls of a loss: wrong inputs, mistakes of the training loop, and non-finite samples.

Wrong inputs raise a ValueError. Mistakes of the loop change the numbers without an error, so each gives one warning. Samples
that are not finite are left out and listed. Only the first two calls read values, because that waits for the device.
"""

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch

# --- inputs ----------------------------------------------------------------------------------------------------------


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context that computes in the precision of the tensors, whatever the caller's autocast says."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def check_features(image_features: Tensor, text_features: Tensor, embed_dim: int | None = None) -> None:
    """Raise ValueError unless the features are two floating-point ``(B_local, d)`` of the same shape; ``d`` may be given."""
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.ndim != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"image and text features: expected two of shape (batch, width), found {shapes[0]} and {shapes[1]}"
        )
    if not shapes[0][0]:
        raise ValueError(
            "image and text features: found an empty batch; skip it, or drop it: drop_last=True of the DataLoader"
        )
    if embed_dim is not None and shapes[0][1] != embed_dim:
        raise ValueError(
            f"the features have width {shapes[0][1]}, the loss was created with embed_dim={embed_dim}: pass the model's"
        )
    for name, features in (("image", image_features), ("text", text_features)):
        if not features.is_floating_point():
            raise ValueError(f"{name} features: expected a floating-point type, found {features.dtype}")


def check_logit_scale(logit_scale: Tensor | float | None, like: Tensor) -> Tensor:
    """Return the logit scale as a 0-d tensor on the features' device; raise ValueError unless it is one number."""
    if logit_scale is not None and not isinstance(logit_scale, Tensor):
        # Filled by a kernel: a copy from the host would wait.
        return torch.full((), logit_scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if logit_scale is None or logit_scale.numel() != 1:
        found = None if logit_scale is None else tuple(logit_scale.shape)
        raise ValueError(f"logit_scale: expected one number (the model's, exp applied), found {found}")
    return logit_scale.reshape(()).to(like.device, non_blocking=True)


def check_index(index: Tensor | None, features: Tensor) -> Tensor:
    """Return the index as int64 on the features' device; raise ValueError unless it has one position for each sample."""
    if index is None:
        raise ValueError(
            "this loss keeps state for each sample and needs index=, a (batch,) int64 tensor of positions in the data set"
        )
    integral = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
    if not integral or index.dtype == torch.bool or tuple(index.shape) != (len(features),):
        found = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(type(index).__name__)
        raise ValueError(f"index: expected int64 of shape ({len(features)},), found {found}")
    return index.to(features.device, torch.int64, non_blocking=True)


# --- the training loop -----------------------------------------------------------------------------------------------

CHECKED_CALLS = 2
# Half-precision features differ from length 1 by less.
_TOLERANCE = 0.05
# The largest value of OpenCLIP's parameter log(1/τ). Its exponential is rarely so small: it starts at 10 or 14.3.
_LARGEST_LOG_SCALE = math.log(100)
# Nodes of the graph to look at for a parameter.
_SEARCHED_NODES = 1000
# A smaller batch could repeat a sample by chance.
_MIN_SAMPLES = 4
# An epoch that has seen the data set so many times was forgotten, not just rounded up.
_PASSES_IN_AN_EPOCH = 2

_STATE = "Each such call updates its state, as one optimizer step. "
_EPOCHS = "Schedules of this loss follow the epoch. Call loss.start_epoch(epoch) at the start of each epoch, from 0"
# A warning for each mistake; in braces what was found.
_WARNINGS = {
    "outputs": "{loss} does not use {names}: the loss is the same without. Leave them out, or choose a loss that uses them",
    "processes": "{processes} processes were started (WORLD_SIZE), but torch.distributed.init_process_group was not called: "
    "each contrasts its own samples only",
    "no epoch": f"start_epoch() was not called before the first training step. {_EPOCHS}",
    "long epoch": "epoch {epoch} has seen {samples} samples, and the data set has num_samples={num_samples}. "
    + _EPOCHS,
    "no gradient": f"the loss was called in training mode under torch.no_grad(). {_STATE}"
    "To look at its value, call it after loss.eval(), and continue after loss.train()",
    "no backward": f"the loss was called again in training mode before the backward pass of the previous call. {_STATE}"
    "To look at its value, call it after loss.eval()",
    "no step": f"the loss was called twice in training mode without an optimizer step between the calls. {_STATE}"
    "To accumulate gradients, call it once on the features of all micro-batches",
    "scale": "logit_scale: found {scale:.4g}, a temperature of {temperature:.2g}. Expected 1/temperature, such as 14.3 at the "
    "start of training. If this is the logarithm that OpenCLIP's models keep, pass model.logit_scale.exp()",
    "start": "logit_scale: found {scale:.4g}, and the loss was created with temperature={temperature:.4g}, which has no "
    "effect on the model: start its parameter at loss.initial_logit_scale. To continue a run, restore the loss's state_dict()",
    "length": "image_features, text_features: found rows of length {shortest:.4g} to {longest:.4g}, expected 1. Otherwise the "
    "loss can become huge. Pass torch.nn.functional.normalize(features, dim=-1)",
    "index": "index: {count} of {size} samples of the batch have the index {position}, and share their state. Pass each "
    "sample's position in the data set",
}


def can_read_values(tensor: Tensor) -> bool:
    """Return whether Python may look at a tensor's values: not while compiling or capturing, nor of a fake tensor."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_in_backward() -> bool:
    """Return whether a backward pass calls this, which recomputes what ``torch.utils.checkpoint`` has not kept."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class LoopChecks:
    """Watches the loop that calls a loss. It is not part of the loss's state.

    Attributes:
        epoch_is_known: whether the loop, or a restored state, has told the epoch.
    """

    def __init__(self) -> None:
        self.epoch_is_known = False
        self._epoch: int | None = None
        self._samples = 0
        self._warned: set[str] = set()
        # Of the last checked call: a parameter of the model with its value, and whether the backward pass ran, if it can.
        self._parameter: tuple[int, int, float] | None = None
        self._backward_ran: bool | None = None

    def warn(self, mistake: str, **found: Any) -> None:
        """Warn of a mistake, unless that was done before."""
        if mistake not in self._warned:
            self._warned.add(mistake)
            warnings.warn(_WARNINGS[mistake].format(**found), stacklevel=_frames_to_the_caller())

    def check_processes(self) -> None:
        """Warn if other processes were started, too, and there is no process group to reach them."""
        if processes := distributed.unconnected_processes():
            self.warn("processes", processes=processes)

    def check_epoch(self, epoch: int, samples: int, num_samples: int | None) -> None:
        """Warn if a loss whose schedules follow the epoch is not told of it, given the call's samples of all processes."""
        if not self.epoch_is_known:
            self.warn("no epoch")
        self._samples = samples if epoch != self._epoch else self._samples + samples
        self._epoch = epoch
        if num_samples is not None and self.epoch_is_known and self._samples > _PASSES_IN_AN_EPOCH * num_samples:
            self.warn("long epoch", epoch=epoch, samples=self._samples, num_samples=num_samples)

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
        asked_for = initial_logit_scale is not None and _close(scale, math.exp(initial_logit_scale))
        if uses_logit_scale and scale <= _LARGEST_LOG_SCALE and not asked_for:
            self.warn("scale", scale=scale, temperature=1 / scale)
        if unit_norm and max(longest - 1, 1 - shortest) > _TOLERANCE:
            self.warn("length", shortest=shortest, longest=longest)

    def check_start(self, scale: float, expected: float) -> None:
        """Warn if the model's scale does not start where the loss was asked to start it."""
        if not _close(scale, expected):
            self.warn("start", scale=scale, temperature=1 / expected)

    def check_index(self, index: Tensor) -> None:
        """Warn if more than half of a batch has one index."""
        usual = index.median()  # if there is such an index
        count, position = torch.stack([(index == usual).sum(), usual]).tolist()
        if len(index) >= _MIN_SAMPLES and 2 * count > len(index):
            self.warn("index", count=count, size=len(index), position=position)

    def begin_call(self, *features: Tensor) -> None:
        """Warn if no optimizer step came since the previous call; the features' graph leads to the model's parameters."""
        before, parameter = self._parameter, _find_parameter(features)
        # The version and the sum change with every optimizer step, in place or not.
        if parameter is None:
            self._parameter = None
        else:
            self._parameter = id(parameter), parameter._version, parameter.detach().double().sum().item()
        if self._backward_ran is False:
            self.warn("no backward")
        elif self._backward_ran and parameter is not None and before == self._parameter and parameter.grad is not None:
            self.warn("no step")
        self._backward_ran = None

    def finish_call(self, terms: Iterable[Tensor]) -> None:
        """Notice when the backward pass of this call runs."""

        def note(gradient: Tensor) -> None:
            self._backward_ran = True

        for term in terms:
            if term.requires_grad:
                self._backward_ran = False
                term.register_hook(note)


def _close(scale: float, expected: float) -> bool:
    return math.isclose(scale, expected, rel_tol=_TOLERANCE)


def _find_parameter(outputs: Iterable[Tensor]) -> nn.Parameter | None:
    """Return a parameter that the graph of one of the tensors leads to, or None."""
    for output in outputs:
        if isinstance(output, nn.Parameter):
            return output
        stack: list[Any] = [output.grad_fn]
        seen: set[Any] = set()
        while stack and len(seen) < _SEARCHED_NODES:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter):
                return variable
            stack.extend(following for following, _ in node.next_functions)
    return None


def _frames_to_the_caller() -> int:
    """Return the ``stacklevel`` of the first caller outside of this package and of torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("openclip_ext", "torch"):
        frame, level = frame.f_back, level + 1
    return level


# --- non-finite samples ----------------------------------------------------------------------------------------------

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
