"""Naive float64 references of the losses in docs/add-your-own-loss.md."""

import math

import torch
from torch import Tensor

from tests.references.contrastive import (
    FastClip,
    MovingAverage,
    StepResult,
    batch_estimates,
    leaves,
    pair_similarity,
)


class SharedAverage:
    """An estimator with one moving average for all images, and one for all texts."""

    def __init__(self, eps: float, gamma: float) -> None:
        self.eps, self.gamma = eps, gamma
        self.u: list[float | None] = [None, None]

    def update(
        self, images: Tensor, texts: Tensor, tau: list[list[float]], index: list[int], epoch: int
    ) -> list[list[float]]:
        for side, estimates in enumerate(batch_estimates(images, texts, tau, self.eps)):
            mean = sum(math.exp(alpha) for alpha in estimates) / len(estimates)
            old = self.u[side]
            self.u[side] = mean if old is None else (1 - self.gamma) * old + self.gamma * mean
        return [[math.log(u)] * len(images) for u in self.u]


class Cooling:
    """FastCLIP with a temperature that decreases from ``high`` to ``low`` by epoch."""

    def __init__(self, average: MovingAverage, low: float, high: float, epochs: int) -> None:
        self.loss, self.low, self.high, self.epochs = FastClip(average, "constant"), low, high, epochs

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        tau = self.high - (self.high - self.low) * epoch / self.epochs
        return self.loss.step(images, texts, 1 / tau, index, epoch)


class Decoupled:
    """Decoupled contrastive loss; autograd computes the gradients from the definition."""

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        images, texts, scale = leaves(images, texts, logit_scale)
        total = torch.zeros((), dtype=torch.float64)
        size = len(images)
        for side in (0, 1):
            for i in range(size):
                others = [torch.exp(scale * pair_similarity(images, texts, side, i, j)) for j in range(size) if j != i]
                total = total + (torch.log(sum(others)) - scale * (images[i] @ texts[i])) / (2 * size)
        gradients = torch.autograd.grad(total, (images, texts, scale))
        return StepResult(total.item(), gradients[0], gradients[1], gradients[2].item())
