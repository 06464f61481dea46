"""The samples of one step in three stages: passed by the caller, gathered from all processes, and compared at temperatures.

In many tensors, the first dimension has size 2 and is the side: 0 for image anchors, which are compared with texts, and 1 for
text anchors, which are compared with images.
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
from openclip_ext.contrastive.guide import Guide
from openclip_ext.state.sharded_table import group_count, group_mean, merge_labels


def _computed_once(compute: Callable[[Any], Any]) -> Any:
    """Return a property that computes its value once. Dynamo cannot trace the lock of Python 3.11's ``cached_property``."""
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
        image, text: Embeddings from the caller, ``(B_local, d)``, of any float dtype, with their autograd graph.
        logit_scale: ``1/τ`` from the caller, 0-d, with its autograd graph.
        index: ``(B_local,)`` int64, −1 where the caller's index was out of range. None for a loss without an index.
        dtype: Dtype of the computation.
        epoch: Epoch of the run, from 0. In a compiled graph, it is a 0-d tensor (see :class:`HostNumber`).
        call: Number of earlier calls in training mode. In a compiled graph, it is a 0-d tensor.
        learning: Whether this call is in training mode.
        mask: ``(B_local,)`` bool, False for samples that do not count. None means that all samples count.
        labels: ``(B_local,)`` or ``(B_local, k)`` int64, equal for equal captions. None means that all captions count as
            different.
        positives_attract: Whether samples with equal labels are positives. If not, they are only excluded from the negatives.
        hard: Embeddings of hard negatives, ``(B_local, d)``, with their autograd graph, or None.
        guide: The reference model, if it excludes likely false negatives, or None.
    """

    image: Tensor
    text: Tensor
    logit_scale: Tensor
    index: Tensor | None
    dtype: torch.dtype
    epoch: int | Tensor = 0
    call: int | Tensor = 0
    learning: bool = False
    mask: Tensor | None = None
    labels: Tensor | None = None
    positives_attract: bool = False
    hard: Tensor | None = None
    guide: Guide | None = None

    @_computed_once
    def scale_ok(self) -> Tensor:
        """0-d bool, whether the logit scale is finite and positive."""
        scale, limits = self.logit_scale.detach().to(self.dtype), torch.finfo(self.dtype)
        return scale.clamp(limits.tiny, limits.max) == scale

    def detached(self) -> "LocalBatch":
        """Return a copy to store after the step. It has no autograd graph and no index."""
        return replace(
            self,
            image=self.image.detach(),
            text=self.text.detach(),
            logit_scale=self.logit_scale.detach(),
            index=None,
            hard=None,
            guide=None,
        )


@dataclass(frozen=True)
class GatheredBatch:
    """``B`` samples that are compared with one another. Their features are detached, and have the dtype of the loss.

    If a feature or the logit scale is not finite, :attr:`finite` is False and all samples are masked. A sample without a
    reference or with an index out of range is masked alone. ``valid`` is False for masked samples, and their features are set
    to 0. So all values computed from a masked sample are finite, and its weight of 0 in :attr:`sample_weight` removes them
    from means.

    Attributes:
        features: ``(2, B, d)``: images, texts.
        positive: ``(B,)`` similarities ``s_ii``. With :attr:`positive_means`, each anchor's mean similarity to its positives,
            ``(2, B)``.
        valid: ``(B,)`` bool, False for masked samples.
        ignored: ``(B,)`` bool, True for masked samples.
        count: 0-d, number of valid samples, but at least 2, so that divisions by it are finite.
        negatives: Number of negatives of each valid anchor: 0-d, or ``(B,)`` with labels or a guide, or ``(2, B)`` with hard
            negatives.
        logit_scale: 0-d. It is 1 if the caller's logit scale is not finite and positive.
        finite: 0-d bool, whether all features are finite, and the logit scale is finite and positive.
        ok: 0-d bool, whether the batch may change the state: it is :attr:`finite`, and at least two samples are valid, with at
            least two different labels if there are labels.
        index: Each sample's index in the data set, ``(B,)`` int64, or None.
        first: Position of this process's first sample among the ``B`` samples.
        local_size: Number of this process's samples.
        world_size: Number of processes whose samples are in this batch.
        epoch, call, learning: As in :class:`LocalBatch`.
        labels: Groups of equal samples, ``(B,)`` int64, or None. Samples with equal labels are not negatives of each other.
        given_labels: The labels from the caller, ``(B,)`` or ``(B, k)`` int64. They identify equal samples of other batches.
        positive_means: ``(2, B, d)``, mean of each anchor's positives on the other side. None means one positive per anchor.
        hard: Features of hard negatives, ``(B, d)``, or None.
        guide: The reference model, if it excludes likely false negatives, or None.
    """

    features: Tensor
    positive: Tensor
    valid: Tensor
    ignored: Tensor
    count: Tensor
    negatives: Tensor
    logit_scale: Tensor
    finite: Tensor
    ok: Tensor
    index: Tensor | None
    first: int
    local_size: int
    world_size: int
    epoch: int | Tensor
    call: int | Tensor
    learning: bool
    labels: Tensor | None = None
    given_labels: Tensor | None = None
    positive_means: Tensor | None = None
    hard: Tensor | None = None
    guide: Guide | None = None

    @property
    def size(self) -> int:
        """Number of samples, including masked samples."""
        return self.features.shape[1]

    @_computed_once
    def pairs(self) -> Tensor:
        """Number of pairs of each anchor: the pairs with its negatives, and the positive pair."""
        return self.negatives + 1

    @_computed_once
    def log_negatives(self) -> Tensor:
        return self.negatives.log()

    @_computed_once
    def log_pairs(self) -> Tensor:
        return self.pairs.log()

    @_computed_once
    def sample_weight(self) -> Tensor:
        """``(B,)``, each sample's weight in the mean over valid samples; 0 for masked samples."""
        return self.valid / self.count

    @_computed_once
    def scale_to_tau(self) -> Tensor:
        """0-d derivative of ``τ = 1/logit_scale`` with respect to the logit scale; 0 if no sample is valid."""
        return -(self.ok / self.logit_scale.square())

    @_computed_once
    def others(self) -> Tensor:
        """``(2, B, d)``, the features of each anchor's positive: the texts, then the images."""
        return self.features.flip(0)

    @_computed_once
    def valid_first(self) -> Tensor:
        """``(B,)`` int64 positions of the samples: first the valid samples, then the masked samples, each in order."""
        # A view of the booleans as integers would save a kernel, but inductor of torch 2.6 cannot compile it.
        return torch.argsort(self.ignored.to(torch.uint8), stable=True)

    @property
    def local(self) -> slice:
        """Positions of this process's samples."""
        return slice(self.first, self.first + self.local_size)

    def excluded(self, anchors: slice) -> Tensor | None:
        """Return which other samples are no negatives of ``b`` anchors, ``(b, B)`` bool. None means no sample."""
        return _equal_or_alike(self.labels, self.guide, anchors)

    def sample_index(self) -> Tensor:
        """Return the samples' indices ``(B,)``. Only losses with ``needs_index`` may call this."""
        assert self.index is not None, "the loss must declare needs_index"
        return self.index

    def mean(self, values: Tensor, anchors: slice = slice(None)) -> Tensor:
        """Return the mean of ``values`` ``(..., B)`` over valid samples, along the last dimension.

        ``values`` must be finite, even for masked samples. With ``anchors``, ``values`` contains only the values of these
        samples, and the result is their contribution to the mean.
        """
        return values @ self.sample_weight[anchors]

    def gather_local(self, values: Tensor) -> Tensor:
        """Gather values ``(rows, B_local)`` from all processes to ``(rows, B)``. Collective: all ranks call it."""
        if self.world_size == 1:
            return values
        rows = values.shape[0]
        gathered = distributed.all_gather(values).reshape(self.world_size, rows, -1)
        return gathered.transpose(0, 1).reshape(rows, -1)

    def through_positive(self, coefficients: Tensor) -> Tensor:
        """Return the gradient of ``Σ_k,i coefficient_k,i·positive_k,i`` with respect to this process's features.

        ``coefficients`` ``(2, B_local)`` of this process's anchors must be 0 for masked anchors.
        """
        if self.positive_means is None:
            return coefficients.sum(dim=0)[:, None] * self.others[:, self.local]
        assert self.labels is not None
        as_anchors = coefficients[:, :, None] * self.positive_means[:, self.local]
        weighted = self.gather_local(coefficients)[:, :, None] * self.features
        as_positives = _label_means(self.labels, weighted, self.valid).flip(0)
        return (as_anchors + as_positives[:, self.local]).masked_fill_(self.ignored[self.local, None], 0)


@dataclass(frozen=True)
class ContrastStats:
    """A gathered batch at given temperatures, with the sums over each anchor's negatives.

    Attributes:
        batch: The samples.
        tau: ``(2, B)`` temperatures of the anchors.
        log_sums: ``(2, B)`` ``log Σ_{j≠i} exp(s_ij/τ_i)`` over the negatives of each anchor.
        batch_estimate: The objective's function that computes :attr:`log_estimate` from this object.
        of_all: Function that computes :meth:`all_gather`. None means that ``batch`` already has all processes' samples.
    """

    batch: GatheredBatch
    tau: Tensor
    log_sums: Tensor
    batch_estimate: Callable[["ContrastStats"], Tensor]
    of_all: Callable[[], "ContrastStats"] | None = None

    @_computed_once
    def scaled_features(self) -> Tensor:
        """``(2, B, d)`` features, divided by the anchor's temperature."""
        return self.batch.features / self.tau[:, :, None]

    @_computed_once
    def positive_exponent(self) -> Tensor:
        """``(2, B)`` ``s_ii/τ_i``."""
        return self.batch.positive / self.tau

    @_computed_once
    def log_sum_negatives(self) -> Tensor:
        """``(2, B)`` ``log Σ_{j≠i} exp((s_ij − s_ii)/τ_i)``."""
        return self.log_sums - self.positive_exponent

    @_computed_once
    def log_mean_negatives(self) -> Tensor:
        """``(2, B)`` log of the mean of ``exp((s_ij − s_ii)/τ_i)`` over the negatives; 0 for masked samples."""
        return self.log_sum_negatives - self.batch.log_negatives

    @_computed_once
    def log_estimate(self) -> Tensor:
        """``(2, B)`` mini-batch estimate of the log-normalizers."""
        return self.batch_estimate(self)

    @_computed_once
    def infonce(self) -> Tensor:
        """``(2, B)`` mini-batch InfoNCE, ``log(1 + N·g)`` with ``N`` negatives."""
        return log_math.log_add(self.log_sum_negatives, 1.0)

    def all_gather(self) -> "ContrastStats":
        """Return the samples of all processes at their temperatures. Collective: all ranks call it."""
        return self if self.of_all is None else self.of_all()


@torch.no_grad()
def gather_batch(batch: LocalBatch, gather: bool) -> GatheredBatch:
    """Return the samples of all processes (if ``gather``) or of this process, in the loss's dtype. Mask invalid samples."""
    world_size = distributed.world_size() if gather else 1
    if world_size > 1 and not batch.learning:  # a call in training mode has already checked the sizes
        distributed.check_equal_sizes(batch.image)
    given = (batch.image, batch.text) if batch.hard is None else (batch.image, batch.text, batch.hard)
    features = torch.stack([values.detach() for values in given])
    index, labels, valid = batch.index, batch.labels, batch.mask
    local_size = features.shape[1]
    if world_size > 1:
        features = distributed.all_gather(features).reshape(world_size, len(given), local_size, -1)
        features = features.transpose(0, 1).reshape(len(given), world_size * local_size, -1)
        index = None if index is None else distributed.all_gather(index)
        labels = None if labels is None else distributed.all_gather(labels)
        valid = None if valid is None else distributed.all_gather(valid)
    if index is not None:
        valid = index >= 0 if valid is None else valid & (index >= 0)
    ok = finite = batch.scale_ok & all_finite(features)
    if valid is None:
        size = features.shape[1]
        valid = ok.expand(size)
        number = torch.full((), size, dtype=batch.dtype, device=features.device)
    else:
        number = valid.sum(dtype=batch.dtype)
        ok = ok & (number >= 2)
        valid = valid & ok
    count = number.clamp(min=2)
    negatives = count - 1
    given_labels = labels
    if labels is not None:
        labels = merge_labels(labels)
        equal = group_count(labels, valid)
        negatives = (count - equal).clamp(min=1)
        # If one valid sample has no negative, all valid samples have the same label, so none of them has a negative.
        ok = ok & (valid & (equal < number)).any()
        valid = valid & ok
    guide = batch.guide
    if guide is not None:
        if world_size > 1:
            rows = distributed.all_gather(guide.rows).reshape(world_size, 2, local_size, -1).transpose(0, 1)
            guide = replace(guide, rows=rows.reshape(2, world_size * local_size, -1))
        negatives = _count_negatives(guide, labels, valid).to(batch.dtype)
        # A sample without negatives is alike all others, so it is no negative of any of them.
        valid = valid & (negatives > 0)
        number = valid.sum(dtype=batch.dtype)
        ok = ok & (number >= 2)
        valid, count, negatives = valid & ok, number.clamp(min=2), negatives.clamp(min=1)
    ignored = ~valid
    # An in-place operation is safe here, because torch.stack has copied the features.
    features = features.to(batch.dtype).masked_fill_(ignored[:, None], 0)
    features, hard = (features, None) if batch.hard is None else (features[:2], features[2])
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
        finite=finite,
        ok=ok,
        index=index,
        first=distributed.rank() * local_size if world_size > 1 else 0,
        local_size=local_size,
        world_size=world_size,
        epoch=batch.epoch,
        call=batch.call,
        learning=batch.learning,
        labels=labels,
        given_labels=given_labels,
        positive_means=positive_means,
        hard=hard,
        guide=guide,
    )


def _equal_or_alike(labels: Tensor | None, guide: Guide | None, anchors: slice) -> Tensor | None:
    """Return which samples share each of ``b`` anchors' label or resemble the anchor, ``(b, B)`` bool; None without both."""
    equal = None if labels is None else labels[anchors, None] == labels
    if guide is None:
        return equal
    alike = guide.alike(anchors)
    return alike if equal is None else alike | equal


def _count_negatives(guide: Guide, labels: Tensor | None, valid: Tensor) -> Tensor:
    """Return the number of valid samples that are neither equal nor alike each sample, without itself, ``(B,)``."""
    from openclip_ext.contrastive.similarities import anchor_chunks  # which imports this module

    counts = []
    for anchors in anchor_chunks(slice(0, len(valid)), len(valid)):
        excluded = _equal_or_alike(labels, guide, anchors)
        assert excluded is not None, "there is a guide"
        excluded.diagonal(anchors.start).fill_(True)
        counts.append((valid & ~excluded).sum(dim=1))
    return torch.cat(counts)


def all_finite(features: Tensor) -> Tensor:
    """Return whether all features are finite, 0-d bool."""
    # NaN makes the maximum NaN, so the comparison is False. One maximum is much faster than isfinite and all.
    return torch.linalg.vector_norm(features, ord=math.inf) < math.inf


def _label_means(labels: Tensor, features: Tensor, valid: Tensor) -> Tensor:
    """Return, for each sample, the mean of ``features`` ``(2, B, d)`` over all valid samples with an equal label."""
    rows = features.transpose(1, 2).flatten(0, 1)
    return group_mean(labels, rows, valid).unflatten(0, (2, -1)).transpose(1, 2)
