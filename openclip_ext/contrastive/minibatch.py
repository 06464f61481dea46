"""The plain mini-batch comparison, for losses that need it only for their logs."""

import math

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


def minibatch_metrics(batch: LocalBatch) -> dict[str, float]:
    """``infonce`` and ``chance`` within this process's samples, and the temperature, as every loss reports them.

    For a loss that does not contrast each sample with all others. Waits for the device.

    Args:
        batch: the last call's, detached.
    """
    temperature = 1 / batch.logit_scale.item()
    metrics = {f"temperature_{name}": temperature for name in ("min", "median", "max")}
    if len(batch.image) < 2:
        return metrics
    contrast = contrast_minibatch(batch, gather=False)
    infonce = contrast.batch.mean(contrast.infonce).mean().item()
    return metrics | {"infonce": infonce, "chance": math.log(len(batch.image))}
