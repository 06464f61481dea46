"""The normalizer-prediction network (NPN) of NeuCLIP, and the queue, which is one without training."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from openclip_ext.losses import functional as F
from openclip_ext.losses.block import Block
from openclip_ext.losses.inner_optimizers import adagrad_step_
from openclip_ext.normalizers.base import Estimate, Normalizer
from openclip_ext.normalizers.ring import EmbeddingRing, repeated_block

# Keeps the direction of a zero column finite.
_SMALLEST_NORM = 1e-12


def prototype_exponents(directions: Tensor, block: Block) -> Tensor:
    """``(cos(e_i, W_j) − s_ii)/τ_i`` ``(2, B, m)`` [NeuCLIP 10, 11].

    Args:
        directions: ``(2, m, d)`` unit prototypes.
        block: features are used as given.
    """
    scaled = block.features / block.tau[:, :, None]
    return torch.baddbmm(-(block.positive / block.tau)[:, :, None], scaled, directions.transpose(1, 2))


def prototype_feature_gradient(
    directions: Tensor, terms: Tensor, scales: Tensor, block: Block
) -> Callable[[Tensor], Tensor]:
    """Gradient of ``Σ weight_k,i·α_k,i`` over this process's anchors in its own features; prototypes and τ held.

    ``∇α1_i = Σ_j p_ij (∇(e1_i·Ŵ_j) − ∇s_ii)/τ_i`` with the shares ``p_ij = term_ij·scale_i``.
    """
    own = block.own

    def gradient(weights: Tensor) -> Tensor:
        scaled = weights * scales[:, own] / block.tau[:, own]
        through_cosine = scaled[:, :, None] * (terms[:, own] @ directions)
        through_positive = (scaled * terms[:, own].sum(dim=2)).sum(dim=0)
        return through_cosine - through_positive[:, None] * block.features[:, own].flip(0)

    return gradient


class PrototypeNormalizer(Normalizer):
    """``α_i = log(ε + (1/m) Σ_j exp((cos(e_i, W_j) − s_ii)/τ))`` with trained prototypes [NeuCLIP 10, 11, Algorithm 1].

    A step that counts: restart when ``t mod T_r = 0`` (the first included) from the ``m`` most recent samples' embeddings,
    ``T_u`` AdaGrad updates on the batch, prediction. The gradient has a closed form and needs no graph: with unit columns
    ``Ŵ`` and ``p_ij`` the shares of the prototypes in ``exp(α_i)``, ``∂/∂cos_ij = (∂objective_i/∂α_i)·p_ij/(τ_i·B)`` and
    ``∂cos_ij/∂W_j = (e_i − cos_ij·Ŵ_j)/‖W_j‖``. Columns are stored as they are and normalised in the cosine only.

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
        self.ring = EmbeddingRing(prototypes, embed_dim)
        self.register_buffer("prototypes", torch.zeros(2, prototypes, embed_dim))
        self.register_buffer("accumulator", torch.zeros(2, prototypes, embed_dim))
        # Steps that counted. On the device, so that a step without a usable sample needs no look at it.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def step(self, block: Block) -> Estimate:
        """See :class:`Normalizer`."""
        self.ring.push(block)
        self._restart_if_due(block.ok)
        before = self._estimate(self.prototypes, block) if self.simultaneous else None
        for _ in range(self.updates):
            self._update(block)
        self.steps += block.ok
        return before or self._estimate(self.prototypes, block)

    @torch.no_grad()
    def predict(self, block: Block) -> Estimate:
        """See :class:`Normalizer`; before the first step the prediction of a restart from this very block."""
        fresh = repeated_block(block, self.ring.capacity)
        return self._estimate(torch.where(self.steps > 0, self.prototypes, fresh), block)

    def _restart_if_due(self, ok: Tensor) -> None:
        due = self.steps == 0 if self.restart_every is None else self.steps % self.restart_every == 0
        due = due & ok
        self.prototypes.copy_(torch.where(due, self.ring.repeated(), self.prototypes))
        if self.reset:
            self.accumulator.masked_fill_(due, 0)

    def _directions(self, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(prototypes, dim=2, keepdim=True).clamp_(min=_SMALLEST_NORM)
        return prototypes / norms, norms

    def _alpha(self, directions: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        exponents = prototype_exponents(directions, block).sub_(math.log(self.ring.capacity))
        return F.log_sum_prototypes(exponents, self.eps)

    def _update(self, block: Block) -> None:
        directions, norms = self._directions(self.prototypes)
        alpha, terms, scales = self._alpha(directions, block)
        slope = F.objective_slope(self.objective, alpha, block.log_estimate, block.tau)
        in_cosine = torch.where(block.valid, slope * scales, 0) / (block.tau * block.count)
        gradient = terms.transpose(1, 2) @ (in_cosine[:, :, None] * block.features)
        along = (gradient * directions).sum(dim=2, keepdim=True)
        gradient = gradient.sub_(along * directions).div_(norms)
        adagrad_step_(self.prototypes, gradient, self.accumulator, self.lr)

    def _estimate(self, prototypes: Tensor, block: Block) -> Estimate:
        directions, _ = self._directions(prototypes)
        alpha, terms, scales = self._alpha(directions, block)
        if not self.alpha_gradient:
            return Estimate(alpha)
        return Estimate(alpha, feature_gradient=prototype_feature_gradient(directions, terms, scales, block))
