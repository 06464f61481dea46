"""What every temperature scheme is."""

import math

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import GatheredBatch

# FastCLIP-v3 takes a third of the learning rate while the temperature is at or below this.
_SLOW_BELOW = 0.03
_SLOW_FACTOR = 1 / 3


class TemperatureScheme(nn.Module):
    """Where the temperatures come from, and what happens to them.

    Attributes:
        needs_index: whether ``block.index`` must be there.
        learns_logit_scale: whether the model's ``logit_scale`` is the (global) temperature and learned.
        learns_own: whether the scheme keeps and learns temperatures of its own; :meth:`update` is called then.
        logit_scale_lr: learning rate of the model's parameter, without schedule; None: that of the encoders.
        initial_logit_scale: start value of the model's parameter ``log(1/τ)``; None: the model's own.
    """

    needs_index = False
    learns_logit_scale = False
    learns_own = False
    logit_scale_lr: float | None = None
    initial_logit_scale: float | None = None

    def temperatures(self, block: GatheredBatch) -> Tensor:
        """Temperatures of a block's anchors in this step, before any update: ``(2, B)``."""
        raise NotImplementedError

    def update(self, block: GatheredBatch, gradient: Tensor) -> None:
        """Learn from the derivative of the objective in each anchor's temperature, ``(2, B)``, regulariser included."""

    def rho(self, epoch: int) -> float | None:
        """Weight of the regulariser in an epoch; None for a scheme that has none."""
        return None

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """Bound the model's parameter ``log(1/τ)`` after the optimizer's step; ``before`` is its value before it."""

    def metrics(self, epoch: int) -> dict[str, float]:
        """Numbers for the logs."""
        rho = self.rho(epoch)
        return {} if rho is None else {"rho": rho}


def global_temperatures(block: GatheredBatch) -> Tensor:
    """The model's temperature for every anchor, ``(2, B)``."""
    return (1 / block.logit_scale).expand(2, block.size)


def log_inverse(temperature: float | None) -> float | None:
    """OpenCLIP's parameter for a temperature."""
    return None if temperature is None else -math.log(temperature)


def check_bounds(lower: float, upper: float) -> None:
    """Raise ValueError unless ``lower ≤ upper``."""
    if lower > upper:
        raise ValueError(f"temperature_min={lower} is larger than temperature_max={upper}")


@torch.no_grad()
def clamp_temperature_(parameter: Tensor, lower: float, upper: float) -> None:
    """Keep ``τ = exp(−parameter)`` within the bounds."""
    parameter.clamp_(-math.log(upper), -math.log(lower))


class ConstantTemperature(TemperatureScheme):
    """``τ`` fixed.

    Args:
        temperature: τ; None: whatever ``logit_scale`` says, without a gradient.
    """

    def __init__(self, *, temperature: float | None) -> None:
        super().__init__()
        self.temperature = temperature
        self.initial_logit_scale = log_inverse(temperature)

    def temperatures(self, block: GatheredBatch) -> Tensor:
        """See :class:`TemperatureScheme`."""
        if self.temperature is None:
            return global_temperatures(block)
        return torch.full_like(block.positive, self.temperature).expand(2, block.size)


class UnregularizedTemperature(TemperatureScheme):
    """A single ``τ ≥ τ_0``, learned through the model's ``logit_scale``, without regulariser: FastCLIP-v0.

    Args:
        temperature: start value; None: the model's.
        temperature_min, temperature_max: bounds.
        lr_tau: learning rate of the model's parameter; None: the encoders', with its schedule.
    """

    learns_logit_scale = True

    def __init__(
        self, *, temperature: float | None, temperature_min: float, temperature_max: float, lr_tau: float | None
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        self.bounds = (temperature_min, temperature_max)
        self.logit_scale_lr = lr_tau
        self.initial_logit_scale = log_inverse(temperature)

    def temperatures(self, block: GatheredBatch) -> Tensor:
        """See :class:`TemperatureScheme`."""
        return global_temperatures(block)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """See :class:`TemperatureScheme`."""
        clamp_temperature_(parameter, *self.bounds)


class GlobalTemperature(UnregularizedTemperature):
    """A single learned temperature with the regulariser ``ρ`` (RGCL-g).

    Args:
        rho: ρ.
        rho_end: ρ in the last part of the run; None: ρ.
        rho_switch: fraction of the epochs after which ``rho_end`` is used.
        epochs: epochs of the run.
        slow_when_small: take a third of the learning rate while ``τ ≤ 0.03`` (FastCLIP-v3, AmorLIP; not latched).
        temperature, temperature_min, temperature_max, lr_tau: see :class:`UnregularizedTemperature`.
    """

    def __init__(
        self,
        *,
        rho: float,
        rho_end: float | None,
        rho_switch: float,
        epochs: int,
        slow_when_small: bool,
        temperature: float | None,
        temperature_min: float,
        temperature_max: float,
        lr_tau: float | None,
    ) -> None:
        super().__init__(
            temperature=temperature, temperature_min=temperature_min, temperature_max=temperature_max, lr_tau=lr_tau
        )
        self.first_rho = rho
        self.rho_end = rho if rho_end is None else rho_end
        self.switch_epoch = rho_switch * epochs
        self.slow_when_small = slow_when_small

    def rho(self, epoch: int) -> float:
        """See :class:`TemperatureScheme`."""
        return self.rho_end if epoch >= self.switch_epoch else self.first_rho

    @torch.no_grad()
    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None) -> None:
        """See :class:`TemperatureScheme`.

        A third of the learning rate is a third of AdamW's step, as the parameter has no weight decay.
        """
        if self.slow_when_small and before is not None:
            factor = torch.where(before >= -math.log(_SLOW_BELOW), _SLOW_FACTOR, 1.0)
            parameter.copy_(before + factor * (parameter - before))
        super().finish_logit_scale_step(parameter, before)
