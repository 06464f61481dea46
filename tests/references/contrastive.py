"""Naive references of the global contrastive losses: float64 loops from the papers' equations, without the package's code.

``step(images, texts, logit_scale, index, epoch)`` of a reference corresponds to one call of a loss. It returns the value and
the gradients with respect to images, texts and logit scale. Images and texts are float64 ``(B, d)``. Side k is 0 for image
anchors and 1 for text anchors. s_ij is the similarity of anchor i with sample j of the other modality.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# One number per anchor: a list for the image anchors, and a list for the text anchors.
Sides = list[list[float]]


@dataclass
class StepResult:
    """The result of a reference's step: the value and the three gradients."""

    value: float
    images: Tensor
    texts: Tensor
    logit_scale: float


def pair_similarity(images: Tensor, texts: Tensor, side: int, i: int, j: int) -> Tensor:
    """Return s_ij: the similarity of anchor ``i`` (side 0: an image, 1: a text) with sample ``j`` of the other modality."""
    return images[i] @ texts[j] if side == 0 else images[j] @ texts[i]


@dataclass
class EqualCaptions:
    """Treatment of equal captions (negative, mask or positive: docs/equal-captions.md), and the caption labels of a step."""

    choice: str
    labels: list[int]


_equal_captions = EqualCaptions("negative", [])


def equal_captions(choice: str, labels: list[int]) -> Any:
    """Set how all references treat equal captions within this context. Equal ``labels`` mean equal captions."""
    return mock.patch(f"{__name__}._equal_captions", EqualCaptions(choice, labels))


_unique = itertools.count(-1, -1)


def labels(batch: int) -> list[int]:
    """Return the labels of a batch. If equal captions are negatives, no two samples of a run have equal labels."""
    return [next(_unique) for _ in range(batch)] if _equal_captions.choice == "negative" else _equal_captions.labels


def negatives(i: int, batch: int) -> list[int]:
    """Return N_i: the positions of the negatives of anchor ``i``."""
    names = labels(batch)
    return [j for j in range(batch) if j != i and names[j] != names[i]]


def positive(images: Tensor, texts: Tensor, side: int, i: int) -> Tensor:
    """Return s_ii. If equal captions count as positives, return the mean of s_ij over the positives P_i instead."""
    if _equal_captions.choice != "positive":
        return images[i] @ texts[i]
    labels = _equal_captions.labels
    equal = [j for j in range(len(images)) if labels[j] == labels[i]]
    return sum(pair_similarity(images, texts, side, i, j) for j in equal) / len(equal)


def inner(images: Tensor, texts: Tensor, tau: Tensor | float, side: int, i: int) -> Tensor:
    """Return g_k(w, τ; i, B), defined below NeuCLIP (1): the mean of exp((s_ij − s_ii)/τ) over the negatives j."""
    others = negatives(i, len(images))
    total = torch.zeros((), dtype=torch.float64)
    for j in others:
        difference = pair_similarity(images, texts, side, i, j) - positive(images, texts, side, i)
        total = total + torch.exp(difference / tau)
    return total / len(others)


_hard_negatives: Tensor | None = None


@contextlib.contextmanager
def hard_negatives(texts: Tensor | None) -> Iterator[Tensor | None]:
    """Within this context, ``texts`` ``(H, d)`` are additional negatives of all images. Yields a leaf that gets a gradient."""
    leaf = None if texts is None else texts.detach().clone().requires_grad_()
    with mock.patch(f"{__name__}._hard_negatives", leaf):
        yield leaf


def add_hard(images: Tensor, texts: Tensor, tau: Tensor | float, side: int, i: int, mean: Tensor) -> Tensor:
    """Return a mean of exp((s_ij − s_ii)/τ) over the negatives, with the hard negatives added to its terms."""
    if side == 1 or _hard_negatives is None:
        return mean
    count, s_ii = len(negatives(i, len(images))), positive(images, texts, 0, i)
    more = [torch.exp((similarity - s_ii) / tau) for similarity in hard_terms(images[i])]
    return (count * mean + sum(more)) / (count + len(more))


def hard_terms(image: Tensor) -> list[Tensor]:
    """Return an image's similarities to the hard negatives."""
    return [] if _hard_negatives is None else [image @ text for text in _hard_negatives]


def alpha_with_hard(images: Tensor, texts: Tensor, tau: Sides, alpha: Sides) -> Sides:
    """Return log-normalizers with the hard negatives added to the terms of their means."""
    if _hard_negatives is None:
        return alpha
    pairs = [(k, i, torch.tensor(alpha[k][i], dtype=torch.float64).exp()) for k in (0, 1) for i in range(len(images))]
    found = [add_hard(images, texts, tau[k][i], k, i, u).log().item() for k, i, u in pairs]
    return [found[: len(images)], found[len(images) :]]


def differentiate_hard(total: Tensor) -> None:
    """Add the gradient of ``total`` to the hard negatives' leaf, if there is one. The graph is kept."""
    if _hard_negatives is not None:
        torch.autograd.backward(total, inputs=[_hard_negatives], retain_graph=True)


def leaves(*tensors: Tensor | float) -> list[Tensor]:
    """Return float64 copies that require gradients."""
    return [torch.as_tensor(tensor, dtype=torch.float64).detach().clone().requires_grad_() for tensor in tensors]


def batch_estimates(images: Tensor, texts: Tensor, tau: Sides, eps: float) -> Sides:
    """Return the mini-batch estimate log(ε + g) of every anchor."""
    return [
        [math.log(eps + inner(images, texts, tau[side][i], side, i).item()) for i in range(len(images))]
        for side in (0, 1)
    ]


def exact_log_normalizers(
    images: Tensor, texts: Tensor, anchors: list[int], tau: Tensor, eps: float, batch: int | None = None
) -> Tensor:
    """Return log(ε + g_i(S)) [NeuCLIP 9] of anchors, ``(2, A)``; with a ``batch`` size B, log((1 + (B−1)·g_i(S))/B)."""
    images, texts = images.double(), texts.double()
    result = torch.zeros(2, len(anchors), dtype=torch.float64)
    for side in (0, 1):
        for number, i in enumerate(anchors):
            g = inner(images, texts, tau[side, number].item(), side, i).item()
            result[side, number] = math.log(eps + g if batch is None else (1 + (batch - 1) * g) / batch)
    return result


def encoder_gradients(
    images: Tensor, texts: Tensor, tau: Sides, alpha: Sides, multiply_by_tau: bool = True
) -> tuple[Tensor, Tensor]:
    """Return ½ Σ_k mean_i τ_i·exp(−α_k,i)·∇g_k,i for images and texts [NeuCLIP 4]; ``multiply_by_tau=False`` omits τ_i."""
    alpha = alpha_with_hard(images, texts, tau, alpha)
    images, texts = leaves(images, texts)
    total = torch.zeros((), dtype=torch.float64)
    for side in (0, 1):
        for i in range(len(images)):
            factor = tau[side][i] if multiply_by_tau else 1.0
            weight = factor * math.exp(-alpha[side][i])
            g = add_hard(images, texts, tau[side][i], side, i, inner(images, texts, tau[side][i], side, i))
            total = total + 0.5 * weight * g / len(images)
    differentiate_hard(total)
    return torch.autograd.grad(total, (images, texts))


def mean(sides: Sides | list[list[Tensor]]) -> float | Tensor:
    """Return the mean over the anchors of each side, averaged over both sides."""
    return 0.5 * sum(sum(side) / len(side) for side in sides)


def robust_mean(images: Tensor, texts: Tensor, tau: Sides, alpha: Sides, eps: float, rho: float) -> float:
    """Return the robust objective: the mean over anchors of τ·((ε + g)/u + log u + ρ − 1), where u = exp(α)."""

    alpha = alpha_with_hard(images, texts, tau, alpha)

    def of_anchor(k: int, i: int) -> float:
        g = inner(images, texts, tau[k][i], k, i)
        estimate = eps + add_hard(images, texts, tau[k][i], k, i, g).item()
        return tau[k][i] * (math.exp(-alpha[k][i]) * estimate + alpha[k][i] + rho - 1)

    return mean([[of_anchor(k, i) for i in range(len(images))] for k in (0, 1)])


def robust_slopes(images: Tensor, texts: Tensor, tau: Sides, alpha: Sides, rho: float) -> Sides:
    """Return each derivative of a term of :func:`robust_mean` with respect to its τ, at constant u [opt4ml, Algorithm 35]."""

    alpha = alpha_with_hard(images, texts, tau, alpha)

    def of_anchor(k: int, i: int) -> float:
        s_ii, t, u = positive(images, texts, k, i), tau[k][i], math.exp(alpha[k][i])
        ells = [(pair_similarity(images, texts, k, i, j) - s_ii).item() for j in negatives(i, len(images))]
        ells += [(similarity - s_ii).item() for similarity in hard_terms(images[i])] if k == 0 else []
        return math.log(u) + rho - sum(math.exp(ell / t) * ell / t for ell in ells) / (u * len(ells))

    return [[of_anchor(k, i) for i in range(len(images))] for k in (0, 1)]


def gamma_of(epoch: int, gamma: float, decay_epochs: int | None) -> float:
    """Return γ in an epoch [opt4ml, "Scheduler of γ"]. If ``decay_epochs`` is None, γ is constant."""
    if decay_epochs is None or epoch >= decay_epochs:
        return gamma
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma) + gamma


def by_sample(index: list[int], values: list[float]) -> dict[int, float]:
    """Map each sample to its value. If a sample occurs several times in a batch, map it to the mean of its values."""
    found: dict[int, list[float]] = {}
    for sample, value in zip(index, values, strict=True):
        found.setdefault(sample, []).append(value)
    return {sample: sum(own) / len(own) for sample, own in found.items()}


class MovingAverage:
    """The moving average u of NeuCLIP (3). It stores u itself, not log u: one number per sample and side."""

    def __init__(self, eps: float, gamma: float, decay_epochs: int | None) -> None:
        self.eps, self.gamma, self.decay_epochs = eps, gamma, decay_epochs
        self.u: list[dict[int, float]] = [{}, {}]

    def update(self, images: Tensor, texts: Tensor, tau: Sides, index: list[int], epoch: int) -> Sides:
        """Update u of the samples in a batch; return α = log u of every anchor."""
        for side in (0, 1):
            new = []
            for i, sample in enumerate(index):
                estimate = self.eps + inner(images, texts, tau[side][i], side, i).item()
                u = self.u[side].get(sample)
                new.append(estimate if u is None else self.next_u(u, estimate, epoch))
            self.u[side] |= by_sample(index, new)
        return [[math.log(self.u[side][sample]) for sample in index] for side in (0, 1)]

    def next_u(self, u: float, estimate: float, epoch: int) -> float:
        """Return the new u for an old u and a batch's estimate ε + g."""
        gamma = gamma_of(epoch, self.gamma, self.decay_epochs)
        return (1 - gamma) * u + gamma * estimate


class Scent(MovingAverage):
    """SCENT's proximal step for the divergence of exp(−ν). Its result is u·(1 + η·(ε+g))/(1 + η·u), where η = exp(κ)."""

    def __init__(self, eps: float, kappa: float) -> None:
        super().__init__(eps, gamma=0.0, decay_epochs=None)
        self.eta = math.exp(kappa)

    def next_u(self, u: float, estimate: float, epoch: int) -> float:
        return u * (1 + self.eta * estimate) / (1 + self.eta * u)


class MiniBatch:
    """The estimator α = log(ε + g), which has no state."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def update(self, images: Tensor, texts: Tensor, tau: Sides, index: list[int], epoch: int) -> Sides:
        return batch_estimates(images, texts, tau, self.eps)


class FastClip:
    """SogCLR and FastCLIP-v0, -v1 and -v3. ``kind`` is ``constant`` (τ), ``global`` (learned τ) or ``unscaled`` (v0)."""

    def __init__(self, estimator: MovingAverage | MiniBatch, kind: str, rho: float = 0.0) -> None:
        self.estimator, self.kind, self.rho = estimator, kind, rho

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step with the temperature ``1/logit_scale``."""
        tau, batch = 1 / logit_scale, len(images)
        taus = [[tau] * batch] * 2
        alpha = self.estimator.update(images, texts, taus, index, epoch)
        gradients = encoder_gradients(images, texts, taus, alpha, multiply_by_tau=self.kind != "unscaled")
        if self.kind == "unscaled":
            (variable,) = leaves(tau)
            alpha = alpha_with_hard(images, texts, taus, alpha)
            g = [
                [add_hard(images, texts, variable, k, i, inner(images, texts, variable, k, i)) for i in range(batch)]
                for k in (0, 1)
            ]
            total = mean([[g[k][i] * math.exp(-alpha[k][i]) for i in range(batch)] for k in (0, 1)])
            value, in_tau = total.item(), torch.autograd.grad(total, variable)[0].item()
        else:
            rho = self.rho if self.kind == "global" else 1.0
            value = robust_mean(images, texts, taus, alpha, self.estimator.eps, rho)
            # FastCLIP (13), averaged over both sides.
            in_tau = 0.0 if self.kind == "constant" else mean(robust_slopes(images, texts, taus, alpha, rho))
        return StepResult(value, *gradients, -(tau**2) * in_tau)


class InfoNce:
    """OpenCLIP's loss: the mean of ``−log softmax`` over anchors. ``constant`` is a temperature; None means the model's."""

    def __init__(self, constant: float | None) -> None:
        self.constant = constant

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. This loss has no state."""
        images, texts, scale = leaves(images, texts, 1 / self.constant if self.constant else logit_scale)
        value = torch.zeros((), dtype=torch.float64)
        for side in (0, 1):
            for i in range(len(images)):
                is_mean = _equal_captions.choice == "positive"  # mean of the log-softmax over P_i
                pairs = range(len(images)) if is_mean else [i, *negatives(i, len(images))]
                row = [pair_similarity(images, texts, side, i, j) * scale for j in pairs]
                row += [similarity * scale for similarity in hard_terms(images[i])] if side == 0 else []
                own = positive(images, texts, side, i) * scale
                value = value - 0.5 * (own - torch.logsumexp(torch.stack(row), 0)) / len(images)
        differentiate_hard(value)
        in_images, in_texts, in_scale = torch.autograd.grad(value, (images, texts, scale))
        return StepResult(value.item(), in_images, in_texts, 0.0 if self.constant else in_scale.item())


class SampleTemperatures:
    """One temperature per sample, which Adam learns [opt4ml, Algorithm 35]."""

    def __init__(self, start: float, bounds: tuple[float, float], lr: float) -> None:
        self.start, self.bounds, self.lr = start, bounds, lr
        self.tau: dict[int, float] = {}
        self.moments: dict[int, tuple[float, float]] = {}

    def of(self, index: list[int]) -> list[float]:
        """Return the temperature of each sample in ``index``."""
        return [self.tau.get(sample, self.start) for sample in index]

    def learn(self, index: list[int], slopes: list[float], epoch: int) -> None:
        """Update the temperature of each sample once. If a sample occurs several times, use its mean slope."""
        beta1, beta2 = (0.9, 0.999) if epoch > 0 else (0.0, 0.0)
        for sample, slope in by_sample(index, slopes).items():
            gradient = max(-5.0, min(5.0, slope))
            first, second = self.moments.get(sample, (0.0, 0.0))
            first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
            self.moments[sample] = (first, second)
            step = (first / (1 - beta1 ** (epoch + 1))) / (math.sqrt(second / (1 - beta2 ** (epoch + 1))) + 1e-8)
            tau = self.tau.get(sample, self.start) - self.lr * step
            self.tau[sample] = max(self.bounds[0], min(self.bounds[1], tau))


class PerSample:
    """iSogCLR and FastCLIP-v2: SogCLR with a learned temperature per sample."""

    def __init__(
        self, estimator: MovingAverage, rho: float, start: float, bounds: tuple[float, float], lr: float
    ) -> None:
        self.estimator, self.rho = estimator, rho
        self.temperatures = [SampleTemperatures(start, bounds, lr) for _ in range(2)]

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. The logit scale has no effect."""
        tau = [side.of(index) for side in self.temperatures]
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        value = robust_mean(images, texts, tau, alpha, self.estimator.eps, self.rho)
        for side, slopes in enumerate(robust_slopes(images, texts, tau, alpha, self.rho)):
            self.temperatures[side].learn(index, slopes, epoch)
        return StepResult(value, *gradients, 0.0)


class Solved:
    """SogCLR with a temperature τ that solves ``KL(softmax(s_i/τ) ‖ uniform) = ρ`` over the ``m`` newest embeddings.

    All anchors share τ, and each step moves log τ by a hundredth of its distance to the solution.
    """

    def __init__(self, estimator: MovingAverage, rho: float, m: int) -> None:
        self.estimator, self.rho, self.m = estimator, rho, m
        self.log_tau: float | None = None
        self.newest: list[tuple[Tensor, Tensor, int]] = []

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. The first call's logit scale is the initial 1/τ."""
        batch, eps = len(images), self.estimator.eps
        self.log_tau = -math.log(logit_scale) if self.log_tau is None else self.log_tau
        tau = [[math.exp(self.log_tau)] * batch] * 2
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        value = robust_mean(images, texts, tau, alpha, eps, rho=1.0)
        if len(self.newest) == self.m:
            anchors = [(k, i) for k in (0, 1) for i in range(batch)]
            self.log_tau += 0.01 * (self._bisection(images, texts, anchors) - self.log_tau)
        self.log_tau = max(math.log(0.01), min(0.0, self.log_tau))
        self.newest = [*self.newest, *zip(images, texts, labels(batch), strict=True)][-self.m :]
        return StepResult(value, *gradients, 0.0)

    def _divergence(self, images: Tensor, texts: Tensor, k: int, i: int, tau: float) -> float:
        others = [(image, text) for image, text, label in self.newest if label != labels(len(images))[i]]
        scaled = [((images[i] @ text if k == 0 else texts[i] @ image) / tau).item() for image, text in others]
        total = sum(math.exp(value) for value in scaled)
        share = [math.exp(value) / total for value in scaled]
        return sum(p * math.log(p * len(others)) for p in share)

    def _bisection(self, images: Tensor, texts: Tensor, anchors: list[tuple[int, int]]) -> float:
        """Return the log τ at which the mean divergence of the anchors is ρ."""
        low, high = math.log(0.01), 0.0
        for _ in range(12):
            middle = (low + high) / 2
            divergences = [self._divergence(images, texts, k, i, math.exp(middle)) for k, i in anchors]
            if sum(divergences) / len(divergences) > self.rho:
                low = middle
            else:
                high = middle
        return (low + high) / 2
