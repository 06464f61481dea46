"""SCENT: FastCLIP-v3 with a moving average whose weight γ depends on each sample's normalizer.

Wei et al., *A Geometry-Aware Efficient Algorithm for Compositional Entropic Risk Minimization*, ICML 2026, arXiv:2602.02877.
Each anchor's loss has the dual ``min_ν exp(−ν)(ε + g) + ν`` with ``u = exp(ν)``. For each batch, SCENT makes one step of
proximal mirror descent on the dual, with the Bregman divergence of ``exp(−ν)`` and the step size ``exp(κ)``::

    u_i ← (1−γ_i)·u_i + γ_i·(ε + g_i(batch)),    γ_i = sigmoid(log u_i + κ),    α_i = log of the new u_i

So a large normalizer ``u_i`` follows the last estimate closely, and a small ``u_i`` is an average over more epochs.

Naive float64 version: ``Scent`` in ``tests/references/contrastive.py``. Page: ``docs/methods/fastclip.md``.

Example:
    >>> loss = openclip_ext.create_loss("scent", num_samples=len(dataset))
    >>> terms = loss(image_features, text_features, logit_scale, index=index, output_dict=True)
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.losses.fastclip import SampleAverages

_QUANTILES = (0.05, 0.5, 0.95)


class ScentNormalizer(SampleAverages):
    """``u_i ← (1−γ_i)·u_i + γ_i·(ε + g_i(batch))``, where ``γ_i = sigmoid(log u_i + κ)`` with the stored ``u_i``."""

    def __init__(self, *, num_samples: int, kappa: float) -> None:
        super().__init__(num_samples)
        self.kappa = kappa
        # Logits of the last step's γ, and a mask of the valid samples. Only logs use them, so they are not saved.
        self._last: tuple[Tensor, Tensor] | None = None

    def averaged(self, stats: ContrastStats) -> Tensor:
        log_u = self.stored(stats)
        logit = log_u + self.kappa
        self._last = logit, stats.batch.valid
        # This uses log γ and log(1−γ), because γ and 1−γ may round to 0.
        return torch.logaddexp(logsigmoid(-logit) + log_u, logsigmoid(logit) + stats.log_estimate)

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return quantiles of γ in the last step. A new sample's γ depends on its first u. Synchronizes with the device."""
        if self._last is None:
            return {}
        logit, valid = self._last
        gamma = logit[:, valid].sigmoid().double()
        if not gamma.numel():
            return {}
        quantiles = torch.quantile(gamma, gamma.new_tensor(_QUANTILES)).tolist()
        return {f"gamma_q{round(100 * q)}": value for q, value in zip(_QUANTILES, quantiles, strict=True)}
