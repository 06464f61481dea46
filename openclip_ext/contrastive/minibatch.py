"""The plain mini-batch comparison, for losses that need it only for their logs."""

import torch

from openclip_ext.contrastive.batch import Contrast, LocalBatch, gather_batch
from openclip_ext.contrastive.estimands import NegativesMean
from openclip_ext.contrastive.loss import without_autocast
from openclip_ext.contrastive.similarities import Similarities
from openclip_ext.contrastive.temperature import global_temperatures


@torch.no_grad()
def contrast_minibatch(batch: LocalBatch, gather: bool) -> Contrast:
    """Contrast a batch at the model's temperature.

    Args:
        batch: this process's samples.
        gather: whether to take all processes' samples, or this process's own only.
    """
    with without_autocast(batch.image):
        gathered = gather_batch(batch, None, gather)
        similarities = Similarities(gathered, global_temperatures(gathered))
        return Contrast(gathered, similarities.tau, similarities.log_sums(), NegativesMean(eps=0.0))
