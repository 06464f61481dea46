"""The interface of temperature schemes, and the schemes with a constant or a global temperature.

OpenCLIP's models learn the parameter ``log(1/τ)``. They pass the parameter's exponential, ``logit_scale``, to the loss.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.host_number import choose

# With GlobalTemperature's slow_when_small, temperatures up to _SLOW_BELOW have _SLOW_FACTOR of the learning rate.
_SLOW_BELOW = 0.03
_SLOW_FACTOR = 1 / 3


class TemperatureScheme(nn.Module):
    """A source of temperatures, fixed or learned. Keyword-only arguments of the constructor are options of the loss.

    The loss calls the scheme under ``torch.no_grad()``.

    Attributes:
        needs_index: whether the scheme needs ``batch.index``.
        depends_on_epoch: whether the scheme has schedules that depend on the epoch.
        uses_logit_scale: whether the temperatures depend on the model's ``logit_scale``.
        learns_logit_scale: whether the model's ``logit_scale`` is the global temperature and gets a gradient.
        learns_own: whether the scheme has temperatures of its own, which :meth:`update` learns.
        solves: whether :meth:`solve` computes temperatures from the embeddings.
        regularized: whether the temperature is learned with the objective's regularizer ``ρ``.
        logit_scale_lr: constant learning rate of the model's parameter ``log(1/τ)``. None means the encoders' learning rate.
        initial_logit_scale: initial value of the model's parameter ``log(1/τ)``. None means the model's value.
        logit_scale_bounds: lower and upper bound of the model's parameter ``log(1/τ)``.
    """

    needs_index: ClassVar[bool] = False
    depends_on_epoch: bool = False
    uses_logit_scale: bool = False
    learns_logit_scale: ClassVar[bool] = False
    learns_own: ClassVar[bool] = False
    solves: ClassVar[bool] = False
    regularized: ClassVar[bool] = False
    logit_scale_lr: float | None = None
    initial_logit_scale: float | None = None
    logit_scale_bounds: tuple[float, float] = (-math.inf, math.inf)

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Return the anchors' temperatures of this step, before any update: ``(2, B)``."""
        raise NotImplementedError

    def update(self, stats: ContrastStats, gradient: Tensor) -> None:
        """Update own temperatures. ``gradient`` ``(2, B)`` is the derivative of the regularized objective for each anchor."""

    def solve(self, stats: ContrastStats) -> None:
        """Compute the next step's temperatures from all processes' embeddings of a training step."""

    def keep_labels(self) -> None:
        """Prepare for batches with labels of equal samples. Called once by a loss with ``equal_captions``."""

    def keep_reference(self, width: int) -> None:
        """Prepare for batches with a guide of this embedding dimension. Called once by a loss with ``mask_margin``."""

    def rho(self, epoch: int | Tensor) -> float | Tensor | None:
        """Return the weight of the regularizer in an epoch; None if :attr:`regularized` is False."""
        return None

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """Adjust the model's parameter ``log(1/τ)`` after the optimizer step; ``before`` is its value before the step.

        Afterwards, the loss clamps the parameter to its bounds.
        """

    def metrics(self, epoch: int) -> dict[str, float]:
        rho = self.rho(epoch)
        return {} if rho is None else {"rho": float(rho)}


def global_temperatures(batch: GatheredBatch) -> Tensor:
    """Return the model's temperature for every anchor, ``(2, B)``."""
    return batch.logit_scale.reciprocal().expand(2, batch.size)


def log_inverse(temperature: float | None) -> float | None:
    """Return OpenCLIP's parameter ``log(1/τ)`` for a temperature."""
    return None if temperature is None else -math.log(temperature)


def check_bounds(lower: float, upper: float) -> None:
    """Raise OptionError if ``lower > upper``."""
    if lower > upper:
        raise OptionError("temperature_min", f"temperature_min={lower} is larger than temperature_max={upper}")


class ConstantTemperature(TemperatureScheme):
    """A constant ``τ``. With ``temperature=None``, ``τ`` is ``1/logit_scale`` of the model, without a gradient."""

    def __init__(self, *, temperature: float | None) -> None:
        super().__init__()
        self.temperature = temperature
        self.uses_logit_scale = temperature is None
        self.initial_logit_scale = log_inverse(temperature)

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        if self.temperature is None:
            return global_temperatures(batch)
        return torch.full_like(batch.positive, self.temperature).expand(2, batch.size)


class UnregularizedTemperature(TemperatureScheme):
    """A single ``τ`` between two bounds, learned through the model's ``logit_scale``, without a regularizer."""

    learns_logit_scale = True
    uses_logit_scale = True

    def __init__(
        self, *, temperature: float | None, temperature_min: float, temperature_max: float, lr_tau: float | None
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        self.logit_scale_bounds = (-math.log(temperature_max), -math.log(temperature_min))
        self.logit_scale_lr = lr_tau
        self.initial_logit_scale = log_inverse(temperature)

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        return global_temperatures(batch)


class GlobalTemperature(UnregularizedTemperature):
    """A single learned temperature with the regularizer ``ρ`` (RGCL-g of the FastCLIP paper).

    With ``slow_when_small``, the learning rate is divided by three in steps that start with ``τ ≤ 0.03``.
    """

    regularized = True

    def __init__(
        self,
        *,
        rho: float,
        rho_end: float | None,
        rho_switch: float,
        epochs: int,
        slow_when_small: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.first_rho = rho
        self.rho_end = rho if rho_end is None else rho_end
        self.switch_epoch = round(rho_switch * epochs, 6)  # in floating point, 0.55 * 100 is above 55
        self.depends_on_epoch = self.rho_end != rho
        self.slow_when_small = slow_when_small

    def keep_labels(self) -> None:
        """Prepare for batches with labels of equal samples. Called once by a loss with ``equal_captions``."""

    def rho(self, epoch: int | Tensor) -> float | Tensor:
        return choose(epoch >= self.switch_epoch, self.rho_end, self.first_rho)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        if self.slow_when_small and before is not None:
            # Without weight decay, a third of AdamW's step equals a step with a third of the learning rate.
            factor = torch.where(before >= -math.log(_SLOW_BELOW), _SLOW_FACTOR, 1.0)
            parameter.copy_(before + factor * (parameter - before))
