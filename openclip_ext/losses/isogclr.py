"""iSogCLR: SogCLR with a learned temperature for each sample and side. FastCLIP-v2 has the same temperatures.

Qiu et al., *Not All Semantics are Created Equal: Contrastive Self-supervised Learning with Automatic Temperature
Individualization*, ICML 2023; Algorithm 35 of [opt4ml], the book section *Discriminative Pretraining of Representation
Models*. With ``ℓ_ij = s_ij − s_ii``, each ``τ_i`` in ``[τ_0, τ_max]`` follows the gradient::

    log u_i + ρ − (1/(u_i(B−1))) Σ_j exp(ℓ_ij/τ_i)·ℓ_ij/τ_i

With ``views=2``, as in the algorithm, the pairs are two views of each image. Both views share the image's temperature.

Naive float64 versions: ``PerSample`` in ``tests/references/contrastive.py``, ``tests/references/two_views.py``. Pages:
``docs/methods/sogclr-isogclr.md``, ``docs/methods/unimodal.md``.

Example:
    >>> loss = openclip_ext.create_loss("isogclr", num_samples=len(dataset))
    >>> terms = loss(image_features, text_features, logit_scale, index=index, output_dict=True)
"""

import torch
from torch import Tensor

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.host_number import choose
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds
from openclip_ext.state.sharded_table import ShardedTable, group_mean

_LARGEST_GRADIENT = 5.0
_BETAS = (0.9, 0.999)
_EPS = 1e-8
_TEMPERATURES, _ALL = slice(0, 2), slice(None)


class PerSampleTemperature(TemperatureScheme):
    """Learned temperatures ``τ_1,i, τ_2,i`` in ``[τ_0, τ_max]`` for each sample [opt4ml, Algorithm 35].

    Adam learns the temperatures from gradients clamped to ±5, with moments for each sample. A sample occurs once per epoch, so
    Adam's bias correction counts epochs. In epoch 0, the moments are the gradient and its square. The loss of a step uses the
    temperatures before their update. If an index occurs several times in the global batch, the mean gradient is used.

    The table needs 24 bytes per sample, sharded over the processes.
    """

    needs_index = True
    depends_on_epoch = True
    learns_own = True
    regularized = True

    def __init__(
        self,
        *,
        num_samples: int,
        rho: float,
        temperature: float | None,
        temperature_min: float,
        temperature_max: float,
        lr_tau: float | None,
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        if temperature is None or lr_tau is None:
            missing = "temperature" if temperature is None else "lr_tau"
            raise OptionError(missing, f"{missing}=None: expected a number for per-sample temperatures")
        self.start, self.lr = temperature, lr_tau
        self.weight = rho
        self.bounds = (temperature_min, temperature_max)
        # Columns: temperatures, first moments and second moments, for two sides each.
        self.table = ShardedTable(6, num_samples)

    def rho(self, epoch: int | Tensor) -> float:
        return self.weight

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Return the stored temperatures; for samples without a stored value, the initial temperature."""
        stored = self.table.read(batch.sample_index(), _TEMPERATURES)
        return torch.where(batch.valid & ~torch.isnan(stored), stored, self.start)

    def update(self, stats: ContrastStats, gradient: Tensor) -> None:
        batch, index = stats.batch, stats.batch.sample_index()
        gradient = group_mean(index, gradient, batch.valid).clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)
        mean, square = self.table.read(index, _ALL).nan_to_num(nan=0.0)[2:].split(2)
        betas = (choose(batch.epoch > 0, beta, 0.0) for beta in _BETAS)
        # The weight of lerp must have the dtype and the device of the other arguments.
        beta1, beta2 = (beta.to(mean) if isinstance(beta, Tensor) else beta for beta in betas)
        mean = mean.lerp(gradient, 1 - beta1)
        square = square.lerp(gradient.square(), 1 - beta2)
        corrected = mean / (1 - beta1 ** (batch.epoch + 1))
        size = (square / (1 - beta2 ** (batch.epoch + 1))).sqrt() + _EPS
        tau = (stats.tau - self.lr * corrected / size).clamp(*self.bounds)
        self.table.write(index, torch.cat([tau, mean, square]), batch.valid)
