"""Naive references of losses with a reference model: steering (features with two blocks) and distillation."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.references.contrastive import StepResult, leaves
from tests.references.prototypes import two_blocks

_unread: frozenset[int] = frozenset()


def without_reference(unread: Iterable[int]) -> Any:
    """Within this context, the reference model has no embeddings of the samples ``unread``."""
    return mock.patch(f"{__name__}._unread", frozenset(unread))


def distillation(
    images: Tensor, texts: Tensor, theirs: tuple[Tensor, Tensor], scale: Tensor, temperature: float
) -> Tensor:
    """Return ``½·[CE(softmax(ŝ/τ̂), softmax(s/τ)) + its transpose]`` with the reference model's ŝ and τ̂."""
    total = torch.zeros((), dtype=torch.float64)
    student, teacher = scale * (images @ texts.T), theirs[0] @ theirs[1].T / temperature
    for logits, wanted in ((student, teacher), (student.T, teacher.T)):
        for i in range(len(images)):
            target = torch.exp(wanted[i]) / torch.exp(wanted[i]).sum()
            total = total - 0.5 * (target * (logits[i] - torch.exp(logits[i]).sum().log())).sum() / len(images)
    return total


class WithReference:
    """The naive reference ``plain``, with a reference model whose image and text embeddings are the rows of ``tables``."""

    def __init__(
        self, plain: Any, tables: tuple[Tensor, Tensor], steer: bool, distill: float, temperature: float, learns: bool
    ) -> None:
        self.plain, self.tables, self.steer = plain, tables, steer
        self.distill, self.temperature, self.learns = distill, temperature, learns

    def step(self, images: Tensor, texts: Tensor, logit_scale: float, index: list[int], epoch: int) -> StepResult:
        """Take a step of the plain reference, and add the distillation loss. Both omit samples without embeddings.

        Without steering, the plain reference omits no sample.
        """
        kept = [i for i, sample in enumerate(index) if sample not in _unread]
        theirs = self.tables[0][index][kept], self.tables[1][index][kept]
        width = theirs[0].shape[1] if self.steer else 0
        used = kept if self.steer else list(range(len(index)))
        one = torch.cat([theirs[0], images[used]], dim=1) if self.steer else images
        other = torch.cat([-theirs[1], texts[used]], dim=1) if self.steer else texts
        with two_blocks(width):
            found = self.plain.step(one, other, logit_scale, [index[i] for i in used], epoch)
        inputs = leaves(images, texts, logit_scale)
        added = self.distill * distillation(inputs[0][kept], inputs[1][kept], theirs, inputs[2], self.temperature)
        gradients = torch.autograd.grad(added, inputs)
        for side, plain in enumerate((found.images, found.texts)):
            gradients[side][used] += plain[:, width:]
        return StepResult(
            found.value + added.item(),
            gradients[0],
            gradients[1],
            found.logit_scale + (gradients[2].item() if self.learns else 0),
        )
