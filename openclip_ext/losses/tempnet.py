"""TempNet: temperatures predicted from the embeddings by a small network, with FastCLIP's moving averages.

Qiu et al., *To Cool or not to Cool? Temperature Network Meets Large Foundation Models via DRO*, ICML 2024; 'CLIP with a
Temperature Prediction Network' in [opt4ml]. ``e`` is the detached embedding. Each side learns a linear layer, 256 prototypes
``P`` with unit rows, and the numbers ``φ, a, b, c``::

    x = dropout_0.5(sigmoid(Linear e)),   w = softmax(x Pᵀ/exp φ),   q = sigmoid(x Pᵀ)
    τ = (a·(w·q) + b − c·mean q)/ρ,   clamped to [temperature_min, temperature_max]

The network minimizes ``mean_i τ_i·stop_grad(∂_i)``, where ``∂_i`` is the derivative of the objective with respect to ``τ_i``.

Naive float64 version: ``TempNet`` in ``tests/references/networks.py``. Page: ``docs/methods/tempnet.md``.

Example:
    >>> loss = openclip_ext.create_loss("tempnet", embed_dim=512, num_samples=len(dataset))
    >>> terms = loss(image_features, text_features, logit_scale, index=index, output_dict=True)
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.inner_optimizers import StateAdam
from openclip_ext.contrastive.seeding import generator
from openclip_ext.contrastive.similarities import anchor_chunks
from openclip_ext.contrastive.temperature import TemperatureScheme, check_bounds

_PROTOTYPES = 256
_SHARPNESS = 0.01
_DROPOUT = 0.5
_LR_DECAY = 0.9
# Number of tensors ``(2, B, d)``, and also of tensors ``(2, B, 256)``, in an update's autograd graph.
_GRAPH_TENSORS = 4


class TemperatureNetwork(nn.Module):
    """Two networks that predict τ (equations: module docstring), one per side, which are evaluated together."""

    def __init__(self, embed_dim: int, random: torch.Generator | None) -> None:
        super().__init__()
        bound = 1 / math.sqrt(embed_dim)
        self.weight = nn.Parameter(torch.empty(2, embed_dim, embed_dim).uniform_(-bound, bound, generator=random))
        self.bias = nn.Parameter(torch.empty(2, 1, embed_dim).uniform_(-bound, bound, generator=random))
        self.prototypes = nn.Parameter(torch.empty(2, _PROTOTYPES, embed_dim).normal_(generator=random))
        self.log_sharpness = nn.Parameter(torch.full((2, 1, 1), math.log(_SHARPNESS)))
        self.scale = nn.Parameter(torch.ones(2, 1))
        self.shift = nn.Parameter(torch.zeros(2, 1))
        self.mean_scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, features: Tensor, rho: float, dropout: Tensor | None) -> Tensor:
        """Predict the temperatures ``(2, B)`` of embeddings ``(2, B, d)``, before they are clamped.

        dropout: factors of the hidden layer ``(2, B, d)``, 0 or ``1/(1 − p)``. None means no dropout.
        """
        hidden = torch.sigmoid(torch.baddbmm(self.bias, features, self.weight))
        if dropout is not None:
            hidden = hidden * dropout
        scores = hidden @ nn.functional.normalize(self.prototypes, dim=2).transpose(1, 2)
        values = torch.sigmoid(scores)
        weighted = (torch.softmax(scores * (-self.log_sharpness).exp(), dim=2) * values).sum(dim=2)
        return (self.scale * weighted + self.shift - self.mean_scale * values.mean(dim=2)) / rho


class PredictedTemperature(TemperatureScheme):
    """TempNet: temperatures ``τ_k,i`` that a network predicts from the anchor's embedding.

    Adam trains the network with the learning rate ``lr_tau·0.9^epoch``. The loss of a step uses the predictions before the
    step's update.
    """

    depends_on_epoch = True
    learns_own = True
    regularized = True

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
            raise OptionError("rho", f"rho={rho}: expected rho > 0, because predicted temperatures are divided by rho")
        if lr_tau is None:
            raise OptionError("lr_tau", "lr_tau=None: expected a number, the learning rate of the temperature network")
        self.weight = rho
        self.bounds = (temperature_min, temperature_max)
        self.lr = lr_tau
        self.seed = seed
        self.network = TemperatureNetwork(embed_dim, generator("cpu", seed, "temperature network"))
        self.adam = StateAdam(self.network)

    def rho(self, epoch: int | Tensor) -> float:
        return self.weight

    def temperatures(self, batch: GatheredBatch) -> Tensor:
        """Predict temperatures from the anchors' embeddings. In training mode, use dropout."""
        return self.network(batch.features, self.weight, self._dropout_factors(batch)).clamp(*self.bounds)

    def update(self, stats: ContrastStats, gradient: Tensor) -> None:
        batch = stats.batch
        dropout = self._dropout_factors(batch)

        def objective(anchors: slice, network: Callable[..., Tensor]) -> Tensor:
            factors = None if dropout is None else dropout[:, anchors]
            tau = network(batch.features[:, anchors], self.weight, factors).clamp(*self.bounds)
            values = tau * gradient[:, anchors]
            return batch.mean(values, anchors).sum()

        elements = 2 * _GRAPH_TENSORS * (batch.features.shape[2] + _PROTOTYPES)
        parts = [partial(objective, anchors) for anchors in anchor_chunks(slice(0, batch.size), elements)]
        self.adam.step(self.network, parts, self.lr * _LR_DECAY**batch.epoch, batch.ok)

    def _dropout_factors(self, batch: GatheredBatch) -> Tensor | None:
        """Return the dropout factors of this call. Prediction and update use the same factors, on every process."""
        if not batch.learning:
            return None
        if isinstance(batch.call, Tensor):
            kept = _kept_in_a_graph(batch.features, batch.call, self.seed)
        else:
            kept = _kept(batch.features, batch.call, self.seed)
        return kept.to(batch.features.dtype).div_(1 - _DROPOUT)


def _kept(features: Tensor, call: int, seed: int) -> Tensor:
    """Return which features dropout keeps in this call, shaped like ``features``."""
    random = generator(features.device, seed, "dropout", call)
    return torch.rand(features.shape, generator=random, device=features.device) >= _DROPOUT


@torch.library.custom_op("openclip_ext::kept_by_dropout", mutates_args=())
def _kept_in_a_graph(features: Tensor, call: Tensor, seed: int) -> Tensor:
    return _kept(features, int(call), seed)


@_kept_in_a_graph.register_fake
def _(features: Tensor, call: Tensor, seed: int) -> Tensor:
    return torch.empty_like(features, dtype=torch.bool)
