"""The samples of one step: as passed by the caller, gathered from all processes, and compared at given temperatures.

Tensors with a leading dimension of 2 contain the two sides: 0 for image anchors (against the texts), 1 for text anchors
(against the images).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive import log_math
from openclip_ext.state.sharded_table import group_count, group_mean


def _computed_once(compute: Callable[[Any], Any]) -> Any:
    """Return a cached property. Dynamo cannot trace the lock that ``functools.cached_property`` has before Python 3.12."""
    kept = "_" + compute.__name__

    @functools.wraps(compute)
    def get(self: Any) -> Any:
        if kept not in self.__dict__:
            self.__dict__[kept] = compute(self)
        return self.__dict__[kept]

    return property(get)


@dataclass(frozen=True)
class LocalBatch:
    """Checked inputs of one call of a loss, in this process.

    Attributes:
        image, text: ``(B_local, d)`` as passed by the caller (any float dtype, with gradient).
        logit_scale: 0-d, with gradient.
        index: ``(B_local,)`` int64. None for a loss without an index.
        finite: ``(B_local,)`` bool, whether all features of a sample are finite.
        dtype: dtype of the computation.
        epoch: epoch of the run, from 0; in a compiled graph a 0-d tensor, see :class:`HostNumber`.
        call: number of earlier calls in training mode; in a compiled graph a 0-d tensor.
        learning: whether this call is in training mode.
        views: 2 if the samples are two views each of half as many images. ``image`` then contains the first views of all
            images followed by the second ones, ``text`` the second views followed by the first ones. A sample's own embedding
            is therefore also on the other side.
        labels: ``(B_local,)`` int64, equal for equal captions. None means that all captions differ.
        positives_attract: whether samples with equal labels are positives; if not, they are only excluded from the negatives.
        in_range: ``(B_local,)`` bool, whether an index is in the data set. None without an index.
        num_samples: size of the data set. None without an index.
    """

    image: Tensor
    text: Tensor
    logit_scale: Tensor
    index: Tensor | None
    finite: Tensor
    dtype: torch.dtype
    epoch: int | Tensor = 0
    call: int | Tensor = 0
    learning: bool = False
    views: int = 1
    labels: Tensor | None = None
    positives_attract: bool = False
    in_range: Tensor | None = None
    num_samples: int | None = None

    @_computed_once
    def scale_ok(self) -> Tensor:
        """0-d bool, whether the logit scale is finite and positive."""
        scale = self.logit_scale.detach().to(self.dtype)
        return (scale > 0) & (scale < math.inf)

    def detached(self) -> "LocalBatch":
        """Return the inputs without graph and index, to keep them after the step."""
        return replace(
            self,
            image=self.image.detach(),
            text=self.text.detach(),
            logit_scale=self.logit_scale.detach(),
            index=None,
            in_range=None,
        )


@dataclass(frozen=True)
class GatheredBatch:
    """``B`` samples that are compared with one another: detached, in the dtype of the loss.

    A sample with a non-finite feature or an index out of range is masked: ``valid`` is False and its features are zero. Values
    computed from it are therefore finite, and its :attr:`share` of 0 removes them.

    Attributes:
        features: ``(2, B, d)``: images, texts.
        positive: ``(B,)`` similarities ``s_ii``; with :attr:`positive_means` ``(2, B)``, means over the positives.
        valid: ``(B,)`` bool.
        ignored: ``(B,)`` bool, the masked samples.
        count: 0-d, number of valid samples, at least 2 of each view.
        negatives: number of negatives of each valid anchor: 0-d, or ``(B,)`` with labels.
        logit_scale: 0-d; 1 if the caller's logit scale is not finite and positive.
        scale_ok: 0-d bool, whether the logit scale is finite and positive; equal on all processes.
        ok: 0-d bool, whether the logit scale is finite and positive and at least two samples (of each view) are valid, with
            different labels if there are labels. If False, no sample is valid.
        index: ``(B,)`` int64, or None.
        first: position of this process's first sample.
        local_size: number of this process's samples.
        world_size: number of processes with samples in this batch.
        epoch, call, learning, views: as in :class:`LocalBatch`.
        labels: ``(B,)`` int64, or None; samples with equal labels are not negatives of each other.
        positive_means: ``(2, B, d)``, mean of each anchor's positives, on the other side. None means one positive per anchor.
    """

    features: Tensor
    positive: Tensor
    valid: Tensor
    ignored: Tensor
    count: Tensor
    negatives: Tensor
    logit_scale: Tensor
    scale_ok: Tensor
    ok: Tensor
    index: Tensor | None
    first: int
    local_size: int
    world_size: int
    epoch: int | Tensor
    call: int | Tensor
    learning: bool
    views: int
    labels: Tensor | None = None
    positive_means: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of samples, masked ones included."""
        return self.features.shape[1]

    @_computed_once
    def pairs(self) -> Tensor:
        """Number of pairs of each anchor: its negatives and the positive pair."""
        return self.negatives + 1

    @_computed_once
    def log_negatives(self) -> Tensor:
        return self.negatives.log()

    @_computed_once
    def log_pairs(self) -> Tensor:
        return self.pairs.log()

    @_computed_once
    def share(self) -> Tensor:
        """``(B,)``, each sample's share of the mean over valid samples."""
        return self.valid / self.count

    @_computed_once
    def scale_to_tau(self) -> Tensor:
        """0-d derivative of ``τ = 1/logit_scale``; 0 if no sample is valid."""
        return -(self.ok / self.logit_scale.square())

    @property
    def local(self) -> slice:
        """Positions of this process's samples."""
        return slice(self.first, self.first + self.local_size)

    def sample_index(self) -> Tensor:
        """Return the index ``(B,)``, for a loss with ``needs_index``."""
        assert self.index is not None, "the loss declares needs_index"
        return self.index

    def mean(self, values: Tensor, anchors: slice = slice(None)) -> Tensor:
        """Return the mean over valid samples, along the last dimension of ``(..., B)``.

        ``values`` are finite also for masked samples. If they cover only ``anchors``, returns their contribution to the mean.
        """
        return values @ self.share[anchors]

    def gather_local(self, values: Tensor) -> Tensor:
        """Gather ``(rows, B_local)`` of all processes to ``(rows, B)``. Collective: all ranks call it."""
        if self.world_size == 1:
            return values
        rows = values.shape[0]
        gathered = distributed.all_gather(values).reshape(self.world_size, rows, -1)
        return gathered.transpose(0, 1).reshape(rows, -1)

    def through_positive(self, coefficients: Tensor) -> Tensor:
        """Return the gradient of ``Σ_k,i coefficient_k,i·positive_k,i`` (0 for masked anchors) in this process's features."""
        if self.positive_means is None:
            return coefficients.sum(dim=0)[:, None] * self.features[:, self.local].flip(0)
        assert self.labels is not None
        as_anchors = coefficients[:, :, None] * self.positive_means[:, self.local]
        weighted = self.gather_local(coefficients)[:, :, None] * self.features
        as_positives = _label_means(self.labels, weighted, self.valid).flip(0)
        return (as_anchors + as_positives[:, self.local]).masked_fill_(self.ignored[self.local, None], 0)


@dataclass(frozen=True)
class BatchAtTemperature:
    """A gathered batch at given temperatures, with the sums over each anchor's negatives.

    Attributes:
        batch: the samples.
        tau: ``(2, B)`` temperatures of the anchors.
        log_sums: ``(2, B)`` ``log Σ_{j≠i} exp(s_ij/τ_i)`` over the negatives of each anchor.
        batch_estimate: computes :attr:`log_estimate`, which depends on the objective.
        of_all: computes :meth:`of_all_processes`. None means that these are the samples of all processes.
    """

    batch: GatheredBatch
    tau: Tensor
    log_sums: Tensor
    batch_estimate: Callable[["BatchAtTemperature"], Tensor]
    of_all: Callable[[], "BatchAtTemperature"] | None = None

    @_computed_once
    def positive_exponent(self) -> Tensor:
        """``(2, B)`` ``s_ii/τ_i``."""
        return self.batch.positive / self.tau

    @_computed_once
    def log_gap_sums(self) -> Tensor:
        """``(2, B)`` ``log Σ_{j≠i} exp((s_ij − s_ii)/τ_i)``."""
        return self.log_sums - self.positive_exponent

    @_computed_once
    def log_g(self) -> Tensor:
        """``(2, B)`` log of the mean of ``exp((s_ij − s_ii)/τ_i)`` over the negatives; 0 for masked samples."""
        return self.log_gap_sums - self.batch.log_negatives

    @_computed_once
    def log_estimate(self) -> Tensor:
        """``(2, B)`` mini-batch estimate of the log-normalizers."""
        return self.batch_estimate(self)

    @_computed_once
    def infonce(self) -> Tensor:
        """``(2, B)`` mini-batch InfoNCE, ``log(1 + N·g)`` with ``N`` negatives."""
        return log_math.log_add(self.log_gap_sums, 1.0)

    def of_all_processes(self) -> "BatchAtTemperature":
        """Return all processes' samples at their temperatures. Collective: all ranks call it."""
        return self if self.of_all is None else self.of_all()


@torch.no_grad()
def gather_batch(batch: LocalBatch, gather: bool) -> GatheredBatch:
    """Return the samples of all processes, or with ``gather=False`` of this process, in the dtype of the loss, with masks."""
    world_size = distributed.world_size() if gather else 1
    features = torch.stack([batch.image.detach(), batch.text.detach()])
    index, labels, valid = batch.index, batch.labels, batch.finite
    local_size = features.shape[1]
    if world_size > 1:
        features = distributed.all_gather(features).reshape(world_size, 2, local_size, -1)
        features = features.transpose(0, 1).reshape(2, world_size * local_size, -1)
        index = None if index is None else distributed.all_gather(index)
        labels = None if labels is None else distributed.all_gather(labels)
        valid = finite_rows(features)
    if index is not None:
        in_range = batch.in_range if world_size == 1 else is_in_range(index, batch.num_samples)
        assert in_range is not None, "an index comes with its range"
        valid = valid & in_range
    number = valid.sum(dtype=batch.dtype)
    ok = batch.scale_ok & (number >= 2 * batch.views)
    count = number.clamp(min=2 * batch.views)
    negatives = count - batch.views
    if labels is not None:
        equal = group_count(labels, valid)
        negatives = (count - equal).clamp(min=1)
        # Either every valid sample has a negative, or none has.
        ok = ok & (valid & (equal < number)).any()
    valid = valid & ok
    ignored = ~valid
    # In place, because torch.stack copied them.
    features = features.to(batch.dtype).masked_fill_(ignored[:, None], 0)
    positive, positive_means = torch.linalg.vecdot(features[0], features[1]), None
    if labels is not None and batch.positives_attract:
        positive_means = _label_means(labels, features, valid).flip(0)
        positive = torch.linalg.vecdot(features, positive_means)
    return GatheredBatch(
        features=features,
        positive=positive,
        valid=valid,
        ignored=ignored,
        count=count,
        negatives=negatives,
        logit_scale=batch.logit_scale.detach().to(batch.dtype).masked_fill(~batch.scale_ok, 1),
        scale_ok=batch.scale_ok,
        ok=ok,
        index=index,
        first=distributed.rank() * local_size if world_size > 1 else 0,
        local_size=local_size,
        world_size=world_size,
        epoch=batch.epoch,
        call=batch.call,
        learning=batch.learning,
        views=batch.views,
        labels=labels,
        positive_means=positive_means,
    )


def finite_rows(features: Tensor) -> Tensor:
    """Return which samples ``(B,)`` of two sides ``(2, B, d)`` have only finite features."""
    # The maximum propagates NaN, which compares as False. Much faster than isfinite and all.
    return features.abs().amax(dim=(0, 2)) < math.inf


def is_in_range(index: Tensor, num_samples: int | None) -> Tensor:
    """Return which positions ``(B,)`` are in ``[0, num_samples)``."""
    assert num_samples is not None, "a loss that needs an index knows its range"
    return index.clamp(0, num_samples - 1) == index


def _label_means(labels: Tensor, features: Tensor, valid: Tensor) -> Tensor:
    """Return the mean of ``(2, B, d)`` over the samples with the label of each sample."""
    rows = features.transpose(1, 2).flatten(0, 1)
    return group_mean(labels, rows, valid).unflatten(0, (2, -1)).transpose(1, 2)


def finite_samples(image_features: Tensor, text_features: Tensor) -> Tensor:
    """Return which samples ``(B_local,)`` have only finite features."""
    return finite_rows(torch.stack([image_features.detach(), text_features.detach()]))
