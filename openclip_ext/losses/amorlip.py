"""AmorLIP: log-normalizers predicted from the embedding by a multi-layer perceptron.

Sun et al., *AmorLIP: Efficient Language-Image Pretraining via Amortization*, arXiv:2505.18983, 2025; equation numbers in
[brackets] are from this paper. With ``c = 1/τ``, the partition function is ``Z_i = (1/B) Σ_j exp(c·s_ij)``, including the
positive pair. One MLP per side predicts ``log λ(e_i) ≈ log Z_i``, so ``α_i = log λ(e_i) − c·s_ii``.

- Stage I, every ``T_online`` steps: ``T_λ`` Adam updates towards ``Z_comb = β_t·λ_prev(e) + (1−β_t)·Z``              [12]
- every ``T_target`` steps: ``target ← α·target + (1−α)·online``                                                      [11]
- Stage II, every step, with the target network's ``λ``, by default on each process's own batch:                       [6]
  ``½(ℓ/c + ρ/c)``, ``ℓ = −2c·mean_i s_ii + Σ_k mean_i mean_j exp(c·s_ij − log λ_k,i)``.
  The outer ½ is not in the paper. We add it because all losses of this package average the two sides.

Naive float64 version: ``tests/references/networks.py``. Page: ``docs/methods/amorlip.md``.

Example:
    >>> loss = openclip_ext.create_loss("amorlip", embed_dim=512, epochs=30)
    >>> loss.start_epoch(epoch)  # copies the target network to the previous network
    >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from openclip_ext import distributed
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.host_number import HostNumber
from openclip_ext.contrastive.inner_optimizers import StateAdam
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN, PARTITION_MEAN, Estimand, Objective
from openclip_ext.contrastive.seeding import generator
from openclip_ext.contrastive.similarities import anchor_chunks

# Number of tensors of the embeddings' size in the autograd graph of a fit.
_GRAPH_TENSORS = 8


class TwoSidedMlp(nn.Module):
    """Two MLPs for ``log λ(e)``, one per side, which are evaluated together.

    The layers are from AmorLIP's released code: Linear(d, f_d·d), ReLU, LayerNorm, Linear(f_d·d, d), ReLU, LayerNorm, addition
    of the input, ReLU, Linear(d, 1).
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
    def initialize(self, random: torch.Generator | None) -> None:
        """Initialize like ``nn.Linear`` and ``nn.LayerNorm``, with values drawn on the CPU to be equal on all devices."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            for parameter in (weight, bias):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=random))
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            scale.fill_(1)
            shift.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Return ``log λ`` ``(2, B)`` of embeddings ``(2, B, d)``."""
        hidden = features
        for layer in range(2):
            hidden = torch.relu(torch.baddbmm(self.biases[layer], hidden, self.weights[layer]))
            hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            hidden = torch.addcmul(self.shifts[layer], hidden, self.scales[layer])
        hidden = torch.relu(hidden + features)
        return torch.baddbmm(self.biases[2], hidden, self.weights[2]).squeeze(-1)


class MlpNormalizer(Normalizer):
    """Log-normalizers ``α_i = log λ(e_i) − s_ii/τ_i``: an MLP ``λ`` sees the embedding ``e_i`` (AmorLIP, Algorithm 1).

    There are three MLPs: the online, the target and the previous network. The target network makes the predictions. The
    previous network is the target network of the last epoch. By default, losses other than AmorLIP use no previous network
    and no averaging, and fit in every step. In ``neuclip``, this normalizer is therefore the ablation 'MLP instead of NPN' of
    the NeuCLIP paper.
    """

    estimates: ClassVar[tuple[Estimand, ...] | None] = (NEGATIVES_MEAN,)

    def __init__(
        self,
        *,
        embed_dim: int,
        width_factor: float,
        normalizer_updates: int,
        normalizer_lr: float,
        normalizer_objective: str,
        l2_log_weight: float,
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
        self.l2_log_weight = l2_log_weight
        self.fit_every = fit_every
        self.target_every = target_every
        self.ema_decay = ema_decay
        self.previous_weight = previous_weight
        self.reinitialize = reinitialize
        self.depends_on_epoch = reinitialize or previous_weight > 0
        self.epochs = epochs
        self.seed = seed
        self.online = TwoSidedMlp(embed_dim, width_factor)
        self.target = TwoSidedMlp(embed_dim, width_factor).requires_grad_(False)
        self.previous = TwoSidedMlp(embed_dim, width_factor).requires_grad_(False)
        self.adam = StateAdam(self.online)
        self._epoch_step = HostNumber()
        self._initialize(0)
        self.previous.load_state_dict(self.target.state_dict())

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._epoch_step.get())

    def set_extra_state(self, state: Tensor) -> None:
        self._epoch_step.set(int(state))

    def start_epoch(self, epoch: int) -> None:
        """Copy the target network to the previous network. If ``reinitialize``, initialize the other two again."""
        self.previous.load_state_dict(self.target.state_dict())
        if self.reinitialize:
            self._initialize(epoch)
        self._epoch_step.set(0)

    def beta(self, epoch: int | Tensor) -> float | Tensor:
        """Return ``β_t``, the weight of the previous epoch's target network."""
        return self.previous_weight - log_math.cosine_decay(self.previous_weight, 0.0, epoch, self.epochs)

    def _initialize(self, epoch: int) -> None:
        self.online.initialize(generator("cpu", self.seed, "mlp", epoch))
        self.adam.reset()
        self.target.load_state_dict(self.online.state_dict())

    def step(self, stats: ContrastStats) -> Estimate:
        """Fit the online network to the global batch and update the target network, each if it is due; then predict."""
        step, batch = self._epoch_step.get(), stats.batch
        fits, averages = step % self.fit_every == 0, step % self.target_every == 0
        # In a compiled graph, both conditions are tensors. The graph computes a fit in every step, but applies only a due fit.
        if not isinstance(fits, bool):
            self._fit(stats.all_gather(), fits)
            self._average_target(_on_all_processes(batch) & averages)
        else:
            if fits:
                self._fit(stats.all_gather())
            if averages:
                self._average_target(_on_all_processes(batch))
        self._epoch_step.add(1)
        return self.predict(stats)

    def predict(self, stats: ContrastStats) -> Estimate:
        return Estimate(self.target(stats.batch.features) - stats.positive_exponent)

    def _log_batch_partition(self, stats: ContrastStats) -> Tensor:
        """Return ``log Z`` of the mini-batch, ``(2, B)``."""
        return stats.log_estimate + stats.positive_exponent

    def _fit(self, stats: ContrastStats, due: Tensor | bool = True) -> None:
        batch = stats.batch  # of all processes, because one process's own batch may be unusable
        log_batch = self._log_batch_partition(stats)
        log_target = log_math.log_mix(log_batch, self.previous(batch.features), self.beta(batch.epoch))

        def objective(anchors: slice, online: Callable[[Tensor], Tensor]) -> Tensor:
            log_lambda = online(batch.features[:, anchors])
            others = (values[:, anchors] for values in (log_target, log_batch, stats.tau))
            values = amortization_objective(self.objective, log_lambda, *others, l2_log_weight=self.l2_log_weight)
            return batch.mean(values, anchors).sum()

        elements = 2 * _GRAPH_TENSORS * batch.features.shape[2]
        parts = [partial(objective, anchors) for anchors in anchor_chunks(slice(0, batch.size), elements)]
        for _ in range(self.updates):
            self.adam.step(self.online, parts, self.lr, batch.ok & due)

    def _average_target(self, ok: Tensor) -> None:
        share = torch.where(ok, 1 - self.ema_decay, 0).to(self.target.biases[0].dtype)
        for average, value in zip(self.target.parameters(), self.online.parameters(), strict=True):
            average.lerp_(value, share)


def _on_all_processes(batch: GatheredBatch) -> Tensor:
    """Return :attr:`GatheredBatch.ok` of all processes' samples, 0-d bool. Collective: all ranks call it."""
    if batch.world_size == distributed.world_size():
        return batch.ok
    return distributed.all_reduce_max((~batch.ok).to(torch.float32)) == 0


def amortization_objective(
    name: str, log_lambda: Tensor, log_target: Tensor, log_batch: Tensor, tau: Tensor, *, l2_log_weight: float
) -> Tensor:
    """Return the value of the network's objective for each anchor. All tensors are ``(2, b)``, for ``b`` anchors per side.

    The divergences give the batch's pairs the probabilities ``exp(c·s_ij)/(B·Z_comb)``, whose sum is the weight ``Z/Z_comb``.

    Args:
        name: ``l2-log`` [10], ``kl`` and ``js`` [8], ``kl-printed`` [9, as printed], ``unified`` [NeuCLIP 12].
        log_lambda: the network's prediction ``log λ``.
        log_target: ``log Z_comb`` [12].
        log_batch: ``log Z`` of the batch.
        tau: temperatures of the anchors.
        l2_log_weight: weight of the l2-log term that is added to the divergences (Appendix C: 0.1).
    """
    log_ratio = log_target - log_lambda
    if name == "unified":
        return tau * (log_math.saturating_exp(log_ratio) + log_lambda)
    squared = 0.5 * log_ratio.square()
    if name == "l2-log":
        return squared
    log_ratio = log_ratio.clamp(max=log_math.max_exponent(log_ratio.dtype))
    ratio = log_ratio.exp()
    if name == "kl":
        divergence = ratio * log_ratio - ratio + 1
    elif name == "js":
        divergence = 0.5 * (ratio * log_ratio - (ratio + 1) * (torch.log1p(ratio) - math.log(2)))
    else:  # kl-printed
        divergence = ratio * log_ratio
    return log_math.saturating_exp(log_batch - log_target) * divergence + l2_log_weight * squared


class PartitionObjective(Objective):
    """The objective of stage II [6]: ``½(ℓ/c + ρ/c)`` with ``c = 1/τ`` and ``α = log λ − c·s_ii``.

    The positive pair is one of the ``B`` terms of the mean. The term ``−s_ii`` has the coefficient 1. The derivative with
    respect to the temperature treats ``λ`` as constant.
    """

    estimand = PARTITION_MEAN
    regularized = True
    depends_on_gaps = False

    def positive_pair(self, stats: ContrastStats, alpha: Tensor, weight_sum: Tensor) -> Tensor:
        return log_math.saturating_exp(-alpha) / stats.batch.pairs - 1

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return stats.tau * batch_to_estimate - stats.batch.positive

    def tau_gradient(
        self, tau: Tensor, alpha: Tensor, batch_to_estimate: Tensor, positive: Tensor, gap: Tensor
    ) -> Tensor:
        return (positive * (1 - batch_to_estimate) - gap) / tau

    def regularizer(self, rho: float | Tensor) -> float | Tensor:
        return 0.5 * rho


class PartitionNormalizer(MlpNormalizer):
    """The MLPs of the AmorLIP paper. By default, their partition function includes the positive pair."""

    estimates = (PARTITION_MEAN,)
    contrasts_locally = True

    def __init__(self, *, negatives_only: bool, gather_stage2: bool, **options: Any) -> None:
        super().__init__(**options)
        self.negatives_only = negatives_only
        self.contrasts_locally = not gather_stage2

    def _log_batch_partition(self, stats: ContrastStats) -> Tensor:
        if not self.negatives_only:
            return super()._log_batch_partition(stats)
        return stats.log_sums - stats.batch.log_pairs

    def predict(self, stats: ContrastStats) -> Estimate:
        alpha = super().predict(stats).log_normalizer
        if not self.negatives_only:
            return Estimate(alpha)
        return Estimate(torch.logaddexp(alpha, -stats.batch.log_pairs))
