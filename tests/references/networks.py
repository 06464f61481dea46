"""Naive references of AmorLIP (Algorithm 1) and TempNet with ``torch.nn`` and Adam, without the package's code.

Initial values are random, so the tests copy them from the package's loss.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from tests.references.contrastive import (
    MovingAverage,
    StepResult,
    differentiate_hard,
    encoder_gradients,
    hard_terms,
    inner,
    leaves,
    negatives,
    pair_similarity,
    positive,
    robust_mean,
    robust_slopes,
)
from tests.references.prototypes import unified_step


class Mlp(nn.Module):
    """AmorLIP's released network: Linear, ReLU, LayerNorm, Linear, ReLU, LayerNorm; add the input; ReLU, Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, hidden),
            nn.ReLU(),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, width),
            nn.ReLU(),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, 1)
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, d) to log λ (B,)."""
        return self.head(torch.relu(self.body(features) + features)).squeeze(-1)


def log_partition(images: Tensor, texts: Tensor, scale: float, side: int, i: int, negatives_only: bool) -> float:
    """Return log Z_i = log (1/B) Σ_j exp(c·s_ij).

    The sum includes the positive pair unless ``negatives_only`` is set. The divisor is always B.
    """
    others = negatives(i, len(images))
    total = sum(
        math.exp(scale * pair_similarity(images, texts, side, i, j).item())
        for j in (others if negatives_only else [i, *others])
    )
    return math.log(total / (len(others) + 1))


def amortization_loss(
    name: str, log_lambda: Tensor, log_target: float, log_batch: float, tau: float, l2_log_weight: float
) -> Tensor:
    """Return a fitting loss of one anchor: AmorLIP (8), (9) or (10), or NeuCLIP (12) if ``name`` is ``unified``."""
    squared = 0.5 * (log_lambda - log_target) ** 2
    ratio = torch.exp(log_target - log_lambda)
    weight = math.exp(log_batch - log_target)
    if name == "l2-log":
        return squared
    if name == "kl":
        return weight * (ratio * torch.log(ratio) - ratio + 1) + l2_log_weight * squared
    if name == "kl-printed":
        return weight * ratio * torch.log(ratio) + l2_log_weight * squared
    if name == "js":
        middle = (ratio + 1) * torch.log((ratio + 1) / 2)
        return weight * 0.5 * (ratio * torch.log(ratio) - middle) + l2_log_weight * squared
    return tau * (ratio + log_lambda)


@dataclass
class AmortizedPartition:
    """AmorLIP's Algorithm 1 without the encoders: networks, target networks, and the target networks of the last epoch."""

    networks: list[Mlp]
    _: KW_ONLY
    normalizer_updates: int
    normalizer_lr: float
    fit_every: int
    target_every: int
    ema_decay: float
    previous_weight: float
    epochs: int
    fresh: Callable[[int], list[Mlp]] | None
    normalizer_objective: str = "l2-log"
    l2_log_weight: float = 0.1
    epoch: int = 0
    k: int = 0

    def __post_init__(self) -> None:
        self._begin(self.networks)
        self.previous = copy.deepcopy(self.networks)

    def _begin(self, networks: list[Mlp]) -> None:
        self.online = copy.deepcopy(networks)
        self.target = copy.deepcopy(networks)
        self.adam = [torch.optim.Adam(network.parameters(), lr=self.normalizer_lr) for network in self.online]

    def start_epoch(self, epoch: int) -> None:
        """Run line 4 of Algorithm 1."""
        self.previous = copy.deepcopy(self.target)
        if self.fresh is not None:
            self._begin(self.fresh(epoch))
        self.epoch, self.k = epoch, 0

    def step(self, images: Tensor, texts: Tensor, scale: float, log_z: list[list[float]]) -> None:
        """Run lines 6 to 8 of Algorithm 1 on a batch with the estimates ``log_z``."""
        if self.k % self.fit_every == 0:
            for _ in range(self.normalizer_updates):
                self._fit(images, texts, scale, log_z)
        if self.k % self.target_every == 0:
            for online, target in zip(self.online, self.target, strict=True):
                for value, average in zip(online.parameters(), target.parameters(), strict=True):
                    average.data = self.ema_decay * average.data + (1 - self.ema_decay) * value.data
        self.k += 1

    def _fit(self, images: Tensor, texts: Tensor, scale: float, log_z: list[list[float]]) -> None:
        beta = self.previous_weight
        beta = beta - 0.5 * beta * (1 + math.cos(math.pi * self.epoch / self.epochs))
        for side, features in enumerate((images, texts)):
            log_lambda = self.online[side](features)
            old = self.previous[side](features).detach()
            total = torch.zeros((), dtype=torch.float64)
            for i in range(len(features)):
                combined = math.log(beta * math.exp(old[i].item()) + (1 - beta) * math.exp(log_z[side][i]))
                total = total + amortization_loss(
                    self.normalizer_objective, log_lambda[i], combined, log_z[side][i], 1 / scale, self.l2_log_weight
                )
            self.adam[side].zero_grad()
            (total / len(features)).backward()
            self.adam[side].step()

    def log_lambda(self, images: Tensor, texts: Tensor) -> list[list[float]]:
        """Return the predictions of the target networks for both sides."""
        with torch.no_grad():
            return [self.target[0](images).tolist(), self.target[1](texts).tolist()]


class AmorLip:
    """AmorLIP. Stage I uses the global batch. Stage II splits it into ``blocks``, one per process (1 if it is gathered)."""

    def __init__(
        self, amortized: AmortizedPartition, rho: float, negatives_only: bool = False, blocks: int = 1
    ) -> None:
        self.amortized, self.rho, self.negatives_only, self.blocks = amortized, rho, negatives_only, blocks

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. The value and the gradients are means over the blocks."""
        if epoch != self.amortized.epoch:
            self.amortized.start_epoch(epoch)
        log_z = [
            [log_partition(images, texts, logit_scale, k, i, self.negatives_only) for i in range(len(images))]
            for k in (0, 1)
        ]
        self.amortized.step(images, texts, logit_scale, log_z)
        images, texts, scale = leaves(images, texts, logit_scale)
        size = len(images) // self.blocks
        total = torch.zeros((), dtype=torch.float64)
        for block in range(self.blocks):
            part = slice(block * size, (block + 1) * size)
            total = total + self._stage_two(images[part], texts[part], scale) / self.blocks
        differentiate_hard(total)
        gradients = torch.autograd.grad(total, (images, texts, scale))
        return StepResult(total.item(), *gradients[:2], gradients[2].item())

    def _stage_two(self, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        """Return ½(ℓ/stop_grad(c) + ρ/c), where c is the logit scale and ℓ is AmorLIP (6)."""
        size = len(images)
        log_lambda = self.amortized.log_lambda(images, texts)
        ell = torch.zeros((), dtype=torch.float64)
        for i in range(size):
            ell = ell - 2 * scale * (images[i] @ texts[i]) / size
            pairs = [i, *negatives(i, size)]
            for k in (0, 1):
                denominator = math.exp(log_lambda[k][i])
                if self.negatives_only:
                    denominator += math.exp((scale * (images[i] @ texts[i])).item()) / len(pairs)
                cosines = [pair_similarity(images, texts, k, i, j) for j in pairs]
                hard = hard_terms(images[i]) if k == 0 else []
                if hard:  # they are terms of the partition function, too
                    more = sum(torch.exp(scale * cosine) for cosine in hard).item()
                    denominator = (len(pairs) * denominator + more) / (len(pairs) + len(hard))
                for cosine in (*cosines, *hard):
                    ell = ell + torch.exp(scale * cosine) / denominator / (len(pairs) + len(hard)) / size
        return 0.5 * (ell / scale.detach() + self.rho / scale)


class NeuClipMlp:
    """NeuCLIP's equation (12) with α = log λ(e) − c·s_ii, where a network log λ is fitted to log(ε+g) + c·s_ii."""

    def __init__(self, amortized: AmortizedPartition, eps: float, rho: float) -> None:
        self.amortized, self.eps, self.rho = amortized, eps, rho

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. The logit scale is c = 1/τ."""
        if epoch != self.amortized.epoch:
            self.amortized.start_epoch(epoch)
        tau, batch = 1 / logit_scale, len(images)
        s_ii = [[positive(images, texts, k, i) for i in range(batch)] for k in (0, 1)]
        log_z = [
            [
                math.log(self.eps + inner(images, texts, tau, k, i).item()) + s_ii[k][i].item() / tau
                for i in range(batch)
            ]
            for k in (0, 1)
        ]
        self.amortized.step(images, texts, logit_scale, log_z)
        log_lambda = self.amortized.log_lambda(images, texts)
        alpha = [[log_lambda[k][i] - s_ii[k][i] / tau for i in range(batch)] for k in (0, 1)]
        return unified_step(images, texts, logit_scale, lambda images, texts, tau: alpha, self.eps, self.rho, False)


class TemperatureNet(nn.Module):
    """TempNet's network for one side: it predicts a temperature for each embedding."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.prototypes = nn.Parameter(torch.zeros(number, width))
        self.phi = nn.Parameter(torch.tensor(math.log(0.01)))
        self.a = nn.Parameter(torch.tensor(1.0))
        self.b = nn.Parameter(torch.tensor(0.0))
        self.c = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, features: Tensor, keep: Tensor, rho: float, bounds: tuple[float, float]) -> Tensor:
        """Map features (B, d) and the dropout mask ``keep`` (B, d) to temperatures (B,)."""
        x = torch.sigmoid(self.linear(features)) * keep * 2
        scores = x @ (self.prototypes / self.prototypes.norm(dim=1, keepdim=True)).T
        w = torch.softmax(scores / torch.exp(self.phi), dim=1)
        q = torch.sigmoid(scores)
        tau = (self.a * (w * q).sum(dim=1) + self.b - self.c * q.mean(dim=1)) / rho
        return tau.clamp(*bounds)


@dataclass
class TempNet:
    """SogCLR's estimator with predicted temperatures. ``keep(call, B)`` returns the dropout masks (2, B, d) of a call."""

    networks: list[TemperatureNet]
    estimator: MovingAverage
    _: KW_ONLY
    rho: float
    bounds: tuple[float, float]
    lr: float
    keep: Callable[[int, int], Tensor]
    calls: int = 0

    def __post_init__(self) -> None:
        self.adam = [torch.optim.Adam(network.parameters()) for network in self.networks]

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. The logit scale has no effect."""
        keep = self.keep(self.calls, len(images)).double()
        self.calls += 1
        predicted = [
            self.networks[k](features, keep[k], self.rho, self.bounds) for k, features in enumerate((images, texts))
        ]
        tau = [side.tolist() for side in predicted]
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        value = robust_mean(images, texts, tau, alpha, self.estimator.eps, self.rho)
        for k, slopes in enumerate(robust_slopes(images, texts, tau, alpha, self.rho)):
            for group in self.adam[k].param_groups:
                group["lr"] = self.lr * 0.9**epoch
            self.adam[k].zero_grad()
            (predicted[k] * torch.tensor(slopes, dtype=torch.float64)).mean().backward()
            self.adam[k].step()
        return StepResult(value, *gradients, 0.0)
