"""A learned temperature for each sample and side: iSogCLR, FastCLIP-v2."""

import torch
from torch import Tensor

from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds
from openclip_ext.state.sharded_table import ShardedTable, mean_of_equal

_LARGEST_GRADIENT = 5.0
_BETAS = (0.9, 0.999)
_EPS = 1e-8
_TEMPERATURES, _ALL = slice(0, 2), slice(None)


class PerSampleTemperature(TemperatureScheme):
    """``τ_1,i, τ_2,i`` in ``[τ_0, τ_max]``, each minimising its anchor's robust loss (RGCL; the chapter, Algorithm 35).

    The gradient is clamped to ±5 and goes through Adam with moments of its own for each sample. As a sample is seen once an
    epoch, its bias correction counts epochs; in epoch 0 the moments are the gradient itself. A step uses the temperatures as
    they were before its update. An index that is in the global batch more than once learns from the mean of its gradients.

    Args:
        num_samples: size ``n`` of the index space; 24 bytes for each sample, spread over the processes.
        state_device, state_dir: where they lie, see :class:`ShardedTable`.
        rho: ρ.
        temperature: start value.
        temperature_min, temperature_max: bounds.
        lr_tau: learning rate, constant.
    """

    needs_index = True
    learns_own = True

    def __init__(
        self,
        *,
        num_samples: int,
        rho: float,
        temperature: float | None,
        temperature_min: float,
        temperature_max: float,
        lr_tau: float | None,
        state_device: str,
        state_dir: str | None,
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        if temperature is None or lr_tau is None:
            missing = "temperature" if temperature is None else "lr_tau"
            raise ValueError(
                f"{missing}=None: temperatures of each sample need a value, as the model has none for them"
            )
        self.weight = rho
        self.start = temperature
        self.bounds = (temperature_min, temperature_max)
        self.lr = lr_tau
        # Rows: temperatures, first and second moments, two sides each.
        self.table = ShardedTable(6, num_samples, state_device, state_dir)

    def rho(self, epoch: int) -> float:
        """See :class:`TemperatureScheme`."""
        return self.weight

    def temperatures(self, block: GatheredBatch) -> Tensor:
        """See :class:`TemperatureScheme`."""
        stored = self.table.read(block.index, _TEMPERATURES)
        return torch.where(block.valid & ~torch.isnan(stored), stored, self.start)

    @torch.no_grad()
    def update(self, block: GatheredBatch, gradient: Tensor) -> None:
        """See :class:`TemperatureScheme`."""
        gradient = mean_of_equal(block.index, gradient, block.valid).clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)
        mean, square = self.table.read(block.index, _ALL).nan_to_num(nan=0.0)[2:].split(2)
        beta1, beta2 = _BETAS if block.epoch > 0 else (0.0, 0.0)
        mean = mean.lerp(gradient, 1 - beta1)
        square = square.lerp(gradient.square(), 1 - beta2)
        corrected = mean / (1 - beta1 ** (block.epoch + 1))
        size = (square / (1 - beta2 ** (block.epoch + 1))).sqrt() + _EPS
        tau = (block.tau - self.lr * corrected / size).clamp(*self.bounds)
        self.table.write(block.index, torch.cat([tau, mean, square]), block.valid)
