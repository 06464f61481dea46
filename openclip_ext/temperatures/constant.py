"""A temperature that stays as it is: SogCLR, FastCLIP-v1."""

import torch
from torch import Tensor

from openclip_ext.losses.block import Block
from openclip_ext.temperatures.base import TemperatureScheme, global_temperatures, log_inverse


class ConstantTemperature(TemperatureScheme):
    """``τ`` fixed.

    Args:
        temperature: τ; None: whatever ``logit_scale`` says, without a gradient.
    """

    def __init__(self, *, temperature: float | None) -> None:
        super().__init__()
        self.temperature = temperature
        self.initial_logit_scale = log_inverse(temperature)

    def temperatures(self, block: Block) -> Tensor:
        """See :class:`TemperatureScheme`."""
        if self.temperature is None:
            return global_temperatures(block)
        return torch.full_like(block.positive, self.temperature).expand(2, block.size)
