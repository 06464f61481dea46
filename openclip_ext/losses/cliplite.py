"""CLIP-Lite: a Jensen-Shannon bound on the mutual information, with one negative per positive pair, without normalizers.

Shrivastava et al., *CLIP-Lite: Information Efficient Visual Representation Learning with Language Supervision*,
AISTATS 2023; equation numbers in [brackets] are from this paper. With a discriminator ``T`` and a cyclic shift ``π`` of the
batch::

    loss = mean softplus(−T(x_i, t_i)) + mean softplus(T(x_i, t_π(i)))                                  [3, 4]

Naive float64 version: ``tests/references/cliplite.py``. Page: ``docs/methods/cliplite.md``.

Example:
    >>> loss = openclip_ext.create_loss("cliplite", embed_dim=512)
    >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
    >>> parameters += loss.model_head().parameters()  # the projections are trained with the model
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch, finite_samples
from openclip_ext.contrastive.checks import is_in_backward
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import minibatch_metrics
from openclip_ext.contrastive.seeding import generator, linear
from openclip_ext.contrastive.temperature import log_inverse
from openclip_ext.losses.method import Method, WholeLoss

_BATCH_NORM_EPS = 1e-5
_BATCH_NORM_MOMENTUM = 0.1


class Projection(nn.Module):
    """``LayerNorm(Linear(ReLU(BatchNorm(Linear x))) + shortcut x)``: one side of the discriminator.

    The shortcut is linear. If both dimensions are equal, its initial value is the identity. The first linear layer and the
    shortcut have no bias. Initial values are drawn from the generator ``random``.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, embed_dim: int, projection_dim: int, random: torch.Generator | None) -> None:
        super().__init__()
        self.hidden = linear(embed_dim, projection_dim, False, random)
        self.scale = nn.Parameter(torch.ones(projection_dim))
        self.shift = nn.Parameter(torch.zeros(projection_dim))
        self.register_buffer("running_mean", torch.zeros(projection_dim))
        self.register_buffer("running_var", torch.ones(projection_dim))
        self.output = linear(projection_dim, projection_dim, True, random)
        self.shortcut = linear(embed_dim, projection_dim, False, random)
        if embed_dim == projection_dim:
            nn.init.eye_(self.shortcut.weight)
        self.layer_norm = nn.LayerNorm(projection_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Map unit embeddings ``(B, embed_dim)`` to ``(B, projection_dim)`` with running statistics, for evaluation."""
        features = features.to(self.hidden.weight.dtype)
        return self._finish(features, self.hidden(features), self.running_mean, self.running_var)

    def project(self, features: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Map like :meth:`forward`, but for training: use the statistics of the batch's valid samples (at least two).

        Returns:
            The projections, and the batch's mean and unbiased variance for the running statistics, ``(2, projection_dim)``.
        """
        hidden = self.hidden(features)
        count = valid.sum().clamp(min=2)
        mean = torch.where(valid[:, None], hidden, 0).sum(dim=0) / count
        variance = torch.where(valid[:, None], hidden - mean, 0).square().sum(dim=0) / count
        statistics = torch.stack([mean, variance * count / (count - 1)]).detach()
        return self._finish(features, hidden, mean, variance), statistics

    @torch.no_grad()
    def follow(self, statistics: Tensor, share: Tensor) -> None:
        """Update the running statistics: ``share`` (0-d) is the weight of the new ``statistics`` ``(2, projection_dim)``."""
        self.running_mean.lerp_(statistics[0], share)
        self.running_var.lerp_(statistics[1], share)

    def _finish(self, features: Tensor, hidden: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        normalized = (hidden - mean) * torch.rsqrt(variance + _BATCH_NORM_EPS) * self.scale + self.shift
        return self.layer_norm(self.output(torch.relu(normalized)) + self.shortcut(features))


class Projections(nn.Module):
    """The two projections of the discriminator, which are part of the trained model."""

    kind = "cliplite"
    evaluated = True

    def __init__(self, embed_dim: int, projection_dim: int, seed: int = 0) -> None:
        super().__init__()
        self.config = {"embed_dim": embed_dim, "projection_dim": projection_dim}
        self.image = Projection(embed_dim, projection_dim, generator("cpu", seed, "image projection"))
        self.text = Projection(embed_dim, projection_dim, generator("cpu", seed, "text projection"))


class ClipLiteLoss(ContrastiveLoss):
    """``mean softplus(−T(x_i, t_i)) + mean softplus(T(x_i, t_π(i)))`` [3, 4].

    ``T(x, t) = logit_scale · cos(proj_1(x), proj_2(t))``, with the model's ``logit_scale``. ``π`` is a cyclic shift of this
    process's batch, which gives every pair one negative. The optimizer must also train the parameters of the projections
    (:meth:`model_head`), and evaluations must use the projections. Each process uses negatives and BatchNorm statistics of its
    own batch. The running statistics are updated with the statistics' mean over all processes.
    """

    expects_unit_norm = False

    def __init__(self, *, embed_dim: int, projection_dim: int | None, temperature: float | None, seed: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.initial_logit_scale = log_inverse(temperature)
        self.projections = Projections(embed_dim, projection_dim or embed_dim, seed)
        self._last: LocalBatch | None = None

    def model_head(self) -> Projections:
        """Return the projections, which the optimizer trains and which evaluations must use."""
        return self.projections

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        if len(batch.image) < 2:
            raise ValueError("CLIP-Lite needs at least 2 samples, found 1: increase the batch size")
        finite, scale_ok = batch.finite, batch.scale_ok
        ok = scale_ok & (finite.sum() >= 2)
        valid = finite & ok
        scale = torch.where(scale_ok, batch.logit_scale.to(batch.dtype), 1)
        features = [torch.where(valid[:, None], side.to(batch.dtype), 0) for side in (batch.image, batch.text)]
        image, text = (functional.normalize(side, dim=1) for side in self._projected(features, valid, ok))
        positive = scale * (image * text).sum(dim=1)
        negative = scale * (image * text[_next_valid(valid)]).sum(dim=1)
        terms = functional.softplus(-positive) + functional.softplus(negative)
        image, text = image.detach(), text.detach()
        counted = valid & finite_samples(image, text)
        self._last = LocalBatch(image, text, scale.detach(), index=None, finite=counted, dtype=image.dtype)
        return {"contrastive_loss": torch.where(valid, terms, 0).sum() / valid.sum().clamp(min=2)}

    def _projected(self, features: list[Tensor], valid: Tensor, ok: Tensor) -> list[Tensor]:
        sides = (self.projections.image, self.projections.text)
        if not self.training:
            return [projection(side) for projection, side in zip(sides, features, strict=True)]
        results = [projection.project(side, valid) for projection, side in zip(sides, features, strict=True)]
        statistics = torch.stack([statistics for _, statistics in results])
        # A single all-reduce sums the statistics of all processes with valid samples, and counts these processes.
        sums = distributed.all_reduce_sum(torch.cat([(statistics * ok).flatten(), ok[None].to(statistics.dtype)]))
        mean = (sums[:-1] / sums[-1].clamp(min=1)).reshape(statistics.shape)
        share = _BATCH_NORM_MOMENTUM * (sums[-1] > 0).to(sums.dtype)
        if not is_in_backward():  # in a recomputation, this batch has already updated the running statistics
            for projection, statistics in zip(sides, mean, strict=True):
                projection.follow(statistics, share)
        return [projected for projected, _ in results]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last call: the temperature, and ``infonce`` and ``chance`` of this process's projections."""
        return {} if self._last is None else minibatch_metrics(self._last)


def _next_valid(valid: Tensor) -> Tensor:
    """Return ``π`` ``(B,)``: for each sample the position of the next valid sample, cyclically."""
    order = torch.argsort((~valid).to(torch.uint8), stable=True)
    place = valid.cumsum(dim=0) - 1
    return order[(place + 1) % valid.sum().clamp(min=1)]


METHOD = Method(
    name="cliplite",
    head=Projections,
    whole=WholeLoss(ClipLiteLoss, {"temperature": 0.07}),
)
