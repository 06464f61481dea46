"""A multi-layer perceptron that predicts the log-partition function: AmorLIP."""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch
from openclip_ext.contrastive.inner_optimizers import InnerAdam
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.seeding import generator
from openclip_ext.contrastive.similarities import anchor_chunks

# With re-initialisation at every epoch's start, the network needs about this many steps to be of use again.
_STEPS_AN_EPOCH_NEEDS = 1000
# So many tensors of the embedding's width has the graph of a fit.
_GRAPH_TENSORS = 8


class TwoSidedMlp(nn.Module):
    """``log λ(e)`` for both sides: one MLP each, evaluated together.

    As AmorLIP's released code: Linear(d, f_d·d), ReLU, LayerNorm, Linear(f_d·d, d), ReLU, LayerNorm, plus the input, ReLU,
    Linear(d, 1).
    """

    def __init__(self, embed_dim: int, width_factor: float) -> None:
        super().__init__()
        hidden = max(1, round(width_factor * embed_dim))
        widths = [(embed_dim, hidden), (hidden, embed_dim), (embed_dim, 1)]
        self.weights = nn.ParameterList(torch.zeros(2, fan_in, fan_out) for fan_in, fan_out in widths)
        self.biases = nn.ParameterList(torch.zeros(2, 1, fan_out) for _, fan_out in widths)
        self.scales = nn.ParameterList(torch.ones(2, 1, fan_out) for _, fan_out in widths[:2])
        self.shifts = nn.ParameterList(torch.zeros(2, 1, fan_out) for _, fan_out in widths[:2])

    @torch.no_grad()
    def initialize(self, random: torch.Generator) -> None:
        """Start values of ``nn.Linear`` and ``nn.LayerNorm``.

        Args:
            random: a generator on the CPU, so that every device starts alike.
        """
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            for parameter in (weight, bias):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=random))
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            scale.fill_(1)
            shift.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """``(2, B, d)`` to ``(2, B)``."""
        hidden = features
        for layer in range(2):
            hidden = torch.relu(torch.baddbmm(self.biases[layer], hidden, self.weights[layer]))
            hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            hidden = torch.addcmul(self.shifts[layer], hidden, self.scales[layer])
        hidden = torch.relu(hidden + features)
        return torch.baddbmm(self.biases[2], hidden, self.weights[2]).squeeze(-1)


class MlpNormalizer(Normalizer):
    """``α_i = log λ(e_i) − s_ii/τ_i`` with an MLP ``λ``, its target network, and last epoch's (AmorLIP, Algorithm 1).

    Every ``T_online`` steps: ``T_λ`` Adam updates towards ``Z_comb = β_t·λ_prev(e) + (1−β_t)·Z`` [AmorLIP 12], ``Z`` the
    batch's own. Every ``T_target`` steps: ``target ← ema_decay·target + (1−ema_decay)·online`` [11]. The target network
    predicts. Inputs are detached. With the defaults outside of ``amorlip`` (no previous network, no averaging, a fit in
    every step) this is NeuCLIP's ablation 'MLP instead of NPN'.

    Args:
        embed_dim: width ``d`` of the embeddings.
        width_factor: ``f_d``, hidden width over ``d``.
        normalizer_updates: ``T_λ``.
        normalizer_lr: Adam's learning rate.
        normalizer_objective: see :func:`functional.amortization_objective`.
        fit_every: ``T_online``.
        target_every: ``T_target``.
        ema_decay: AmorLIP's α.
        previous_weight: ``β_T``.
        reinitialize: start the online network anew at every epoch.
        epochs: epochs of the run, for ``β_t = β_T − ½β_T(1 + cos(π·epoch/epochs))``.
        seed: of the start values.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        width_factor: float,
        normalizer_updates: int,
        normalizer_lr: float,
        normalizer_objective: str,
        fit_every: int,
        target_every: int,
        ema_decay: float,
        previous_weight: float,
        reinitialize: bool,
        epochs: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.updates = normalizer_updates
        self.lr = normalizer_lr
        self.objective = normalizer_objective
        self.fit_every = fit_every
        self.target_every = target_every
        self.ema_decay = ema_decay
        self.previous_weight = previous_weight
        self.reinitialize = reinitialize
        self.epochs = epochs
        self.seed = seed
        self.online = TwoSidedMlp(embed_dim, width_factor)
        self.target = TwoSidedMlp(embed_dim, width_factor).requires_grad_(False)
        self.previous = TwoSidedMlp(embed_dim, width_factor).requires_grad_(False)
        self.adam = InnerAdam(self.online)
        self.epoch_step = 0
        self._warned = False
        self._initialize(0)
        _copy(self.target, self.previous)

    def get_extra_state(self) -> dict[str, Any]:
        """Counters."""
        return {"epoch_step": self.epoch_step}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Counters."""
        self.epoch_step = state["epoch_step"]

    def start_epoch(self, epoch: int) -> None:
        """The target network becomes the previous one; online and target start anew if asked to."""
        self._warn_of_short_epochs()
        _copy(self.target, self.previous)
        if self.reinitialize:
            self._initialize(epoch)
        self.epoch_step = 0

    def beta(self, epoch: int) -> float:
        """``β_t``, the weight of the previous epoch's target network."""
        return self.previous_weight - F.cosine_decay(self.previous_weight, 0.0, epoch, self.epochs)

    def _initialize(self, epoch: int) -> None:
        self.online.initialize(generator("cpu", self.seed, "mlp", epoch))
        self.adam.reset()
        _copy(self.online, self.target)

    def _warn_of_short_epochs(self) -> None:
        if self.reinitialize and not self._warned and 0 < self.epoch_step < _STEPS_AN_EPOCH_NEEDS:
            self._warned = True
            warnings.warn(
                f"the last epoch had {self.epoch_step} steps and the normalizer network starts anew at each epoch: below "
                f"about {_STEPS_AN_EPOCH_NEEDS} steps an epoch it does not become accurate; consider reinitialize=False "
                "(--no-reinitialize)",
                stacklevel=4,
            )

    def fits_now(self) -> bool:
        """Whether the next :meth:`step` fits the network; only then it needs the global batch."""
        return self.epoch_step % self.fit_every == 0

    def step(self, block: GatheredBatch, fit_block: GatheredBatch | None = None) -> Estimate:
        """See :class:`Normalizer`.

        Args:
            block: what to estimate.
            fit_block: the global batch to fit, if it is another one; needed where :meth:`fits_now`.
        """
        if self.fits_now():
            self._fit(fit_block or block)
        if self.epoch_step % self.target_every == 0:
            self._average_target(block.scale_ok)
        self.epoch_step += 1
        return self.predict(block)

    @torch.no_grad()
    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        return Estimate(self.target(block.features) - block.positive / block.tau)

    def _log_batch_partition(self, block: GatheredBatch) -> Tensor:
        return block.log_estimate + block.positive / block.tau

    @torch.no_grad()
    def _fit(self, block: GatheredBatch) -> None:
        log_batch = self._log_batch_partition(block)
        log_target = F.log_mix(log_batch, self.previous(block.features), self.beta(block.epoch))

        def objective(anchors: slice) -> Tensor:
            """These anchors' part of the mean over all."""
            log_lambda = self.online(block.features[:, anchors])
            others = (values[:, anchors] for values in (log_target, log_batch, block.tau))
            return block.mean(F.amortization_objective(self.objective, log_lambda, *others), anchors).sum()

        width = _GRAPH_TENSORS * block.features.shape[2]
        parts = [partial(objective, anchors) for anchors in anchor_chunks(slice(0, block.size), width)]
        for _ in range(self.updates):
            self.adam.step(self.online, parts, self.lr, block.ok)

    @torch.no_grad()
    def _average_target(self, ok: Tensor) -> None:
        share = torch.where(ok, 1 - self.ema_decay, 0).to(self.target.biases[0].dtype)
        for average, value in zip(self.target.parameters(), self.online.parameters(), strict=True):
            average.lerp_(value, share)


class PartitionNormalizer(MlpNormalizer):
    """AmorLIP's own: the partition function contains the positive pair, and its second stage may stay in a process.

    Args:
        negatives_only: fit ``Z = (1/B) Σ_{j≠i}`` and add the anchor's own pair afterwards (AmorLIP, Table 3).
        gather_stage2: contrast the global batch in the second stage, too, instead of each process's own samples.
        options: see :class:`MlpNormalizer`.
    """

    def __init__(self, *, negatives_only: bool, gather_stage2: bool, **options: Any) -> None:
        super().__init__(**options)
        self.negatives_only = negatives_only
        self.gather_stage2 = gather_stage2

    def _log_batch_partition(self, block: GatheredBatch) -> Tensor:
        if not self.negatives_only:
            return super()._log_batch_partition(block)
        log_share = torch.log(block.count - 1) - torch.log(block.count)
        return block.log_g + log_share + block.positive / block.tau

    @torch.no_grad()
    def predict(self, block: GatheredBatch) -> Estimate:
        """See :class:`Normalizer`."""
        alpha = super().predict(block).alpha
        return Estimate(torch.logaddexp(alpha, -torch.log(block.count)) if self.negatives_only else alpha)


def _copy(source: nn.Module, destination: nn.Module) -> None:
    with torch.no_grad():
        for new, old in zip(source.parameters(), destination.parameters(), strict=True):
            old.copy_(new)
