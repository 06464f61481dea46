"""What every temperature scheme is."""

import math

import torch
from torch import Tensor, nn

from openclip_ext.losses.block import Block


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

    def temperatures(self, block: Block) -> Tensor:
        """Temperatures of a block's anchors in this step, before any update: ``(2, B)``."""
        raise NotImplementedError

    def update(self, block: Block, gradient: Tensor) -> None:
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


def global_temperatures(block: Block) -> Tensor:
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
