"""The samples a step works on: this process's own, or the global batch, gathered without gradient."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from openclip_ext import distributed


@dataclass
class LocalBatch:
    """What the caller of a loss gave, checked.

    Attributes:
        image, text: ``(B_local, d)``, as given (any float type, with gradient).
        logit_scale: 0-d, with gradient.
        index: ``(B_local,)`` int64, or None where the loss needs none.
        dtype: what to compute in.
        epoch: epoch of the run, from 0.
        call: number of calls in training mode before this one.
        learning: whether this is one of them.
        views: 2 where the samples are views of half as many: ``image`` the first views of all and then the second ones,
            ``text`` the second ones and then the first. A sample's own embedding is then on the other side, too.
    """

    image: Tensor
    text: Tensor
    logit_scale: Tensor
    index: Tensor | None
    dtype: torch.dtype
    epoch: int = 0
    call: int = 0
    learning: bool = False
    views: int = 1


@dataclass
class GatheredBatch:
    """``B`` samples that are contrasted with one another, without gradient, in the loss's own precision.

    A sample with a non-finite feature (or an index out of range) does not count: its features are zero here and
    ``valid`` is False. Nothing in here ever waits for the device.

    Attributes:
        features: ``(2, B, d)``: images, texts.
        valid: ``(B,)`` bool.
        scale_ok: 0-d bool: the logit scale is finite and positive, which it is on all processes or on none.
        ok: 0-d bool: the logit scale is, and at least two samples (of each view) count. If not, ``valid`` is False everywhere.
        logit_scale: 0-d, 1 where it is not finite.
        index: ``(B,)`` int64, or None.
        first: position of this process's first sample.
        local_size: number of this process's samples.
        world_size: number of processes whose samples these are.
        epoch, call, learning, views: see :class:`LocalBatch`.
        count: 0-d, number of samples that count, at least 2 of each view.
        negatives: 0-d, number of negatives of each anchor that counts.
        positive: ``(B,)``, ``s_ii``.
        tau: ``(2, B)`` temperatures, set by the temperature scheme.
        log_g: ``(2, B)`` (see :mod:`functional`), 0 where a sample does not count.
        log_estimate: ``(2, B)``, the batch's own estimate of the log-normalizers, as the surrogate defines it.
    """

    features: Tensor
    valid: Tensor
    scale_ok: Tensor
    ok: Tensor
    logit_scale: Tensor
    index: Tensor | None
    first: int
    local_size: int
    world_size: int
    epoch: int
    call: int
    learning: bool
    views: int
    count: Tensor = field(init=False)
    negatives: Tensor = field(init=False)
    positive: Tensor = field(init=False)
    tau: Tensor = field(init=False)
    log_g: Tensor = field(init=False)
    log_estimate: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.valid.sum().clamp(min=2 * self.views).to(self.features.dtype)
        self.negatives = self.count - self.views
        self.positive = self.features.prod(dim=0).sum(dim=1)

    @property
    def size(self) -> int:
        """Number of samples, also those that do not count."""
        return self.features.shape[1]

    @property
    def own(self) -> slice:
        """Where this process's samples are."""
        return slice(self.first, self.first + self.local_size)

    def mean(self, values: Tensor, anchors: slice = slice(None)) -> Tensor:
        """Mean over the samples that count, along the last dimension of ``(..., B)``; of some anchors, their part of it."""
        return torch.where(self.valid[anchors], values, 0).sum(dim=-1) / self.count

    def gather_own(self, values: Tensor) -> Tensor:
        """Complete ``(rows, B_local)``, one value for each of this process's samples, to ``(rows, B)``."""
        if self.world_size == 1:
            return values
        rows = values.shape[0]
        gathered = distributed.all_gather(values).reshape(self.world_size, rows, -1)
        return gathered.transpose(0, 1).reshape(rows, -1)


@torch.no_grad()
def gather_batch(batch: LocalBatch, num_samples: int | None, gather: bool) -> GatheredBatch:
    """Gather (or not) a batch, promote it and find the samples that count.

    Args:
        batch: this process's samples.
        num_samples: size of the index space; an index outside of it does not count.
        gather: whether to take all processes' samples.
    """
    world_size = distributed.world_size() if gather else 1
    features = torch.stack([batch.image.detach(), batch.text.detach()])
    index = batch.index
    local_size = features.shape[1]
    if world_size > 1:
        features = distributed.all_gather(features).reshape(world_size, 2, local_size, -1)
        features = features.transpose(0, 1).reshape(2, world_size * local_size, -1)
        index = None if index is None else distributed.all_gather(index)
    logit_scale = batch.logit_scale.detach().to(batch.dtype)
    scale_ok = torch.isfinite(logit_scale) & (logit_scale > 0)
    valid = torch.isfinite(features).all(dim=2).all(dim=0)
    if index is not None and num_samples is not None:
        valid = valid & (index >= 0) & (index < num_samples)
    ok = scale_ok & (valid.sum() >= 2 * batch.views)
    valid = valid & ok
    return GatheredBatch(
        features=torch.where(valid[:, None], features.to(batch.dtype), 0),
        valid=valid,
        scale_ok=scale_ok,
        ok=ok,
        logit_scale=torch.where(scale_ok, logit_scale, 1),
        index=index,
        first=distributed.rank() * local_size if world_size > 1 else 0,
        local_size=local_size,
        world_size=world_size,
        epoch=batch.epoch,
        call=batch.call,
        learning=batch.learning,
        views=batch.views,
    )
