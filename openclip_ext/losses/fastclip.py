"""FastCLIP v0 to v3: a moving average for each sample, with a schedule of its weight γ.

Wei et al., *FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources*,
arXiv:2407.01445, 2024; Algorithm 2 and equations [3, 4, 13] of NeuCLIP. For each sample and side::

    u_i ← (1−γ)·u_i + γ·(ε + g_i(batch)),    α_i = log of the new u_i                                 [NeuCLIP 3]
    γ(epoch) = γ_min + ½(1−γ_min)(1 + cos(π·epoch/E)) up to epoch E, then γ_min

where ``g_i(batch) = mean_{j≠i} exp((s_ij − s_ii)/τ)``. The versions differ in the temperature:

- ``fastclip-v0``: one learned temperature; the loss is ``mean g_i/u_i``, without the factor τ and without ρ;
- ``fastclip-v1``: one constant temperature;
- ``fastclip-v2``: one learned temperature per sample (``isogclr.py``);
- ``fastclip`` = ``fastclip-v3``: one learned temperature, with ρ [NeuCLIP 13]. Its learning rate is divided by three while
  ``τ ≤ 0.03``.

Naive float64 version: ``tests/references/contrastive.py``. Page: ``docs/methods/fastclip.md``.

Example:
    >>> loss = openclip_ext.create_loss("fastclip", num_samples=len(dataset), epochs=30)
    >>> loss.start_epoch(epoch)  # sets γ
    >>> terms = loss(image_features, text_features, logit_scale, index=index, output_dict=True)
"""

from typing import ClassVar

from torch import Tensor

from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN, Estimand, Unscaled
from openclip_ext.state.sharded_table import ShardedTable, group_log_mean


class SampleAverages(Normalizer):
    """A moving average ``u`` of mini-batch estimates for each sample and side. The log-normalizer is ``α_i = log u_i``.

    The table stores ``log u``: 8 bytes per sample, sharded over processes. ``α`` uses the updated ``u``. The first value of
    ``u`` is the mini-batch estimate. If an index occurs several times in the global batch, the mean of its new values is
    stored. Subclasses implement :meth:`averaged`.
    """

    estimates: ClassVar[tuple[Estimand, ...] | None] = (NEGATIVES_MEAN,)
    needs_index = True

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.table = ShardedTable(2, num_samples)

    def averaged(self, stats: ContrastStats) -> Tensor:
        """Return the new ``log u`` ``(2, B)``, computed from the stored ``log u`` and the mini-batch estimate."""
        raise NotImplementedError

    def step(self, stats: ContrastStats) -> Estimate:
        batch, index = stats.batch, stats.batch.sample_index()
        averaged = group_log_mean(index, self.averaged(stats), batch.valid)
        self.table.write(index, averaged, batch.valid)
        return Estimate(averaged)

    def predict(self, stats: ContrastStats) -> Estimate:
        return Estimate(self.stored(stats))

    def stored(self, stats: ContrastStats) -> Tensor:
        """Return the stored ``log u`` ``(2, B)``; for samples without a stored value, the mini-batch estimate."""
        return self.table.read(stats.batch.sample_index(), missing=stats.log_estimate)


class MovingAverageNormalizer(SampleAverages):
    """``u_i ← (1−γ)·u_i + γ·(ε + g_i(batch))`` with a γ that depends on the epoch [NeuCLIP 3]."""

    def __init__(
        self, *, num_samples: int, gamma: float, gamma_schedule: str, gamma_decay_epochs: int | None, epochs: int
    ) -> None:
        super().__init__(num_samples)
        self.final_gamma = gamma
        self.depends_on_epoch = gamma_schedule == "cosine"
        self.decay_epochs = gamma_decay_epochs or max(1, epochs // 2)

    def gamma(self, epoch: int | Tensor) -> float | Tensor:
        """Return γ of an epoch (book [opt4ml], 'Scheduler of γ')."""
        if not self.depends_on_epoch:
            return self.final_gamma
        return log_math.cosine_decay(1.0, self.final_gamma, epoch, self.decay_epochs)

    def averaged(self, stats: ContrastStats) -> Tensor:
        return log_math.log_mix(self.stored(stats), stats.log_estimate, self.gamma(stats.batch.epoch))

    def metrics(self, epoch: int) -> dict[str, float]:
        return {"gamma": float(self.gamma(epoch))}


class Ratio(Unscaled):
    """The objective of FastCLIP-v0: ``g/u`` with ``u = exp(α)``, without the factor τ."""

    estimand = NEGATIVES_MEAN

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return log_math.saturating_exp(stats.log_mean_negatives - alpha)
