"""FastCLIP's moving averages with a temperature that decreases linearly from epoch to epoch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds
from openclip_ext.losses.method import TemperaturePart
from openclip_ext.losses.options import FASTCLIP, Bounds, Epochs


class CoolingTemperature(TemperatureScheme):
    """The temperature ``τ(epoch) = max − (max − min)·epoch/epochs``, the same for all samples.

    Args:
        temperature_min, temperature_max: the last and the first temperature (min and max in the equation).
        epochs: number of epochs of the run.
    """

    depends_on_epoch = True

    def __init__(self, *, temperature_min: float, temperature_max: float, epochs: int) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        self.bounds = (temperature_min, temperature_max)
        self.epochs = epochs

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Return the temperature of the current epoch for all image and text anchors, ``(2, B)``."""
        low, high = self.bounds
        tau = high - (high - low) * min(batch.epoch / self.epochs, 1.0)
        return torch.full_like(batch.positive, tau).expand(2, batch.size)


@dataclass(frozen=True)
class Cooling(Epochs, Bounds, TemperaturePart):
    """The scheme, and its options ``temperature_min``, ``temperature_max`` and ``epochs``."""

    name = "cooling"
    module = CoolingTemperature


METHOD = replace(FASTCLIP, name="cooling", temperature_scheme=Cooling(temperature_min=0.03, temperature_max=0.1))
