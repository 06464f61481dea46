"""NeuCLIP: log-normalizers predicted by prototypes that are trained inside each step.

*NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization*; equation numbers in [brackets] are from
this paper. ``e1, e2`` are the unit embeddings of images and texts, ``s_ij = e1_i·e2_j``, and ``W1, W2`` are prototypes,
``(m, d)`` each. The normalizer-prediction network (NPN) predicts::

    α1_i = log( ε + (1/m) Σ_j exp((cos(e1_i, W1_j) − s_ii)/τ) )          α2_i likewise with e2_i, W2        [10, 11]

One step ``t`` (Algorithm 1):

1. If ``t mod T_r = 0``, restart: set ``W1`` to the text embeddings of the most recent samples, and ``W2`` to their image
   embeddings.
2. Make ``T_u`` AdaGrad updates of ``W`` on this batch. They minimize ``τ·Σ_k mean_i [exp(−α_k,i)(ε + g_k,i) + α_k,i]`` [12],
   where ``g_k,i = mean_{j≠i} exp((s_ij − s_ii)/τ)`` is computed from the batch (for ``k = 2`` with ``s_ji``).
3. Predict ``α`` with the updated ``W``. The encoders minimize the same objective, averaged over the two sides, plus
   ``τ(ρ − 1)`` (:class:`openclip_ext.contrastive.objectives.NeuCLIPObjective`).

With ``verify_fit`` (not in the paper), ``α`` of this batch is predicted before step 2, once from the prototypes and once from
the recent embeddings. If the recent embeddings predict it better, step 3 uses them as prototypes.

Naive float64 version: ``tests/references/prototypes.py``. Page: ``docs/methods/neuclip.md``.

Example:
    >>> loss = openclip_ext.create_loss("neuclip", embed_dim=512, prototypes=1024)
    >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
    >>> sum(terms.values()).backward()
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext import compat
from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats
from openclip_ext.contrastive.checks import can_read_values
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue, repeated_batch
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN
from openclip_ext.contrastive.similarities import anchor_chunks
from openclip_ext.contrastive.steering import block_norms, blocks, normalize_blocks

_ADAGRAD_EPS = 1e-10


@dataclass(frozen=True)
class PrototypeEstimate:
    """Log-normalizers of this process's anchors, predicted by prototypes, and terms of their gradient.

    ``Ŵ_j`` is a unit prototype, and ``p_ij`` is its share in the sum ``exp(α_i)``.

    Attributes:
        stats: The batch that contains the anchors.
        log_normalizer: ``α``, ``(2, B_local)``.
        prototype_mass: ``Σ_j p_ij``, ``(2, B_local)``. This is 1 minus the share of ε. None if no gradient is needed.
        pull: ``Σ_j p_ij·Ŵ_j`` divided by the mass, ``(2, B_local, d)``, or None if no gradient is needed.
    """

    stats: ContrastStats
    log_normalizer: Tensor
    prototype_mass: Tensor | None
    pull: Tensor | None

    def feature_gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of ``Σ_k,i weight_k,i·α_k,i`` with respect to this process's features.

        The sum is over both sides ``k`` and this process's anchors ``i``. Prototypes and τ are constant:
        ``∇α1_i = Σ_j p_ij (∇(e1_i·Ŵ_j) − ∇s_ii)/τ_i``.
        """
        assert self.pull is not None and self.prototype_mass is not None, "the estimate was made without its gradient"
        batch = self.stats.batch
        scaled = weights / self.stats.tau[:, batch.local] * self.prototype_mass
        return scaled[:, :, None] * self.pull - batch.through_positive(scaled)

    def tau_slope(self) -> Tensor:
        """Return ``∂α_k,i/∂τ = −(1/τ²)·Σ_j p_ij (e_i·Ŵ_j − s_ii)`` of this process's anchors, ``(2, B_local)``."""
        assert self.pull is not None and self.prototype_mass is not None, "the estimate was made without its gradient"
        batch = self.stats.batch
        cosine = torch.linalg.vecdot(batch.features[:, batch.local], self.pull)
        gap = self.prototype_mass * (cosine - batch.positive[..., batch.local])
        return -gap / self.stats.tau[:, batch.local].square()


def estimate_from_prototypes(
    directions: Tensor,
    stats: ContrastStats,
    eps: float,
    with_gradient: bool,
    multiplicity: Tensor | None = None,
    excluded: Callable[[slice], Tensor] | None = None,
) -> PrototypeEstimate:
    """Return ``α_i = log(ε + (1/m) Σ_j exp((cos(e_i, W_j) − s_ii)/τ_i))`` of this process's anchors [10, 11].

    Args:
        directions: ``(2, m, d)`` unit prototypes.
        stats: The batch that contains the anchors.
        eps: The constant ε.
        with_gradient: Whether the gradient with respect to the embeddings is needed.
        multiplicity: Weight of each prototype in the mean, ``(m,)``, not 0 for the first. None (default) means 1.
        excluded: Function of a slice of ``b`` anchors that returns which prototypes each excludes, ``(b, m)`` bool. Needs
            ``multiplicity``. None (default) excludes no prototype.
    """
    batch, tau = stats.batch, stats.tau
    alpha = torch.empty_like(tau[:, batch.local], memory_format=torch.contiguous_format)
    mass, pull = None, None
    if with_gradient:
        mass, pull = torch.empty_like(alpha), torch.empty_like(batch.features[:, batch.local])
    log_multiplicity = None if multiplicity is None else multiplicity.to(tau.dtype).log()
    for anchors in anchor_chunks(batch.local, 2 * directions.shape[1]):
        here = slice(anchors.start - batch.first, anchors.stop - batch.first)
        terms = stats.scaled_features[:, anchors] @ directions.transpose(1, 2)
        if log_multiplicity is not None:
            terms += log_multiplicity
        number: int | Tensor = directions.shape[1]
        if excluded is not None:
            assert multiplicity is not None
            left_out = excluded(anchors)
            terms.masked_fill_(left_out, torch.finfo(terms.dtype).min / 4)  # not −∞, because an anchor may exclude all
            number = (multiplicity * ~left_out).sum(dim=1).clamp(min=1)
        terms, scale, log_sum = log_math.softmax_terms(terms, dim=2, has_masked=excluded is not None)
        log_mean = log_sum - _log_offset(stats, number, anchors)
        alpha[:, here] = log_math.log_add(log_mean, eps)
        if mass is not None and pull is not None:
            mass[:, here] = (log_mean - alpha[:, here]).exp_()
            pull[:, here].baddbmm_(terms, directions, beta=0)
            if scale is not None:
                pull[:, here].mul_(scale[:, :, None])
    return PrototypeEstimate(stats, alpha, mass, pull)


def _log_offset(stats: ContrastStats, prototypes: int | Tensor, anchors: slice = slice(None)) -> Tensor:
    """Return ``logsumexp_j e_i·Ŵ_j/τ_i`` minus the log of the mean of ``exp((e_i·Ŵ_j − s_ii)/τ_i)``, ``(2, b)``."""
    exponent = stats.positive_exponent[:, anchors]
    if isinstance(prototypes, Tensor):
        return exponent + prototypes.to(exponent.dtype).log()
    return exponent + math.log(prototypes)


class PrototypeNormalizer(Normalizer):
    """``α_i = log(ε + (1/m) Σ_j exp((cos(e_i, W_j) − s_ii)/τ))`` with trained prototypes [NeuCLIP 10, 11, Algorithm 1].

    A step with valid samples makes ``T_u`` AdaGrad updates on the batch, and then predicts. If ``t mod T_r = 0``, as in the
    first step, it restarts the prototypes from the ``m`` most recent embeddings before the updates. Prototypes are stored
    without normalization, because the cosine normalizes them. With a reference model (see ``contrastive/steering.py``),
    prototypes have two blocks, and a difference of two cosines replaces the cosine.

    AdaGrad's first update after a restart changes every coordinate of a unit prototype by the learning rate, which is 1 in the
    paper. The fit also uses only one batch. So the fitted prototypes can predict much worse than the embeddings that they were
    set to, and the encoders learn to avoid these prototypes. ``verify_fit`` prevents this (see :meth:`_fit_is_better`).
    """

    estimates = (NEGATIVES_MEAN,)
    differentiable = True
    prototypes: Tensor
    accumulator: Tensor
    steps: Tensor
    uses_fit: Tensor

    def __init__(
        self,
        *,
        embed_dim: int,
        reference_dim: int,
        eps: float,
        prototypes: int,
        restart_every: int | None,
        normalizer_updates: int,
        normalizer_lr: float,
        normalizer_objective: str,
        normalizer_reset: bool,
        simultaneous: bool,
        verify_fit: bool,
        alpha_gradient: bool,
        alpha_tau_gradient: bool,
    ) -> None:
        super().__init__()
        if alpha_tau_gradient and not alpha_gradient:
            raise OptionError("alpha_tau_gradient", "alpha_tau_gradient=True needs alpha_gradient=True")
        if normalizer_objective not in ("unified", "l2-log"):
            reason = f"normalizer_objective={normalizer_objective!r}: prototypes support unified or l2-log"
            raise OptionError("normalizer_objective", reason)
        self.eps = eps
        self.restart_every = restart_every
        self.updates = normalizer_updates
        self.lr = normalizer_lr
        self.objective = normalizer_objective
        self.reset = normalizer_reset
        self.simultaneous = simultaneous
        self.verify_fit = verify_fit and normalizer_updates > 0
        self.alpha_gradient, self.alpha_tau_gradient = alpha_gradient, alpha_tau_gradient
        self.queue = EmbeddingQueue(prototypes, embed_dim)
        self.blocks = blocks(reference_dim)
        self.register_buffer("prototypes", torch.zeros(2, prototypes, embed_dim))
        self.register_buffer("accumulator", torch.zeros(2, prototypes, embed_dim))
        # Number of steps with valid samples. It is counted on the device to avoid a host-device sync.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        # Whether the last step predicted with the fitted prototypes. False (only with verify_fit) means with the queue.
        self.register_buffer("uses_fit", torch.tensor(True), persistent=self.verify_fit)

    def step(self, stats: ContrastStats) -> Estimate:
        ok = stats.batch.ok
        is_due = self._is_restart_due()
        if self.verify_fit:
            torch.where(ok, self._fit_is_better(stats) & ~is_due, self.uses_fit, out=self.uses_fit)
        self.queue.push(stats.batch)
        recent = self.queue.repeated()
        self._restart_if_due(is_due & ok, recent)
        before = (
            self._estimate(self._used_prototypes(recent), stats, self.alpha_gradient) if self.simultaneous else None
        )
        if self.updates:
            self.fit(stats)
        self.steps += ok
        return before or self._estimate(self._used_prototypes(recent), stats, self.alpha_gradient)

    def predict(self, stats: ContrastStats) -> Estimate:
        """Predict with the last step's prototypes. Before the first step, use this batch's embeddings as prototypes."""
        fresh = repeated_batch(stats.batch, self.queue.capacity)
        prototypes = torch.where(self.steps > 0, self._used_prototypes(), fresh)
        return self._estimate(prototypes, stats, self.alpha_gradient)

    def metrics(self, epoch: int) -> dict[str, float]:
        """With ``verify_fit``, return whether the last step used the fitted prototypes. Synchronizes with the device."""
        return {"uses_fit": float(self.uses_fit)} if self.verify_fit else {}

    def _used_prototypes(self, recent: Tensor | None = None) -> Tensor:
        """Return the prototypes of the estimate. ``recent``: the queue's embeddings, if they are already known."""
        if not self.verify_fit:
            return self.prototypes
        return torch.where(self.uses_fit, self.prototypes, self.queue.repeated() if recent is None else recent)

    def _fit_is_better(self, stats: ContrastStats) -> Tensor:
        """Return whether the prototypes predict a new batch better than the queue does: 0-d bool.

        Neither predictor has used this batch yet. A predictor's score is ``mean_i τ·(exp(−α_i)(ε + g_i) + α_i)`` [12]. The
        exact normalizers minimize the expectation of this score over batches. If a score is NaN, the result is False.
        """
        predictors = (self.prototypes, self.queue.repeated())
        alpha = torch.stack([self._estimate(rows, stats, with_gradient=False).log_normalizer for rows in predictors])
        excess = log_math.saturating_exp(stats.log_estimate - alpha) + alpha
        return stats.batch.mean(stats.tau * (excess[0] - excess[1])).sum() < 0

    def _is_restart_due(self) -> Tensor:
        return self.steps == 0 if self.restart_every is None else self.steps % self.restart_every == 0

    def _restart_if_due(self, due: Tensor, recent: Tensor) -> None:
        # Only on a CPU, because reading ``due`` on a GPU synchronizes.
        if due.is_cpu and can_read_values(due) and not due:
            return
        torch.where(due, recent, self.prototypes, out=self.prototypes)
        if self.reset:
            self.accumulator.masked_fill_(due, 0)

    def fit(self, stats: ContrastStats) -> None:
        fit = _Fit(stats, self)
        for _ in range(self.updates):
            fit.update()

    def _estimate(self, prototypes: Tensor, stats: ContrastStats, with_gradient: bool) -> Estimate:
        directions = normalize_blocks(prototypes, self.blocks)
        estimate = estimate_from_prototypes(directions, stats, self.eps, with_gradient)
        alpha = stats.batch.gather_local(estimate.log_normalizer)
        if not with_gradient:
            return Estimate(alpha)
        slope = estimate.tau_slope() if self.alpha_tau_gradient else None
        return Estimate(alpha, feature_gradient=estimate.feature_gradient, tau_slope=slope)


def _adagrad_step(parameter: Tensor, gradient: Tensor, accumulator: Tensor, step: Tensor, lr: float) -> None:
    """Make one in-place step like ``torch.optim.Adagrad`` with its defaults. ``accumulator`` is updated in place.

    ``step`` is 0, because the number of steps has no effect without decay of the learning rate.
    """
    if torch.compiler.is_compiling() or not compat.has_fused_adagrad(parameter.device):
        accumulator.addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, accumulator.sqrt().add_(_ADAGRAD_EPS), value=-lr)
        return
    # torch's fused function makes one pass over memory instead of four.
    options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "lr_decay": 0.0, "eps": _ADAGRAD_EPS, "maximize": False}
    torch._fused_adagrad_([parameter], [gradient], [accumulator], [step], **options)


class _Fit:
    """Updates of prototypes on one batch.

    They minimize ``τ·(exp(−α)(ε+g) + α)`` [12], or, with ``l2-log``, ``½(α − log(ε+g))²`` (section 5.2). The gradient has a
    closed form, which needs two matrix products per update and no autograd graph. With the unit prototypes ``Ŵ`` and their
    shares ``p_ij`` in ``exp(α_i)``, it has the factors ``∂/∂cos_ij = (∂objective_i/∂α_i)·p_ij/(τ_i·B)`` and ``∂cos_ij/∂W_j =
    (e_i − cos_ij·Ŵ_j)/‖W_j‖``. Here, ``α_i`` includes :func:`_log_offset`, so without ε, ``α_i = logsumexp_j e_i·Ŵ_j/τ_i``.
    """

    def __init__(self, stats: ContrastStats, normalizer: "PrototypeNormalizer") -> None:
        batch, tau = stats.batch, stats.tau
        self.normalizer = normalizer
        self.prototypes = normalizer.prototypes
        self.is_unified = normalizer.objective == "unified"
        number = self.prototypes.shape[1]
        offset = _log_offset(stats, number)
        self.scaled = stats.scaled_features
        self.log_eps = offset + (math.log(normalizer.eps) if normalizer.eps else -math.inf)
        self.log_estimate = stats.log_estimate + offset
        # Constant factors of the derivative: the anchor's weight in the mean, and τ if the objective is [12].
        factor = tau if self.is_unified else 1.0
        self.factors = (factor * batch.sample_weight).expand(2, -1)[:, :, None] * self.scaled
        self.chunks = list(anchor_chunks(slice(0, batch.size), 2 * number))
        # Every update reuses these buffers, because on a CPU, allocating memory takes as long as a pass over the memory.
        self.directions, self.gradient = self.prototypes.new_empty((2, *self.prototypes.shape))
        self.step = torch.zeros((), device=tau.device)
        # Rows are prototypes, because both matrix products then read their first factor row by row. ε is one more row.
        self.terms = self.scaled.new_empty(2, number + 1, self.chunks[0].stop)

    def update(self) -> None:
        blocks = self.normalizer.blocks
        norms = [block_norms(self.prototypes, block) for block in blocks]
        for block, norm in zip(blocks, norms, strict=True):
            torch.div(self.prototypes[..., block], norm, out=self.directions[..., block])
        for anchors in self.chunks:
            self._add_gradient(anchors)
        for block, norm in zip(blocks, norms, strict=True):
            gradient, directions = self.gradient[..., block], self.directions[..., block]
            along = torch.linalg.vecdot(gradient, directions).unsqueeze(-1)
            gradient.addcmul_(directions, along, value=-1).div_(norm)
        _adagrad_step(self.prototypes, self.gradient, self.normalizer.accumulator, self.step, self.normalizer.lr)

    def _add_gradient(self, anchors: slice) -> None:
        """Add the part of some anchors to the gradient for the unit prototypes. The first chunk overwrites the buffer."""
        exponents = self.terms[:, :, : anchors.stop - anchors.start]
        exponents[:, :-1].baddbmm_(self.directions, self.scaled[:, anchors].transpose(1, 2), beta=0)
        exponents[:, -1] = self.log_eps[:, anchors]
        terms, scale, alpha = log_math.softmax_terms(exponents, dim=1, has_masked=False)
        descent = self.log_estimate[:, anchors] - alpha
        if self.is_unified:
            descent = descent.clamp_(max=log_math.max_exponent(descent.dtype)).expm1_()
        if scale is not None:
            descent.mul_(scale)
        pull = descent[:, :, None] * self.factors[:, anchors]
        self.gradient.baddbmm_(terms[:, :-1], pull, beta=0 if anchors.start == 0 else 1, alpha=-1)
