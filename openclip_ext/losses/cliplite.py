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
from openclip_ext.contrastive.batch import LocalBatch, all_finite
from openclip_ext.contrastive.checks import is_in_backward
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import minibatch_metrics
from openclip_ext.contrastive.seeding import generator, linear
from openclip_ext.contrastive.temperature import log_inverse

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
        """Return the projections ``(B, projection_dim)`` of unit embeddings ``(B, embed_dim)``, for evaluation.

        They use the running statistics.
        """
        features = features.to(self.hidden.weight.dtype)
        return self._finish(features, self.hidden(features), self.running_mean, self.running_var)

    def project(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Project for training, with the statistics of the batch, which needs at least two samples.

        Returns:
            The projections, and the batch's mean and unbiased variance for the running statistics, ``(2, projection_dim)``.
        """
        hidden = self.hidden(features)
        count = len(hidden)
        variance, mean = torch.var_mean(hidden, dim=0, correction=0)
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
        ok = batch.scale_ok & all_finite(torch.stack([batch.image, batch.text]).detach())
        scale = torch.where(batch.scale_ok, batch.logit_scale.to(batch.dtype), 1)
        features = [torch.where(ok, side.to(batch.dtype), 0) for side in (batch.image, batch.text)]
        image, text = (functional.normalize(side, dim=1) for side in self._projected(features, ok))
        positive = scale * (image * text).sum(dim=1)
        negative = scale * (image * text.roll(-1, dims=0)).sum(dim=1)
        terms = functional.softplus(-positive) + functional.softplus(negative)
        self._last = LocalBatch(image, text, scale, index=None, dtype=image.dtype).detached()
        return {"contrastive_loss": torch.where(ok, terms.mean(), torch.nan)}

    def _projected(self, features: list[Tensor], ok: Tensor) -> list[Tensor]:
        sides = (self.projections.image, self.projections.text)
        if not self.training:
            return [projection(side) for projection, side in zip(sides, features, strict=True)]
        results = [projection.project(side) for projection, side in zip(sides, features, strict=True)]
        statistics = torch.stack([statistics for _, statistics in results])
        # A single all-reduce sums the statistics of all processes, and counts the processes with finite features.
        sums = distributed.all_reduce_sum(torch.cat([statistics.flatten(), ok[None].to(statistics.dtype)]))
        mean = (sums[:-1] / distributed.world_size()).reshape(statistics.shape)
        share = _BATCH_NORM_MOMENTUM * (sums[-1] == distributed.world_size()).to(sums.dtype)
        if not is_in_backward():  # in a recomputation, this batch has already updated the running statistics
            for projection, statistics in zip(sides, mean, strict=True):
                projection.follow(statistics, share)
        return [projected for projected, _ in results]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last call: the temperature, and ``infonce`` and ``chance`` of this process's projections."""
        return {} if self._last is None else minibatch_metrics(self._last)
