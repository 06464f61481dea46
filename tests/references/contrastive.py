"""Global contrastive losses in float64 loops, straight from the papers' equations; nothing of the package is used.

A reference's ``step(images, texts, logit_scale, index, epoch)`` does what one call of a loss does and returns the value and
the gradients in the images, the texts and the logit scale. Images and texts are float64 ``(B, d)``.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StepResult:
    """What one step of a reference gives."""

    value: float
    images: Tensor
    texts: Tensor
    logit_scale: float
    alpha: list[list[float]]


def pair_similarity(images: Tensor, texts: Tensor, side: int, i: int, j: int) -> Tensor:
    """Similarity of anchor ``i`` of a side (0: image, 1: text) with sample ``j`` of the other."""
    return images[i] @ texts[j] if side == 0 else images[j] @ texts[i]


@dataclass
class EqualCaptions:
    """The labels of a step's captions and what equal ones are: negative, mask or positive (docs/equal-captions.md)."""

    choice: str
    labels: list[int]


_equal_captions = EqualCaptions("negative", [])


@contextlib.contextmanager
def equal_captions(choice: str, labels: list[int]) -> Iterator[None]:
    """Let all references treat equal captions so."""
    global _equal_captions
    _equal_captions, before = EqualCaptions(choice, labels), _equal_captions
    try:
        yield
    finally:
        _equal_captions = before


def negatives(i: int, batch: int) -> list[int]:
    """N_i."""
    labels = range(batch) if _equal_captions.choice == "negative" else _equal_captions.labels
    return [j for j in range(batch) if j != i and labels[j] != labels[i]]


def positive(images: Tensor, texts: Tensor, side: int, i: int) -> Tensor:
    """s_ii, or its mean over P_i."""
    if _equal_captions.choice != "positive":
        return images[i] @ texts[i]
    labels = _equal_captions.labels
    equal = [j for j in range(len(images)) if labels[j] == labels[i]]
    return sum(pair_similarity(images, texts, side, i, j) for j in equal) / len(equal)


def inner(images: Tensor, texts: Tensor, tau: Tensor | float, side: int, i: int) -> Tensor:
    """g_k(w, τ; i, B): below NeuCLIP (1)."""
    others = negatives(i, len(images))
    total = torch.zeros((), dtype=torch.float64)
    for j in others:
        difference = pair_similarity(images, texts, side, i, j) - positive(images, texts, side, i)
        total = total + torch.exp(difference / tau)
    return total / len(others)


def leaves(*tensors: Tensor | float) -> list[Tensor]:
    """Copies to differentiate in."""
    return [torch.as_tensor(tensor, dtype=torch.float64).detach().clone().requires_grad_() for tensor in tensors]


def batch_estimates(images: Tensor, texts: Tensor, tau: list[list[float]], eps: float) -> list[list[float]]:
    """log(ε + g) of all anchors."""
    return [
        [math.log(eps + inner(images, texts, tau[side][i], side, i).item()) for i in range(len(images))]
        for side in (0, 1)
    ]


def encoder_gradients(
    images: Tensor, texts: Tensor, tau: list[list[float]], alpha: list[list[float]], multiply_by_tau: bool = True
) -> tuple[Tensor, Tensor]:
    """∇_w L = ½ Σ_k mean_i τ_i·exp(−α_k,i)·∇_w g_k,i  [NeuCLIP 4]."""
    images, texts = leaves(images, texts)
    total = torch.zeros((), dtype=torch.float64)
    for side in (0, 1):
        for i in range(len(images)):
            factor = tau[side][i] if multiply_by_tau else 1.0
            weight = factor * math.exp(-alpha[side][i])
            total = total + 0.5 * weight * inner(images, texts, tau[side][i], side, i) / len(images)
    return torch.autograd.grad(total, (images, texts))


def inner_slope(images: Tensor, texts: Tensor, tau: float, side: int, i: int) -> float:
    """∂g/∂τ."""
    (variable,) = leaves(tau)
    return torch.autograd.grad(inner(images, texts, variable, side, i), variable)[0].item()


def mean(sides: list[list[float]]) -> float:
    """½ Σ_k mean_i."""
    return 0.5 * sum(sum(side) / len(side) for side in sides)


def gamma_of(epoch: int, gamma: float, decay_epochs: int | None) -> float:
    """[opt4ml, "Scheduler of γ"]; constant without decay epochs."""
    if decay_epochs is None or epoch >= decay_epochs:
        return gamma
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma) + gamma


class MovingAverage:
    """NeuCLIP (3) with u stored as it is, one number for each index and side."""

    def __init__(self, eps: float, gamma: float, decay_epochs: int | None) -> None:
        self.eps, self.gamma, self.decay_epochs = eps, gamma, decay_epochs
        self.u: list[dict[int, float]] = [{}, {}]

    def update(
        self, images: Tensor, texts: Tensor, tau: list[list[float]], index: list[int], epoch: int
    ) -> list[list[float]]:
        """Update the batch's u and return their logarithms."""
        gamma = gamma_of(epoch, self.gamma, self.decay_epochs)
        for side in (0, 1):
            new: dict[int, list[float]] = {}
            for i, sample in enumerate(index):
                estimate = self.eps + inner(images, texts, tau[side][i], side, i).item()
                old = self.u[side].get(sample, estimate)
                new.setdefault(sample, []).append((1 - gamma) * old + gamma * estimate)
            for sample, values in new.items():
                self.u[side][sample] = sum(values) / len(values)
        return [[math.log(self.u[side][sample]) for sample in index] for side in (0, 1)]


class MiniBatch:
    """α = log(ε + g)."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def update(
        self, images: Tensor, texts: Tensor, tau: list[list[float]], index: list[int], epoch: int
    ) -> list[list[float]]:
        """The batch's own estimates."""
        return batch_estimates(images, texts, tau, self.eps)


class FastClip:
    """SogCLR (constant τ), FastCLIP-v0, -v1, -v3 with any estimator that has ``update``."""

    def __init__(self, estimator: MovingAverage | MiniBatch, kind: str, rho: float = 0.0) -> None:
        self.estimator, self.kind, self.rho = estimator, kind, rho

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """One step; ``kind`` is constant, global or unscaled."""
        tau, eps, batch = 1 / logit_scale, self.estimator.eps, len(images)
        taus = [[tau] * batch] * 2
        alpha = self.estimator.update(images, texts, taus, index, epoch)
        g = [[inner(images, texts, tau, side, i).item() for i in range(batch)] for side in (0, 1)]
        slope = [[inner_slope(images, texts, tau, side, i) for i in range(batch)] for side in (0, 1)]
        sides = range(2)
        gradients = encoder_gradients(images, texts, taus, alpha, multiply_by_tau=self.kind != "unscaled")
        over_u = [[math.exp(-alpha[k][i]) for i in range(batch)] for k in sides]
        if self.kind == "unscaled":
            value = mean([[g[k][i] * over_u[k][i] for i in range(batch)] for k in sides])
            in_tau = mean([[slope[k][i] * over_u[k][i] for i in range(batch)] for k in sides])
        else:
            value = mean([[tau * (over_u[k][i] * (eps + g[k][i]) + alpha[k][i]) for i in range(batch)] for k in sides])
            # FastCLIP (13), both sides averaged.
            in_tau = mean(
                [[alpha[k][i] + self.rho + tau * over_u[k][i] * slope[k][i] for i in range(batch)] for k in sides]
            )
        if self.kind == "global":
            value += tau * (self.rho - 1)
        if self.kind == "constant":
            in_tau = 0.0
        return StepResult(value, *gradients, -(tau**2) * in_tau, alpha)


class InfoNce:
    """OpenCLIP's loss, as the mean over the anchors of ``−log softmax``, at the model's temperature or at a constant one."""

    def __init__(self, constant: float | None) -> None:
        self.constant = constant

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """One step; there is no state."""
        images, texts, scale = leaves(images, texts, 1 / self.constant if self.constant else logit_scale)
        value = torch.zeros((), dtype=torch.float64)
        for side in (0, 1):
            for i in range(len(images)):
                pairs = [i, *negatives(i, len(images))]
                row = [pair_similarity(images, texts, side, i, j) * scale for j in pairs]
                value = value - 0.5 * (row[0] - torch.logsumexp(torch.stack(row), 0)) / len(images)
        in_images, in_texts, in_scale = torch.autograd.grad(value, (images, texts, scale))
        return StepResult(value.item(), in_images, in_texts, 0.0 if self.constant else in_scale.item(), [])


class PerSample:
    """iSogCLR / FastCLIP-v2: [opt4ml, Algorithm 35], with Adam for each sample."""

    def __init__(
        self, estimator: MovingAverage, rho: float, start: float, bounds: tuple[float, float], lr: float
    ) -> None:
        self.estimator, self.rho, self.start, self.bounds, self.lr = estimator, rho, start, bounds, lr
        self.tau: list[dict[int, float]] = [{}, {}]
        self.moments: list[dict[int, tuple[float, float]]] = [{}, {}]

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """One step; the logit scale plays no part."""
        batch, eps = len(images), self.estimator.eps
        tau = [[self.tau[k].get(sample, self.start) for sample in index] for k in (0, 1)]
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        value = 0.0
        for k in (0, 1):
            found: dict[int, list[float]] = {}
            for i, sample in enumerate(index):
                t, u = tau[k][i], math.exp(alpha[k][i])
                value += (
                    0.5 * t * ((eps + inner(images, texts, t, k, i).item()) / u + alpha[k][i] + self.rho - 1) / batch
                )
                total = 0.0
                others = negatives(i, batch)
                for j in others:
                    ell = (pair_similarity(images, texts, k, i, j) - positive(images, texts, k, i)).item()
                    total += math.exp(ell / t) * ell / t
                found.setdefault(sample, []).append(math.log(u) + self.rho - total / (u * len(others)))
            for sample, slopes in found.items():
                self._update(k, sample, sum(slopes) / len(slopes), epoch)
        return StepResult(value, *gradients, 0.0, alpha)

    def _update(self, k: int, sample: int, gradient: float, epoch: int) -> None:
        gradient = max(-5.0, min(5.0, gradient))
        beta1, beta2 = (0.9, 0.999) if epoch > 0 else (0.0, 0.0)
        first, second = self.moments[k].get(sample, (0.0, 0.0))
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        self.moments[k][sample] = (first, second)
        step = (first / (1 - beta1 ** (epoch + 1))) / (math.sqrt(second / (1 - beta2 ** (epoch + 1))) + 1e-8)
        tau = self.tau[k].get(sample, self.start) - self.lr * step
        self.tau[k][sample] = max(self.bounds[0], min(self.bounds[1], tau))


class TwoGlobal:
    """[opt4ml], 'CLIP with a Global Learnable Temperature': one for the images and one for the texts, each with Adam."""

    def __init__(
        self, estimator: MovingAverage, rho: float, start: float, bounds: tuple[float, float], lr: float
    ) -> None:
        self.estimator, self.rho, self.bounds, self.lr = estimator, rho, bounds, lr
        self.tau = [start, start]
        self.moments = [[0.0, 0.0], [0.0, 0.0]]
        self.steps = 0

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """One step; the logit scale plays no part."""
        batch, eps = len(images), self.estimator.eps
        tau = [[self.tau[k]] * batch for k in (0, 1)]
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        value = 0.0
        self.steps += 1
        for k, t in enumerate(list(self.tau)):
            slope = 0.0
            for i in range(batch):
                u, others = math.exp(alpha[k][i]), negatives(i, batch)
                value += (
                    0.5 * t * ((eps + inner(images, texts, t, k, i).item()) / u + alpha[k][i] + self.rho - 1) / batch
                )
                ells = [
                    (pair_similarity(images, texts, k, i, j) - positive(images, texts, k, i)).item() for j in others
                ]
                total = sum(math.exp(ell / t) * ell / t for ell in ells)
                slope += (alpha[k][i] + self.rho - total / (u * len(others))) / batch
            self._update(k, slope * t)
        return StepResult(value, *gradients, 0.0, alpha)

    def _update(self, k: int, gradient: float) -> None:
        first, second = self.moments[k]
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        self.moments[k] = [first, second]
        step = (first / (1 - 0.9**self.steps)) / (math.sqrt(second / (1 - 0.999**self.steps)) + 1e-8)
        tau = math.exp(math.log(self.tau[k]) - self.lr * step)
        self.tau[k] = max(self.bounds[0], min(self.bounds[1], tau))


class Solved:
    """SogCLR with a temperature that is solved for: ``KL(softmax(s_i/τ) ‖ uniform) = ρ`` over the ``m`` newest embeddings.

    One for all anchors, whose log goes a hundredth of the way; or one for each anchor.
    """

    def __init__(self, estimator: MovingAverage, rho: float, m: int, per_sample: bool) -> None:
        self.estimator, self.rho, self.m, self.per_sample = estimator, rho, m, per_sample
        self.log_tau: float | None = None
        self.newest: list[tuple[Tensor, Tensor]] = []

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """One step; the logit scale is the start value."""
        batch, eps, sides = len(images), self.estimator.eps, (0, 1)
        self.log_tau = -math.log(logit_scale) if self.log_tau is None else self.log_tau
        tau = [[math.exp(self.log_tau)] * batch] * 2
        full = len(self.newest) == self.m
        if full and self.per_sample:
            tau = [[math.exp(self._bisection(images, texts, [(k, i)])) for i in range(batch)] for k in sides]
        alpha = self.estimator.update(images, texts, tau, index, epoch)
        gradients = encoder_gradients(images, texts, tau, alpha)
        terms = [
            [
                tau[k][i]
                * (math.exp(-alpha[k][i]) * (eps + inner(images, texts, tau[k][i], k, i).item()) + alpha[k][i])
                for i in range(batch)
            ]
            for k in sides
        ]
        if full:
            anchors = [(k, i) for k in sides for i in range(batch)]
            self.log_tau += 0.01 * (self._bisection(images, texts, anchors) - self.log_tau)
        self.log_tau = max(math.log(0.01), min(0.0, self.log_tau))
        self.newest = [*self.newest, *zip(images, texts, strict=True)][-self.m :]
        return StepResult(mean(terms), *gradients, 0.0, alpha)

    def _divergence(self, images: Tensor, texts: Tensor, k: int, i: int, tau: float) -> float:
        scaled = [((images[i] @ text if k == 0 else texts[i] @ image) / tau).item() for image, text in self.newest]
        total = sum(math.exp(value) for value in scaled)
        share = [math.exp(value) / total for value in scaled]
        return sum(p * math.log(p * self.m) for p in share)

    def _bisection(self, images: Tensor, texts: Tensor, anchors: list[tuple[int, int]]) -> float:
        """log τ that solves the mean over anchors."""
        low, high = math.log(0.01), 0.0
        for _ in range(12):
            middle = (low + high) / 2
            divergences = [self._divergence(images, texts, k, i, math.exp(middle)) for k, i in anchors]
            if sum(divergences) / len(divergences) > self.rho:
                low = middle
            else:
                high = middle
        return (low + high) / 2
