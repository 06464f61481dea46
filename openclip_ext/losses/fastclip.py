"""A moving average per sample and side: SogCLR, FastCLIP."""

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.normalizer import Estimate, Normalizer, batch_estimate_where_missing
from openclip_ext.state.sharded_table import ShardedTable, log_mean_of_equal


class MovingAverageNormalizer(Normalizer):
    """``u_i ← (1−γ)·u_i + γ·(ε + g_i(batch))``, ``α_i = log u_i``, the new one [NeuCLIP 3].

    Kept as ``log u``. A sample seen for the first time takes the batch's estimate. An index that is in the global batch
    more than once receives the mean of the new u, in all places.

    Args:
        num_samples: size ``n`` of the index space; 8 bytes for each sample, spread over the processes.
        state_device, state_dir: where they lie, see :class:`ShardedTable`.
        gamma: final γ.
        gamma_schedule: ``constant``, or ``cosine``: from 1 at epoch 0 to ``gamma`` at ``gamma_decay_epochs``.
        gamma_decay_epochs: ``E``; None: half of ``epochs``.
        epochs: epochs of the run.
    """

    needs_index = True

    def __init__(
        self,
        *,
        num_samples: int,
        gamma: float,
        gamma_schedule: str,
        gamma_decay_epochs: int | None,
        epochs: int,
        state_device: str,
        state_dir: str | None,
    ) -> None:
        super().__init__()
        self.table = ShardedTable(2, num_samples, state_device, state_dir)
        self.final_gamma = gamma
        self.decays = gamma_schedule == "cosine"
        self.decay_epochs = gamma_decay_epochs or max(1, epochs // 2)

    def gamma(self, epoch: int) -> float:
        """γ of an epoch (the chapter, 'Scheduler of γ')."""
        if not self.decays:
            return self.final_gamma
        return F.cosine_decay(1.0, self.final_gamma, epoch, self.decay_epochs)

    @torch.no_grad()
    def step(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        averaged = F.log_mix(self._stored(block), block.log_estimate, self.gamma(block.epoch))
        averaged = log_mean_of_equal(block.index, averaged, block.valid)
        self.table.write(block.index, averaged, block.valid)
        return Estimate(averaged)

    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        return Estimate(self._stored(block))

    def _stored(self, block: GatheredBatch) -> Tensor:
        return batch_estimate_where_missing(self.table.read(block.index), block)

    def metrics(self, epoch: int) -> dict[str, float]:
        """See :class:`Normalizer`."""
        return {"gamma": self.gamma(epoch)}
