"""The normalizer-prediction network (NPN) of NeuCLIP, and the queue, which is one without training."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue, repeated_block
from openclip_ext.contrastive.inner_optimizers import InnerAdagrad
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.similarities import anchor_chunks

# Keeps the direction of a zero column finite.
_SMALLEST_NORM = 1e-12
# Below this many flops an update is so short that the exchange of sums costs more than the arithmetic it saves. On the CPU
# measured (docs/performance.md); on a GPU what it computes in the 50 µs that two small reductions are expected to take.
MIN_FLOPS_TO_SHARE = {"cpu": 2e9, "cuda": 2e10}


@dataclass
class PrototypeEstimate:
    """Log-normalizers of this process's anchors from prototypes, and their gradient in the embeddings.

    Attributes:
        alpha: ``(2, B_local)``.
        pull: ``Σ_j p_ij·Ŵ_j`` with the prototypes' shares ``p`` in ``exp(α_i)``, ``(2, B_local, d)``; None if not asked for.
        share: ``Σ_j p_ij``, below 1 by what ε has, ``(2, B_local)``.
    """

    alpha: Tensor
    share: Tensor
    pull: Tensor | None

    def feature_gradient(self, weights: Tensor, block: GatheredBatch) -> Tensor:
        """``Σ weight_k,i·∇α_k,i`` over this process's anchors in its own features; prototypes and τ held.

        ``∇α1_i = Σ_j p_ij (∇(e1_i·Ŵ_j) − ∇s_ii)/τ_i``.
        """
        own = block.own
        scaled = weights / block.tau[:, own]
        through_positive = (scaled * self.share).sum(dim=0)
        return scaled[:, :, None] * self.pull - through_positive[:, None] * block.features[:, own].flip(0)


def estimate_from_prototypes(
    directions: Tensor,
    block: GatheredBatch,
    eps: float,
    with_gradient: bool,
    multiplicity: Tensor | None = None,
    left_out: Tensor | None = None,
) -> PrototypeEstimate:
    """``α_i = log(ε + (1/m) Σ_j exp((cos(e_i, W_j) − s_ii)/τ_i))`` of this process's anchors [NeuCLIP 10, 11].

    Args:
        directions: ``(2, m, d)`` unit prototypes.
        block: features are used as given.
        eps: ε.
        with_gradient: whether the gradient in the embeddings will be asked for.
        multiplicity: how often each prototype counts ``(m,)``; None: once.
        left_out: with a multiplicity, the prototype that does not count for each anchor ``(B,)``, −1 for none; None: all do.
    """
    own = block.own
    number = directions.shape[1]
    if left_out is not None:
        number = number - torch.where(left_out < 0, 0, multiplicity[left_out])
    offset = _log_offset(block, number)
    alpha = torch.empty_like(block.tau[:, own], memory_format=torch.contiguous_format)
    share = torch.empty_like(alpha)
    pull = torch.empty_like(block.features[:, own]) if with_gradient else None
    log_multiplicity = None if multiplicity is None else multiplicity.to(block.tau.dtype).log()
    for anchors in anchor_chunks(own, directions.shape[1]):
        here = slice(anchors.start - own.start, anchors.stop - own.start)
        terms = (block.features[:, anchors] / block.tau[:, anchors, None]) @ directions.transpose(1, 2)
        if log_multiplicity is not None:
            terms += log_multiplicity
        if left_out is not None:
            _leave_out_(terms, left_out[anchors])
        largest = F.shifted_exp_(terms, dim=2)
        log_mean = largest + terms.sum(dim=2).log_() - offset[:, anchors]
        alpha[:, here] = F.log_add(log_mean, eps)
        share[:, here] = (log_mean - alpha[:, here]).exp_()
        if pull is not None:
            scale = (largest - offset[:, anchors] - alpha[:, here]).exp_()
            pull[:, here] = (terms @ directions).mul_(scale[:, :, None])
    return PrototypeEstimate(alpha, share, pull)


def _log_offset(block: GatheredBatch, prototypes: int | Tensor) -> Tensor:
    """What makes of ``logsumexp_j e_i·Ŵ_j/τ_i`` the mean of ``exp((cos − s_ii)/τ_i)``, ``(2, B)``.

    Args:
        block: the anchors.
        prototypes: how many the sum is over, for all anchors or for each ``(B,)``.
    """
    log_number = prototypes.to(block.tau.dtype).log() if isinstance(prototypes, Tensor) else math.log(prototypes)
    return block.positive / block.tau + log_number


def _leave_out_(exponents: Tensor, left_out: Tensor) -> None:
    """Make the exponentials ``(2, b, m)`` of one prototype of each anchor vanish; −1: of none."""
    column = left_out.clamp(min=0).expand(2, -1)[:, :, None]
    kept = torch.where(left_out[:, None] < 0, exponents.gather(2, column), -torch.inf)
    exponents.scatter_(2, column, kept)


class PrototypeNormalizer(Normalizer):
    """``α_i = log(ε + (1/m) Σ_j exp((cos(e_i, W_j) − s_ii)/τ))`` with trained prototypes [NeuCLIP 10, 11, Algorithm 1].

    A step that counts: restart when ``t mod T_r = 0`` (the first included) from the ``m`` most recent samples' embeddings,
    ``T_u`` AdaGrad updates on the batch, prediction. Columns are stored as they are and normalised in the cosine only.

    Args:
        embed_dim: width ``d`` of the embeddings.
        eps: ε.
        prototypes: ``m``.
        restart_every: ``T_r``; None: only at the first step.
        normalizer_updates: ``T_u``; 0 leaves the restarted prototypes as they are.
        normalizer_lr: AdaGrad's learning rate.
        normalizer_objective: ``unified`` [12] or ``l2-log`` (section 5.2).
        normalizer_reset: empty AdaGrad's accumulators at a restart.
        simultaneous: predict before the updates (Algorithm 3).
        alpha_gradient: let α's gradient reach the encoders.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        eps: float,
        prototypes: int,
        restart_every: int | None,
        normalizer_updates: int,
        normalizer_lr: float,
        normalizer_objective: str,
        normalizer_reset: bool,
        simultaneous: bool,
        alpha_gradient: bool,
    ) -> None:
        super().__init__()
        if normalizer_objective not in ("unified", "l2-log"):
            raise ValueError(f"normalizer_objective={normalizer_objective!r}: prototypes take unified or l2-log")
        self.eps = eps
        self.restart_every = restart_every
        self.updates = normalizer_updates
        self.lr = normalizer_lr
        self.objective = normalizer_objective
        self.reset = normalizer_reset
        self.simultaneous = simultaneous
        self.alpha_gradient = alpha_gradient
        self.ring = EmbeddingQueue(prototypes, embed_dim)
        self.register_buffer("prototypes", torch.zeros(2, prototypes, embed_dim))
        self.register_buffer("accumulator", torch.zeros(2, prototypes, embed_dim))
        # Steps that counted. On the device, so that a step without a usable sample needs no look at it.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def step(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        self.ring.push(block)
        self._restart_if_due(block.ok)
        before = self._estimate(self.prototypes, block) if self.simultaneous else None
        if self.updates:
            self.fit(block)
        self.steps += block.ok
        return before or self._estimate(self.prototypes, block)

    @torch.no_grad()
    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`; before the first step the prediction of a restart from this very block."""
        fresh = repeated_block(block, self.ring.capacity)
        return self._estimate(torch.where(self.steps > 0, self.prototypes, fresh), block)

    def _restart_if_due(self, ok: Tensor) -> None:
        due = self.steps == 0 if self.restart_every is None else self.steps % self.restart_every == 0
        due = due & ok
        if due.is_cpu and not due:
            return
        self.prototypes.copy_(torch.where(due, self.ring.repeated(), self.prototypes))
        if self.reset:
            self.accumulator.masked_fill_(due, 0)

    @torch.no_grad()
    def fit(self, block: GatheredBatch) -> None:
        """``T_u`` updates on the block, which all processes share where that saves more than it costs."""
        parts = block.world_size if shares_prototypes(self.prototypes, block) else 1
        size = self.ring.capacity // parts
        first = distributed.rank() * size if parts > 1 else 0
        part = slice(first, first + size)
        fit = _Fit(
            block,
            self.prototypes[:, part],
            self.accumulator[:, part],
            number=self.ring.capacity,
            shared=parts > 1,
            eps=self.eps,
            objective=self.objective,
            lr=self.lr,
        )
        for _ in range(self.updates):
            fit.update()
        if parts > 1:
            for state in (self.prototypes, self.accumulator):
                gathered = distributed.all_gather(state[:, part].transpose(0, 1))
                state.copy_(gathered.transpose(0, 1))

    def _estimate(self, prototypes: Tensor, block: GatheredBatch) -> Estimate:
        directions = prototypes / norms_of(prototypes)
        estimate = estimate_from_prototypes(directions, block, self.eps, self.alpha_gradient)
        alpha = block.gather_own(estimate.alpha)
        if not self.alpha_gradient:
            return Estimate(alpha)
        return Estimate(alpha, feature_gradient=lambda weights: estimate.feature_gradient(weights, block))


@dataclass
class _FitAnchors:
    """Some anchors of a fit, with what does not change from one update to the next.

    Attributes:
        scaled: ``e_i/τ_i``, ``(2, b, d)``.
        offset: see :func:`_log_offset`, ``(2, b)``.
        log_estimate: the batch's own estimate of ``α``, ``(2, b)``.
        factor: of the objective's slope, ``(2, b)``, 0 for anchors that do not count.
        terms: memory for their similarities with the prototypes, ``(2, m, b)``.
    """

    scaled: Tensor
    offset: Tensor
    log_estimate: Tensor
    factor: Tensor
    terms: Tensor


class _Fit:
    """Updates of prototypes on one block.

    The gradient has a closed form and needs no graph: two matrix products an update. With unit columns ``Ŵ`` and the shares
    ``p_ij`` of the prototypes in ``exp(α_i)``, ``∂/∂cos_ij = (∂objective_i/∂α_i)·p_ij/(τ_i·B)`` and ``∂cos_ij/∂W_j =
    (e_i − cos_ij·Ŵ_j)/‖W_j‖``.

    Args:
        block: the samples.
        prototypes, accumulator: ``(2, m, d)``, updated in place; of all prototypes, or of this process's part.
        number: of all prototypes.
        shared: whether the processes have a part each; an update then exchanges ``4·B`` scalars.
        eps: ε.
        objective: what is minimised, see :func:`functional.objective_slope`.
        lr: AdaGrad's learning rate.
    """

    def __init__(
        self,
        block: GatheredBatch,
        prototypes: Tensor,
        accumulator: Tensor,
        *,
        number: int,
        shared: bool,
        eps: float,
        objective: str,
        lr: float,
    ) -> None:
        self.prototypes = prototypes
        self.shared = shared
        self.eps = eps
        self.objective = objective
        self.count = block.count
        # Used in every update: on the CPU fresh memory of this size costs as much as a pass over it.
        self.directions, self.gradient = prototypes.new_empty((2, *prototypes.shape))
        self.adagrad = InnerAdagrad(prototypes, self.gradient, accumulator, lr)
        self.chunks = list(self._chunks(block, number))

    def _chunks(self, block: GatheredBatch, number: int) -> Iterator[_FitAnchors]:
        size = self.prototypes.shape[1]
        scaled = block.features / block.tau[:, :, None]
        offset = _log_offset(block, number)
        factor = torch.where(block.valid, F.objective_factor(self.objective, block.tau), 0)
        terms = None
        for anchors in anchor_chunks(slice(0, block.size), size):
            length = anchors.stop - anchors.start
            if terms is None:
                # Prototypes along the rows: both products then read their first factor row by row.
                terms = scaled.new_empty(2, size, length)
            rows = (values[:, anchors] for values in (scaled, offset, block.log_estimate, factor))
            yield _FitAnchors(*rows, terms=terms[:, :, :length])

    def update(self) -> None:
        """One AdaGrad step."""
        norms = norms_of(self.prototypes)
        directions = torch.div(self.prototypes, norms, out=self.directions)
        for position, anchors in enumerate(self.chunks):
            self._add_gradient(directions, anchors, first=position == 0)
        along = torch.linalg.vecdot(self.gradient, directions).unsqueeze(-1)
        self.gradient.addcmul_(directions, along, value=-1).div_(norms)
        self.adagrad.step()

    def _add_gradient(self, directions: Tensor, anchors: _FitAnchors, first: bool) -> None:
        """Add some anchors' part of the gradient in the directions; the first ones overwrite what was there."""
        terms = torch.bmm(directions, anchors.scaled.transpose(1, 2), out=anchors.terms)
        largest = F.shifted_exp_(terms, dim=1)
        log_sum = largest + terms.sum(dim=1).log_()
        if self.shared:
            log_sum = distributed.log_add_over_ranks(log_sum)
        alpha = F.log_add(log_sum - anchors.offset, self.eps)
        scale = (largest - anchors.offset - alpha).exp_()
        slope = anchors.factor * F.objective_slope(self.objective, anchors.log_estimate - alpha)
        pull = (slope.div_(self.count).mul_(scale))[:, :, None] * anchors.scaled
        self.gradient.baddbmm_(terms, pull, beta=0 if first else 1)


def norms_of(prototypes: Tensor) -> Tensor:
    """``(2, m, 1)``."""
    return torch.linalg.vector_norm(prototypes, dim=2, keepdim=True).clamp_(min=_SMALLEST_NORM)


def shares_prototypes(prototypes: Tensor, block: GatheredBatch) -> bool:
    """Whether each process fits its own part of the prototypes instead of all of them.

    The arithmetic, ``8·B·m·d`` flops an update, falls to ``1/K`` (the restart and the estimate are not concerned); an update
    gains an exchange of ``4·B`` scalars, and a step one of ``4·m·d`` values (``docs/performance.md``). Decided from the sizes
    alone, so that all processes decide alike.
    """
    _, number, width = prototypes.shape
    if block.world_size == 1 or number % block.world_size:
        return False
    least = MIN_FLOPS_TO_SHARE.get(prototypes.device.type, MIN_FLOPS_TO_SHARE["cuda"])
    return 8 * block.size * number * width >= least
