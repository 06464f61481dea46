"""Naive references of SimCLR, SogCLR and iSogCLR on two views of each image: loops over anchors, from the papers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.references.contrastive import SampleTemperatures, StepResult, by_sample, gamma_of, leaves


def negatives_of(views: list[Tensor], i: int) -> list[Tensor]:
    """Return both views of all images except image ``i``."""
    return [view[j] for view in views for j in range(len(view)) if j != i]


class TwoViews:
    """SimCLR, SogCLR or iSogCLR on projected embeddings.

    Args:
        projector: the package's projector, whose parameters are copied: Linear, ReLU, Linear.
        tau: temperature.
        average: ``(γ_min, decay_epochs or None, ε)`` of SogCLR. None means SimCLR.
        learned: ``(ρ, learning rate)`` of iSogCLR's temperatures. None means constant temperatures.
    """

    def __init__(
        self,
        projector: Any,
        tau: float,
        average: tuple[float, int | None, float] | None = None,
        learned: tuple[float, float] | None = None,
    ) -> None:
        self.learned = learned
        self.weights = [value.detach().double().clone() for value in projector.parameters()]
        self.tau = tau
        self.temperatures = SampleTemperatures(tau, (0.01, 1.0), 0.0 if learned is None else learned[1])
        self.average = average
        self.u: dict[int, float] = {}

    def _project(self, features: Tensor) -> Tensor:
        first, first_bias, second, second_bias = self.weights
        projected = torch.relu(features @ first.T + first_bias) @ second.T + second_bias
        return nn.functional.normalize(projected, dim=1)

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. ``images`` are the first views, and ``texts`` are the second views."""
        first, second = leaves(images, texts)
        views = [self._project(first), self._project(second)]
        if self.learned is not None:
            value, surrogate = self._isogclr(views, index, epoch)
        else:
            value, surrogate = self._simclr(views) if self.average is None else self._sogclr(views, index, epoch)
        gradients = torch.autograd.grad(surrogate, (first, second))
        return StepResult(value, *gradients, 0.0)

    def _simclr(self, views: list[Tensor]) -> tuple[float, Tensor]:
        """Return the mean over all views of ``−log(exp(s⁺/τ) / Σ_{z ≠ anchor} exp(s_z/τ))`` (Chen et al. 2020, Equation 1)."""
        everything = torch.cat(views)
        batch = len(views[0])
        total = torch.zeros((), dtype=torch.float64)
        for anchor in range(2 * batch):
            positive = (anchor + batch) % (2 * batch)
            others = [z for z in range(2 * batch) if z != anchor]
            denominator = sum(torch.exp(everything[anchor] @ everything[z] / self.tau) for z in others)
            share = torch.exp(everything[anchor] @ everything[positive] / self.tau) / denominator
            total = total - torch.log(share) / (2 * batch)
        return total.item(), total

    def _sogclr(self, views: list[Tensor], index: list[int], epoch: int) -> tuple[float, Tensor]:
        """Compute ``dcl`` of [opt4ml] for both views. An anchor uses its new u. An image stores the mean u of its views."""
        gamma, eps = gamma_of(epoch, *self.average[:2]), self.average[2]
        batch = len(index)
        value, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
        new = []
        for view in (0, 1):
            for i in range(batch):
                anchor, positive = views[view][i], views[1 - view][i]
                negatives = negatives_of(views, i)
                estimate = sum(math.exp((anchor @ z).item() / self.tau) for z in negatives) / len(negatives)
                old = self.u.get(index[i])
                u = estimate if old is None else (1 - gamma) * old + gamma * estimate
                new.append(u)
                value += (-(anchor @ positive).item() + self.tau * math.log(eps + u)) / (2 * batch)
                for z in negatives:
                    p = math.exp((anchor @ z).item() / self.tau) / (eps + u) / len(negatives)
                    surrogate = surrogate + p * (anchor @ z) / (2 * batch)
                surrogate = surrogate - anchor @ positive / (2 * batch)
        self.u |= by_sample(2 * index, new)
        return value, surrogate

    def _isogclr(self, views: list[Tensor], index: list[int], epoch: int) -> tuple[float, Tensor]:
        """Run [opt4ml, Algorithm 35]. Both views of an image share u (the mean of both) and a temperature learned by Adam."""
        gamma, eps = gamma_of(epoch, *self.average[:2]), self.average[2]
        batch = len(index)
        anchors = [(view, i) for view in (0, 1) for i in range(batch)]
        ells = {
            (view, i): [views[view][i] @ (z - views[1 - view][i]) for z in negatives_of(views, i)]
            for view, i in anchors
        }
        tau = self.temperatures.of(index)
        new = []
        for view, i in anchors:
            estimate = eps + sum(math.exp(ell.item() / tau[i]) for ell in ells[view, i]) / len(ells[view, i])
            old = self.u.get(index[i])
            new.append(estimate if old is None else (1 - gamma) * old + gamma * estimate)
        self.u |= by_sample(2 * index, new)
        value, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
        slopes = []
        for view, i in anchors:
            u, t = self.u[index[i]], tau[i]
            terms = [math.exp(ell.item() / t) / len(ells[view, i]) for ell in ells[view, i]]
            value += t * ((eps + sum(terms)) / u + math.log(u) + self.learned[0] - 1) / (2 * batch)
            for term, ell in zip(terms, ells[view, i], strict=True):
                surrogate = surrogate + term / u * ell / (2 * batch)
            mean_ell = sum(term * ell.item() / t for term, ell in zip(terms, ells[view, i], strict=True)) / u
            slopes.append(math.log(u) + self.learned[0] - mean_ell)
        self.temperatures.learn(2 * index, slopes, epoch)
        return value, surrogate
