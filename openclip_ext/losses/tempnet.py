"""Temperatures predicted from the embeddings by a small network: TempNet."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.inner_optimizers import InnerAdam
from openclip_ext.contrastive.seeding import generator
from openclip_ext.contrastive.similarities import anchor_chunks
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds

_PROTOTYPES = 256
_SHARPNESS = 0.01
_DROPOUT = 0.5
_LR_DECAY = 0.9
# So many tensors of the embedding's width, and of the prototypes' number, has the graph of an update.
_GRAPH_TENSORS = 4


class TemperatureNetwork(nn.Module):
    """``τ = (a·(w·q) + b − c·mean(q))/ρ`` for both sides: one network each, evaluated together.

    ``x = dropout(sigmoid(Linear e))``, ``w = softmax(x P̂ᵀ / exp φ)``, ``q = sigmoid(x P̂ᵀ)`` with 256 prototypes, rows
    normalised.
    """

    def __init__(self, embed_dim: int, random: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(embed_dim)
        self.weight = nn.Parameter(torch.empty(2, embed_dim, embed_dim).uniform_(-bound, bound, generator=random))
        self.bias = nn.Parameter(torch.empty(2, 1, embed_dim).uniform_(-bound, bound, generator=random))
        self.prototypes = nn.Parameter(torch.empty(2, _PROTOTYPES, embed_dim).normal_(generator=random))
        self.log_sharpness = nn.Parameter(torch.full((2, 1, 1), math.log(_SHARPNESS)))
        self.scale = nn.Parameter(torch.ones(2, 1))
        self.shift = nn.Parameter(torch.zeros(2, 1))
        self.mean_scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, features: Tensor, rho: float, keep: Tensor | None) -> Tensor:
        """``(2, B, d)`` to ``(2, B)``.

        Args:
            features: embeddings.
            rho: ρ.
            keep: ``(2, B, d)`` bool, what dropout leaves; None: no dropout.
        """
        hidden = torch.sigmoid(torch.baddbmm(self.bias, features, self.weight))
        if keep is not None:
            hidden = hidden * keep / (1 - _DROPOUT)
        scores = hidden @ nn.functional.normalize(self.prototypes, dim=2).transpose(1, 2)
        values = torch.sigmoid(scores)
        weighted = (torch.softmax(scores / self.log_sharpness.exp(), dim=2) * values).sum(dim=2)
        return (self.scale * weighted + self.shift - self.mean_scale * values.mean(dim=2)) / rho


class PredictedTemperature(TemperatureScheme):
    """TempNet: ``τ_k,i`` from the anchor's own embedding, which is detached.

    Minimises ``Σ_k mean_i τ_k,i·stop_grad(∂objective/∂τ_k,i)`` with Adam, learning rate ``lr_tau·0.9^epoch``. A step uses the
    temperatures as they were before its update.

    Args:
        embed_dim: width ``d`` of the embeddings.
        rho: ρ, positive.
        temperature_min, temperature_max: bounds.
        lr_tau: Adam's learning rate in epoch 0.
        seed: of the start values and of the dropout.
    """

    learns_own = True

    def __init__(
        self,
        *,
        embed_dim: int,
        rho: float,
        temperature_min: float,
        temperature_max: float,
        lr_tau: float | None,
        seed: int,
    ) -> None:
        super().__init__()
        check_bounds(temperature_min, temperature_max)
        if rho <= 0:
            raise ValueError(f"rho={rho}: predicted temperatures are divided by it and need a positive one")
        if lr_tau is None:
            raise ValueError("lr_tau=None: the network that predicts temperatures needs a learning rate of its own")
        self.weight = rho
        self.bounds = (temperature_min, temperature_max)
        self.lr = lr_tau
        self.seed = seed
        self.network = TemperatureNetwork(embed_dim, generator("cpu", seed, "temperature network"))
        self.adam = InnerAdam(self.network)

    def rho(self, epoch: int) -> float:
        """See :class:`TemperatureScheme`."""
        return self.weight

    def temperatures(self, block: GatheredBatch) -> Tensor:
        """See :class:`TemperatureScheme`."""
        return self._bounded(block.features, self._kept(block))

    def update(self, block: GatheredBatch, gradient: Tensor) -> None:
        """See :class:`TemperatureScheme`."""
        keep = self._kept(block)

        def objective(anchors: slice) -> Tensor:
            """These anchors' part of the mean over all."""
            kept = None if keep is None else keep[:, anchors]
            values = self._bounded(block.features[:, anchors], kept) * gradient[:, anchors]
            return block.mean(values, anchors).sum()

        width = _GRAPH_TENSORS * (block.features.shape[2] + _PROTOTYPES)
        parts = [partial(objective, anchors) for anchors in anchor_chunks(slice(0, block.size), width)]
        self.adam.step(self.network, parts, self.lr * _LR_DECAY**block.epoch, block.ok)

    def _bounded(self, features: Tensor, keep: Tensor | None) -> Tensor:
        return self.network(features, self.weight, keep).clamp(*self.bounds)

    def _kept(self, block: GatheredBatch) -> Tensor | None:
        """What dropout leaves in this call: the same on every process, and again in the update."""
        if not block.learning:
            return None
        device = block.features.device
        random = generator(device, self.seed, "dropout", block.call)
        return torch.rand(block.features.shape, generator=random, device=device) >= _DROPOUT
