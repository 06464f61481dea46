"""Skip steps with non-finite gradients: parameters and state stay unchanged on every rank.

One NaN pixel makes every gradient NaN: the loss does not change its state, but the backward pass still uses the encoder's NaN
activations. On a CPU, the host decides before each update whether to skip it. On a GPU, this decision would need a sync in
every step. So the GPU itself skips the update, and the host reads the result some steps later.
"""

import copy
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training import parallel

# On a GPU, the host reads a step's outcome this many steps later.
LAG = 2
# Suffix of names in a ``state_dict`` whose values are counters on the host, not tensors on the device.
_EXTRA_STATE = "_extra_state"
# Above this norm, squares in float32 overflow, as in Adam: the parameter would never change again. The norm of a single number
# (the temperature) does not overflow.
_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
# Tensors up to this many elements are copied together, to launch fewer kernels.
_SMALL = 1 << 22


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, as tensors on the model's device."""

    good: Tensor  # 0-d bool, equal on all ranks: all gradients and features are finite
    has_loss: Tensor  # 0-d bool, equal on all ranks: all features and the logit scale are finite
    bad_rows: Tensor  # (B_local,) bool: samples with non-finite pixels, or, if there are none, with non-finite features


@dataclass(frozen=True)
class SkippedStep:
    """A skipped step. If ``has_loss`` is True and ``are_bad`` False, float16 gradients overflowed under a gradient scaler."""

    number: int
    samples: list[int]  # indices of this rank's non-finite samples, or of all its samples if all are finite
    are_bad: bool  # whether ``samples`` lists non-finite samples, not the full batch
    has_loss: bool  # whether all features of the global batch were finite


class StepGuard:
    """The non-finite step guard: it saves the state before a step, and restores it if the step is skipped.

    The saved state is the loss's state (only the batch's rows of tables) and the model's BatchNorm statistics. ``on_host``:
    whether the host decides if a step is skipped, which synchronizes with a GPU. None (default) means True only on a CPU.
    """

    def __init__(self, model: nn.Module, loss: ContrastiveLoss, on_host: bool | None = None) -> None:
        self._loss = loss
        self._statistics = [buffer for layer in compat.batch_norms(model) for buffer in layer.buffers()]
        self._on_host = on_host
        self._before = (_Copies(), _Copies())  # of BatchNorm's statistics and of the loss's state
        self._counters: dict[str, Any] = {}
        self._pending: deque[tuple[int, Tensor, Tensor, torch.cuda.Event | None]] = deque()
        self.skipped = 0
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.skipped = state_dict.get("skipped", 0)

    @torch.no_grad()
    def before_forward(self) -> None:
        """Save the model's BatchNorm statistics."""
        self._before[0].save(self._statistics)

    @torch.no_grad()
    def before_loss(self) -> None:
        """Save the loss's state."""
        state = self._loss.replicated_state()
        self._counters = {name: _copy(state.pop(name)) for name in list(state) if name.endswith(_EXTRA_STATE)}
        self._before[1].save(list(state.values()))
        for table in self._loss.tables().values():
            table.overwritten = None

    @torch.no_grad()
    def judge(self, images: list[Tensor], outputs: dict[str, Tensor], parameters: list[nn.Parameter]) -> StepOutcome:
        """Return the outcome of a step after its backward pass. Collective: all ranks call it.

        ``images`` is empty if the pixels are integers, which are always finite. The gradients of ``parameters`` are already
        averaged over ranks.
        """
        features = torch.stack([outputs["image_features"], outputs["text_features"]]).detach()
        # A NaN feature makes the maximum NaN, so the comparison is False.
        finite_rows = features.abs().amax(dim=(0, 2)) < math.inf
        has_loss = finite_rows.all() & (outputs["logit_scale"].detach().reshape(()).abs() < math.inf)
        finite = _all_finite(parameters)
        if distributed.world_size() > 1:
            flags = distributed.all_reduce_max(torch.stack([~finite, ~has_loss]).to(torch.float32))
            finite, has_loss = flags[0] == 0, flags[1] == 0
        good = finite & has_loss
        bad_rows = ~finite_rows
        if images and (not good.is_cpu or not good):
            # Pixels are checked before features, because BatchNorm spreads NaN to the features of all samples. The maximum
            # absolute value of an image is NaN if one of its pixels is NaN.
            largest = [torch.linalg.vector_norm(image.flatten(1), ord=math.inf, dim=1) for image in images]
            bad_images = ~(torch.cat(largest) < math.inf)
            bad_rows = torch.where(bad_images.any(), bad_images, bad_rows)
        return StepOutcome(good, has_loss, bad_rows)

    def decides_on_host(self, outcome: StepOutcome) -> bool:
        """Return whether the host reads the outcome before the update."""
        return outcome.good.is_cpu if self._on_host is None else self._on_host

    def step(self, optimizer: torch.optim.Optimizer, outcome: StepOutcome) -> None:
        """Take the optimizer's step if the outcome is good. On a GPU, a fused optimizer skips a bad step without a sync."""
        if self.decides_on_host(outcome) or not compat.skips_on_device(optimizer):
            if outcome.good:
                optimizer.step()
            return
        # A fused optimizer reads these attributes, and skips the update on the device. GradScaler sets them, too.
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, (~outcome.good).to(torch.float32)
        optimizer.step()
        del fused.grad_scale, fused.found_inf

    @torch.no_grad()
    def finish(self, outcome: StepOutcome, number: int, index: Tensor | None) -> None:
        """Restore the saved state after a bad step, and record the outcome.

        ``index``, ``(B_local,)`` on the CPU, contains the sample indices to report. None means positions in the batch.
        """
        if not self.decides_on_host(outcome):
            self._restore(skip_if=outcome.good)
        elif not outcome.good:
            self._restore()
        names = torch.arange(len(outcome.bad_rows)) if index is None else index
        flags, arrived = torch.cat([outcome.good[None], outcome.has_loss[None], outcome.bad_rows]), None
        if flags.is_cuda:
            stream = torch.cuda.current_stream(flags.device)
            flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        self._pending.append((number, names, flags, arrived))

    def _restore(self, skip_if: Tensor | None = None) -> None:
        """Restore the saved state, unless ``skip_if`` (0-d bool on the device) is True. Passing ``skip_if`` avoids a sync.

        With ``skip_if``, counters on the host are not restored, so they also count a skipped step.
        """
        state = self._loss.replicated_state()  # read again, because an own loss may have replaced a buffer in the step
        tensors = [value for name, value in state.items() if not name.endswith(_EXTRA_STATE)]
        for copies, now in zip(self._before, (self._statistics, tensors), strict=True):
            copies.restore(now, skip_if)
        if skip_if is None:
            self._loss.load_replicated_state(state | self._counters)
        for table in self._loss.tables().values():
            table.undo_write(skip_if)

    def poll_outcomes(self, wait: bool = False) -> list[SkippedStep]:
        """Return the skipped steps that no earlier call returned. All ranks return them in the same call.

        ``wait``: whether to include the latest steps, which synchronizes with a GPU.
        """
        found = []
        while self._pending:
            number, names, flags, arrived = self._pending[0]
            is_on_host = flags.is_cpu and arrived is None
            if not (wait or is_on_host or len(self._pending) > LAG):
                break
            self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            if flags[0]:
                self.in_a_row = 0
                continue
            self.skipped += 1
            self.in_a_row += 1
            bad_rows = flags[2:].cpu()
            are_bad = bool(bad_rows.any())
            found.append(SkippedStep(number, (names[bad_rows] if are_bad else names).tolist(), are_bad, bool(flags[1])))
        return found


def _all_finite(parameters: list[nn.Parameter]) -> Tensor:
    """Return whether this process's shards of the gradients are finite: a 0-d bool on their device."""
    gradients = [parallel.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # With FSDP, a process may have an empty shard of a small parameter. It is finite, so skip it.
    shards = [gradient for gradient in gradients if gradient.numel()]
    if not shards:
        return torch.ones((), dtype=torch.bool, device=parameters[0].device)
    # Norms are ten times faster than isfinite on a CPU.
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(shards)])
    return (norms < _LARGEST_NORM).all()  # NaN also gives False


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class _Copies:
    """Copies of tensors, from which these tensors, or their replacements, can be restored.

    Small tensors of one dtype are copied together. Otherwise, each of a ResNet-50's 159 BatchNorm buffers would need one
    kernel to copy it and two to restore it. The copies of the next step reuse the memory, because on a CPU, allocating memory
    takes several times as long as the copy.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, list[int]] = {}
        self._copies: dict[Any, Tensor] = {}

    def save(self, tensors: list[Tensor]) -> None:
        """Copy tensors. This overwrites the earlier copies."""
        self._groups = defaultdict(list)
        for number, tensor in enumerate(tensors):
            own = number if tensor.numel() > _SMALL else None
            self._groups[tensor.device, tensor.dtype, own].append(number)
        self._copies = {
            kind: torch.cat([tensors[number].reshape(-1) for number in numbers], out=self._copies.get(kind))
            for kind, numbers in self._groups.items()
        }

    def restore(self, tensors: list[Tensor], skip_if: Tensor | None) -> None:
        """Overwrite ``tensors`` with the copies, unless ``skip_if`` (0-d bool on their device) is True. Call it once."""
        for kind, numbers in self._groups.items():
            group, values = [tensors[number] for number in numbers], self._copies[kind]
            if skip_if is not None:
                now = [tensor.reshape(-1) for tensor in group]
                torch.where(skip_if, now[0] if len(now) == 1 else torch.cat(now), values, out=values)
            parts = values.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group, strict=True)])
