"""Naive references of NeuCLIP and QueueCLIP with autograd, ``torch.optim.Adagrad`` and lists, without the package's code."""

import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.references.contrastive import StepResult, add_hard, differentiate_hard, inner, labels, leaves, positive

# Dimension of the reference model's block of embeddings and prototypes, which comes first. 0 means no reference model.
_reference_width = 0


def two_blocks(width: int) -> Any:
    """Within this context, the first ``width`` dimensions of prototypes are a reference model's block."""
    return mock.patch(f"{__name__}._reference_width", width)


def direction(column: Tensor) -> Tensor:
    """Return a prototype whose blocks (reference model, trained model) each have unit norm."""
    blocks = column[:_reference_width], column[_reference_width:]
    return torch.cat([block / block.norm() for block in blocks if len(block)])


def predicted(
    images: Tensor,
    texts: Tensor,
    prototypes: Tensor,
    tau: Tensor | float,
    eps: float,
    side: int,
    left_out: list[set[int]] | None = None,
) -> list[Tensor]:
    """Return α_k of all anchors of a side [NeuCLIP 10, 11]. The rows of ``prototypes`` (m, d) need not have unit norm.

    ``left_out`` contains, for each anchor, the prototypes that its mean excludes.
    """
    anchors = images if side == 0 else texts
    found = []
    for i in range(len(images)):
        total = torch.zeros((), dtype=torch.float64)
        counted = [column for j, column in enumerate(prototypes) if left_out is None or j not in left_out[i]]
        for column in counted:
            cosine = anchors[i] @ direction(column)
            total = total + torch.exp((cosine - positive(images, texts, side, i)) / tau)
        found.append(torch.log(eps + total / len(counted)))
    return found


class Recent:
    """Embeddings of the m most recent samples. If a batch has more than m samples, only its first m are kept."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Text, image, number and label of each sample. Samples are numbered in the order of their arrival.
        self.rows: list[tuple[Tensor, Tensor, int, int]] = []
        self.seen = 0

    def push(self, images: Tensor, texts: Tensor) -> range:
        """Add a batch; return the numbers of its samples."""
        numbers = range(self.seen, self.seen + len(images))
        self.seen += len(images)
        new = list(zip(texts.clone(), images.clone(), numbers, labels(len(images)), strict=True))
        self.rows = (self.rows + new[: self.number])[-self.number :]
        return numbers

    def left_out(self, number: int, label: int, leave_own_out: bool) -> set[int]:
        """Return the rows of :meth:`repeated` with another sample of this label, or (if wanted) with the sample ``number``."""
        rows = [self.rows[j % len(self.rows)] for j in range(self.number)]
        return {
            j
            for j, (*_, other, its_label) in enumerate(rows)
            if (leave_own_out if other == number else its_label == label)
        }

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Return texts and images (m, d). If there are fewer than m samples, they are repeated, starting with the oldest."""
        texts, images, *_ = zip(*(self.rows[j % len(self.rows)] for j in range(self.number)), strict=True)
        return torch.stack(texts), torch.stack(images)


def unified_step(
    images: Tensor,
    texts: Tensor,
    logit_scale: float,
    alpha_of: object,
    eps: float,
    rho: float,
    alpha_gradient: bool,
    alpha_tau_gradient: bool = False,
) -> StepResult:
    """Return the value and the gradients of NeuCLIP (12), averaged over both sides.

    ``alpha_of(images, texts, tau)`` returns differentiable log-normalizers. Their gradient with respect to τ is used only with
    ``alpha_tau_gradient``.
    """
    images, texts, scale = leaves(images, texts, logit_scale)
    tau, batch = 1 / scale, len(images)
    alpha = alpha_of(images, texts, tau if alpha_tau_gradient else 1 / logit_scale)
    total = tau * (rho - 1)
    for side in (0, 1):
        for i in range(batch):
            hard_tau = tau if alpha_tau_gradient else tau.detach()
            a = add_hard(images, texts, hard_tau, side, i, torch.as_tensor(alpha[side][i]).exp()).log()
            a = a if alpha_gradient else a.detach()
            held = a.detach()
            g = add_hard(images, texts, tau, side, i, inner(images, texts, tau, side, i))
            value = torch.exp(-held) * (eps + g) + held
            # This term adds the gradient through α. Its value is 0, and τ and g are treated as constant.
            through_alpha = (1 - torch.exp(-held) * (eps + g.detach())) * (a - held)
            total = total + 0.5 * (tau * value + tau.detach() * through_alpha) / batch
    differentiate_hard(total)
    gradients = torch.autograd.grad(total, (images, texts, scale))
    return StepResult(total.item(), *gradients[:2], gradients[2].item())


@dataclass(kw_only=True)
class NeuClip:
    """NeuCLIP's Algorithm 1 with AdaGrad. ``simultaneous`` selects the order of Algorithm 3: predict before the updates.

    With ``verify_fit``, each step first computes the objective on its batch twice: with the fitted prototypes, and with the
    recent embeddings as prototypes. It uses the fitted prototypes only if their objective is smaller and no restart is due.
    """

    prototypes: int
    restart_every: int | None
    normalizer_updates: int
    eps: float
    rho: float
    normalizer_lr: float = 1.0
    normalizer_objective: str = "unified"
    normalizer_reset: bool = True
    simultaneous: bool = False
    verify_fit: bool = False
    alpha_gradient: bool = True
    alpha_tau_gradient: bool = False

    def __post_init__(self) -> None:
        self.recent = Recent(self.prototypes)
        self.verify_fit = self.verify_fit and self.normalizer_updates > 0
        self.t = 0
        self.fitted: list[Tensor] = []
        self.optimizer: torch.optim.Adagrad | None = None

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. Index and epoch have no effect."""
        fit_is_better = self.verify_fit and self._fit_is_better(images, texts, 1 / logit_scale)
        self.recent.push(images, texts)
        self._restart()
        before = [prototypes.detach().clone() for prototypes in self.fitted]
        for _ in range(self.normalizer_updates):
            self._update(images, texts, 1 / logit_scale)
        self.t += 1
        used = before if self.simultaneous else [prototypes.detach() for prototypes in self.fitted]
        if self.verify_fit and not fit_is_better:
            used = self.recent.repeated()

        def alpha_of(images: Tensor, texts: Tensor, tau: Tensor | float) -> list[list[Tensor]]:
            return [predicted(images, texts, used[side], tau, self.eps, side) for side in (0, 1)]

        both = self.alpha_gradient, self.alpha_tau_gradient
        return unified_step(images, texts, logit_scale, alpha_of, self.eps, self.rho, *both)

    def _fit_is_better(self, images: Tensor, texts: Tensor, tau: float) -> bool:
        if self._restarts():
            return False
        fitted, recent = (
            self._distance(candidates, images, texts, tau, "unified")
            for candidates in (self.fitted, self.recent.repeated())
        )
        return bool(fitted < recent)

    def _restarts(self) -> bool:
        return self.t == 0 if self.restart_every is None else self.t % self.restart_every == 0

    def _restart(self) -> None:
        if not self._restarts():
            return
        fresh = self.recent.repeated()
        if self.optimizer is None or self.normalizer_reset:
            self.fitted = [prototypes.clone().requires_grad_() for prototypes in fresh]
            self.optimizer = torch.optim.Adagrad(self.fitted, lr=self.normalizer_lr)
            return
        with torch.no_grad():
            for prototypes, new in zip(self.fitted, fresh, strict=True):
                prototypes.copy_(new)

    def _update(self, images: Tensor, texts: Tensor, tau: float) -> None:
        self.optimizer.zero_grad()
        self._distance(self.fitted, images, texts, tau, self.normalizer_objective).backward()
        self.optimizer.step()

    def _distance(self, prototypes: list[Tensor], images: Tensor, texts: Tensor, tau: float, objective: str) -> Tensor:
        """Return the fitting objective of prototypes on a batch: unified, or the squared error of α."""
        total = torch.zeros((), dtype=torch.float64)
        for side in (0, 1):
            for i, a in enumerate(predicted(images, texts, prototypes[side], tau, self.eps, side)):
                g = inner(images, texts, tau, side, i).item()
                if objective == "unified":
                    total = total + tau * (torch.exp(-a) * (self.eps + g) + a) / len(images)
                else:
                    total = total + 0.5 * (a - math.log(self.eps + g)) ** 2 / len(images)
        return total


class QueueClip:
    """NeuCLIP's prototypes without training (restart in each step, no updates), mixed with the mini-batch estimate."""

    def __init__(
        self, *, prototypes: int, batch_weight: float, eps: float, rho: float, leave_own_out: bool = False
    ) -> None:
        self.recent = Recent(prototypes)
        self.weight, self.eps, self.rho = batch_weight, eps, rho
        self.leave_own_out = leave_own_out

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step. Index and epoch have no effect."""
        numbers = self.recent.push(images, texts)
        queue = self.recent.repeated()
        left_out = [
            self.recent.left_out(number, label, self.leave_own_out)
            for number, label in zip(numbers, labels(len(images)), strict=True)
        ]

        def alpha_of(images: Tensor, texts: Tensor, tau: Tensor | float) -> list[list[Tensor]]:
            mixed = []
            for side in (0, 1):
                alpha = predicted(images, texts, queue[side], tau, self.eps, side, left_out)
                mixed.append(
                    [
                        torch.log(
                            (1 - self.weight) * torch.exp(a)
                            + self.weight * (self.eps + inner(images, texts, tau, side, i))
                        )
                        for i, a in enumerate(alpha)
                    ]
                )
            return mixed

        return unified_step(images, texts, logit_scale, alpha_of, self.eps, self.rho, True)
