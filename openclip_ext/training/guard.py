"""A step whose gradients are not finite changes nothing: neither parameters nor any state, on all ranks alike.

One NaN pixel is enough: the loss leaves its sample out, but the backward pass through the encoder's NaN activations makes
every gradient NaN. On a CPU the host looks before it updates. On a GPU it would have to wait in every step, so the update is
conditional on the device, and the host learns of a skipped step some steps later.
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
from openclip_ext.contrastive.loss import ContrastiveLoss, finite_samples
from openclip_ext.training import parallel

# Number of steps after which the host looks at the outcome of a step on a GPU.
LAG = 2
# Suffix of the entries of ``state_dict`` that are the host's counters.
_EXTRA_STATE = "_extra_state"
# Tensors of at most so many numbers are copied together, to launch fewer kernels.
_SMALL = 1 << 22


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, as tensors on the model's device. Reading them waits for it.

    Attributes:
        good: 0-d bool, the same on all ranks: all gradients are finite, and some sample is valid.
        has_valid: 0-d bool, the same on all ranks: some sample is valid, so that the loss has a value.
        bad_rows: ``(B_local,)`` bool, samples with non-finite pixels, or if there are none, features.
    """

    good: Tensor
    has_valid: Tensor
    bad_rows: Tensor


@dataclass(frozen=True)
class SkippedStep:
    """A step that changed nothing.

    Attributes:
        number: number of the step.
        samples: indices of this rank's samples with non-finite pixels or features, or of its whole batch if there are none.
        are_bad: whether there are such samples.
        has_loss: whether some sample of the global batch was valid. With a gradient scaler such a step is ordinary: float16
            gradients overflowed, and the scale is lowered.
    """

    number: int
    samples: list[int]
    are_bad: bool
    has_loss: bool


class StepGuard:
    """Remembers the state before a step, and puts it back if the step turns out not to be finite.

    Args:
        model: the model as it is trained, whose BatchNorm statistics are remembered.
        loss: the loss, whose state is remembered (of tables, the rows of the batch).
        on_host: whether the host decides, which takes a wait on a GPU; None: on a CPU only.
    """

    def __init__(self, model: nn.Module, loss: ContrastiveLoss, on_host: bool | None = None) -> None:
        self._loss = loss
        self._statistics = [buffer for layer in compat.batch_norms(model) for buffer in layer.buffers()]
        self._on_host = on_host
        self._before: list[_Remembered] = []
        self._counters: dict[str, Any] = {}
        self._call = 0
        self._pending: deque[_Pending] = deque()
        self.skipped = 0
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps that changed nothing, as the host knows it."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of steps that changed nothing; 0 if the state does not say."""
        self.skipped = state_dict.get("skipped", 0)

    # --- before the step is judged ----------------------------------------------------------------------------------

    @torch.no_grad()
    def before_forward(self) -> None:
        """Remember the model's running statistics."""
        self._before = [_Remembered(self._statistics)]

    @torch.no_grad()
    def before_loss(self) -> None:
        """Remember the loss's state."""
        # Its tensors are the loss's own, not copies.
        state = self._loss.replicated_state()
        self._counters = {name: _copy(state.pop(name)) for name in list(state) if name.endswith(_EXTRA_STATE)}
        self._before.append(_Remembered(list(state.values())))
        self._call = self._loss.calls
        for table in self._loss.tables().values():
            table.overwritten = None

    @torch.no_grad()
    def judge(self, images: list[Tensor], outputs: dict[str, Tensor], parameters: list[nn.Parameter]) -> StepOutcome:
        """Find out whether a step is finite, after its backward pass. All ranks must call it.

        Args:
            images: images of all micro-batches; none if they came as integers, which are finite.
            outputs: the model's outputs for the whole batch.
            parameters: the parameters, whose gradients are averaged over the ranks.
        """
        finite_rows = finite_samples(outputs["image_features"], outputs["text_features"])
        has_valid = finite_rows.any() & (outputs["logit_scale"].detach().reshape(()).abs() < math.inf)
        finite = _all_finite(parameters)
        if distributed.world_size() > 1:
            flags = distributed.all_reduce_max(torch.stack([~finite, has_valid]).to(torch.float32))
            finite, has_valid = flags[0] == 0, flags[1] > 0
        good = finite & has_valid
        bad_rows = ~finite_rows
        if images and (not good.is_cpu or not good):
            # BatchNorm makes the features of all samples NaN: look at the pixels.
            bad_images = torch.cat([~_finite_images(image) for image in images])
            bad_rows = torch.where(bad_images.any(), bad_images, bad_rows)
        return StepOutcome(good, has_valid, bad_rows)

    # --- the update -------------------------------------------------------------------------------------------------

    def decides_on_host(self, outcome: StepOutcome) -> bool:
        """Return whether the host may look at the outcome."""
        return outcome.good.is_cpu if self._on_host is None else self._on_host

    def step(self, optimizer: torch.optim.Optimizer, outcome: StepOutcome) -> None:
        """Take the optimizer's step if the outcome is good.

        On a GPU, torch's fused optimizers skip it without a wait of the host.
        """
        if self.decides_on_host(outcome) or not compat.skips_on_device(optimizer):
            if outcome.good:
                optimizer.step()
            return
        # As torch.amp.GradScaler tells them.
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, (~outcome.good).to(torch.float32)
        optimizer.step()
        del fused.grad_scale, fused.found_inf

    @torch.no_grad()
    def finish(self, outcome: StepOutcome, number: int, index: Tensor | None) -> None:
        """Put the remembered state back after a bad step, and note it.

        Args:
            outcome: the result of :meth:`judge`.
            number: number of the step.
            index: ``(B_local,)`` on the CPU, to name the samples; None: their positions.
        """
        if not self.decides_on_host(outcome):
            self._put_back(unless=outcome.good)
        elif not outcome.good:
            self._put_back()
        names = torch.arange(len(outcome.bad_rows)) if index is None else index
        self._pending.append(_Pending(number, names, outcome))
        self._before, self._counters = [], {}

    def _put_back(self, unless: Tensor | None = None) -> None:
        """Put everything back, unless ``unless``, 0-d bool on the device, holds. If it is given, the host does not wait.

        The host's counters then count the skipped step, too.
        """
        for remembered in self._before:
            remembered.put_back(unless)
        self._loss.nonfinite.forget(self._call, unless)
        if unless is None:
            self._loss.load_replicated_state(self._loss.replicated_state() | self._counters)
        for table in self._loss.tables().values():
            table.undo_write(unless)

    # --- what the host learns ---------------------------------------------------------------------------------------

    def poll_outcomes(self, wait: bool = False) -> list[SkippedStep]:
        """Return the skipped steps that are new to the host, on all ranks in the same call.

        Args:
            wait: whether to include the last steps, which takes a wait on a GPU.
        """
        found = []
        while self._pending and (wait or self._pending[0].is_on_host or len(self._pending) > LAG):
            step = self._pending.popleft()
            if step.good():
                self.in_a_row = 0
            else:
                self.skipped += 1
                self.in_a_row += 1
                found.append(step.report())
        return found


class _Pending:
    """The outcome of a step on its way to the host."""

    def __init__(self, number: int, names: Tensor, outcome: StepOutcome) -> None:
        self._number, self._names = number, names
        self._arrived: torch.cuda.Event | None = None
        flags = torch.cat([outcome.good[None], outcome.has_valid[None], outcome.bad_rows])
        self.is_on_host = flags.is_cpu
        if flags.is_cuda:
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flags.device))
        else:
            self._flags = flags

    def good(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flags[0])

    def report(self) -> SkippedStep:
        bad_rows = self._flags[2:].cpu()
        samples = self._names[bad_rows] if bad_rows.any() else self._names
        return SkippedStep(self._number, samples.tolist(), bool(bad_rows.any()), bool(self._flags[1]))


def _all_finite(parameters: list[nn.Parameter]) -> Tensor:
    """Return whether this process's parts of the gradients are finite: a 0-d bool on their device."""
    gradients = [parallel.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # A process may have no part of a small parameter.
    parts = [gradient for gradient in gradients if gradient.numel()]
    if not parts:
        return torch.ones((), dtype=torch.bool, device=parameters[0].device)
    # The norm also overflows where Adam's squares would, and is an order of magnitude faster on a CPU than isfinite.
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(parts)])
    return (norms < math.inf).all()  # False for NaN, too


def _finite_images(images: Tensor) -> Tensor:
    """Return which images ``(b,)`` of ``(b, ..., H, W)`` have finite pixels only. The maximum passes a NaN on."""
    return torch.linalg.vector_norm(images.flatten(1), ord=math.inf, dim=1) < math.inf


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class _Remembered:
    """Copies of tensors, from which they can be put back.

    Small tensors of one type are copied as one: a ResNet-50 has 159 buffers of BatchNorm, each of which would take a kernel
    to copy and two to put back.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        groups: dict[Any, list[Tensor]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            key = (tensor.device, tensor.dtype) if tensor.numel() <= _SMALL else number
            groups[key].append(tensor)
        self._groups = [(group, torch.cat([tensor.reshape(-1) for tensor in group])) for group in groups.values()]

    def put_back(self, unless: Tensor | None = None) -> None:
        """Overwrite the tensors with their copies, unless ``unless``, 0-d bool on their device, holds."""
        for group, before in self._groups:
            values = before
            if unless is not None:
                now = [tensor.reshape(-1) for tensor in group]
                values = torch.where(unless, now[0] if len(now) == 1 else torch.cat(now), before)
            parts = values.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group, strict=True)])
