"""One learned temperature, the model's: FastCLIP-v0 and -v3, NeuCLIP, AmorLIP."""

import math

import torch
from torch import Tensor

from openclip_ext.losses.block import Block
from openclip_ext.temperatures.base import (
    TemperatureScheme,
    check_bounds,
    clamp_temperature_,
    global_temperatures,
    log_inverse,
)

# FastCLIP-v3 takes a third of the learning rate while the temperature is at or below this.
_SLOW_BELOW = 0.03
_SLOW_FACTOR = 1 / 3


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

    def temperatures(self, block: Block) -> Tensor:
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
