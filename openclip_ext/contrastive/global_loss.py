"""The global contrastive loss, which combines an objective, a normalizer and a temperature scheme.

A step gathers the embeddings, gets the temperatures from the scheme, sums over each anchor's negatives
(:class:`Similarities`), gets ``α`` from the normalizer, and computes the gradients of the objective.

The gradient is exact, although the backward pass has no communication. For given ``α`` and ``τ``, the gradient is linear in
the weights of the pairs. So a process that has all embeddings and all ``α_i`` can compute the gradient with respect to its own
embeddings, both as anchors and as negatives of all anchors. The forward pass gathers ``2·B·d`` values and ``2·B`` scalars.
The gradients of the embeddings are multiplied by the number of processes, because DistributedDataParallel averages the
gradients of the parameters. The average then equals the gradient that a single process would compute with the full batch. For
a global temperature, each process computes the gradient of its own anchors, also multiplied by the number of processes.
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive import log_math
from openclip_ext.contrastive.batch import ContrastStats, LocalBatch, gather_batch
from openclip_ext.contrastive.checks import without_autocast
from openclip_ext.contrastive.equal_captions import NEGATIVE, POSITIVE, read_labels
from openclip_ext.contrastive.guide import Guide
from openclip_ext.contrastive.hard_negatives import HardNegatives
from openclip_ext.contrastive.loss import HARD_NEGATIVES, ContrastiveLoss
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import Objective
from openclip_ext.contrastive.similarities import Similarities
from openclip_ext.contrastive.steering import distill, read_reference, report, with_reference
from openclip_ext.contrastive.temperature import TemperatureScheme

_QUANTILES = (0.1, 0.5, 0.9)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, number: int, *tensors_and_gradients: Tensor) -> Tensor:
        ctx.types = [tensor.dtype for tensor in tensors_and_gradients[:number]]
        ctx.save_for_backward(*tensors_and_gradients[number:])
        return values.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch._foreach_mul(ctx.saved_tensors, upstream)
        cast = [gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.types, strict=True)]
        return None, None, *cast, *[None] * len(cast)


def mean_with_gradients(values: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the 0-d mean of ``values``, with known gradients: pairs of a tensor and the mean's gradient for this tensor."""
    pairs = tuple(pair for pair in pairs if pair[0].requires_grad)
    if not pairs:  # Dynamo cannot trace the function below if no input needs a gradient
        return values.mean()
    tensors, gradients = zip(*pairs, strict=True)
    return _WithGradients.apply(values, len(pairs), *tensors, *gradients)


class GlobalContrastiveLoss(ContrastiveLoss):
    """A loss with an objective, a normalizer (estimator of the log-normalizers) and a temperature scheme.

    :func:`openclip_ext.create_loss` creates such a loss from its name. Equations: ``docs/methods/README.md``.

    Args:
        objective, normalizer, temperature: The three parts of the loss.
        embed_dim, num_samples: Embedding dimension and size of the data set. None means that no part of the loss needs it.
        reference_dim, steer, distill, reference_temperature: See :mod:`openclip_ext.contrastive.steering`.
        mask_margin: See :mod:`openclip_ext.contrastive.guide`. None (default) means that all negatives count.
        equal_captions: See :mod:`openclip_ext.contrastive.equal_captions`.

    Raises:
        ValueError: The parts are incompatible (:func:`incompatibility`), or do not support this choice of ``equal_captions``.
    """

    def __init__(
        self,
        objective: Objective,
        normalizer: Normalizer,
        temperature: TemperatureScheme,
        embed_dim: int | None,
        num_samples: int | None,
        reference_dim: int = 0,
        *,
        equal_captions: str = NEGATIVE,
        steer: bool = True,
        distill: float = 0.0,
        reference_temperature: float = 0.01,
        mask_margin: float | None = None,
    ) -> None:
        super().__init__()
        reason = incompatibility(type(objective), type(normalizer), type(temperature))
        if reason is not None:
            names = ", ".join(type(part).__name__ for part in (objective, normalizer, temperature))
            raise ValueError(f"{names}: {reason}")
        if equal_captions == POSITIVE and objective.estimand.includes_positive:
            raise OptionError(
                "equal_captions",
                "equal_captions=positive: the normalizer of this loss contains only one positive pair per anchor. Use "
                "equal_captions=mask, or a loss without a normalizer",
            )
        self.equal_captions = equal_captions
        self.needs_positives = equal_captions != NEGATIVE
        if self.needs_positives:
            normalizer.keep_labels()
            temperature.keep_labels()
        self.reference_dim, self.steers = reference_dim, steer and reference_dim > 0
        self.mask_margin = mask_margin if reference_dim else None
        if self.mask_margin is not None:
            normalizer.keep_reference(reference_dim)
            temperature.keep_reference(reference_dim)
        self.accepts_hard_negatives = self.views == 1 and not self.steers  # hard negatives have no reference embeddings
        self.distill, self.reference_temperature = distill, reference_temperature
        self.objective = objective
        self.normalizer = normalizer
        self.temperature = temperature
        self.embed_dim = embed_dim
        self.num_samples = num_samples
        self.needs_index = normalizer.needs_index or temperature.needs_index
        self.keeps_state = any((*part.parameters(), *part.buffers()) for part in (normalizer, temperature))
        self.depends_on_epoch = normalizer.depends_on_epoch or temperature.depends_on_epoch
        self.uses_logit_scale = temperature.uses_logit_scale
        self.learns_logit_scale = temperature.learns_logit_scale
        self.initial_logit_scale = temperature.initial_logit_scale
        self.logit_scale_bounds = temperature.logit_scale_bounds
        self.logit_scale_lr = temperature.logit_scale_lr
        self.normalizers_include_positive = objective.estimand.includes_positive
        self._last: _Report | None = None
        self._last_steered: LocalBatch | None = None

    # --- one step ----------------------------------------------------------------------------------------------------

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        batch = replace(self._add_labels(batch, outputs), hard=outputs.get(HARD_NEGATIVES))
        steered = batch
        if self.reference_dim:
            reference = read_reference(outputs.get("reference"), batch, self.reference_dim)
            steered = with_reference(batch, reference)
            if self.steers:
                batch = steered
            if self.mask_margin is not None:
                batch = replace(batch, guide=Guide(reference, self.mask_margin))
        learns_own = self.training and self.temperature.learns_own
        with torch.no_grad():
            stats, similarities = self._contrast(batch, gather=not self.normalizer.contrasts_locally)
            captions, hard = stats, None if batch.hard is None else HardNegatives(stats)
            estimate, batch_to_estimate = self._estimate(captions, hard)
            stats = captions if hard is None else hard.joined
            values = stats.batch.mean(self.objective.value(stats, estimate.log_normalizer, batch_to_estimate))
            values = values.masked_fill(~stats.batch.finite, math.nan)  # without negatives, it is 0
            gradients, gap = self._feature_gradients(
                captions,
                similarities,
                estimate,
                batch_to_estimate,
                learns_own or self.temperature.learns_logit_scale,
                hard,
            )
            gathered, gaps = stats.batch, stats.log_sum_negatives
            self._last = _Report(
                gathered.valid,
                gathered.sample_weight,
                gathered.negatives,
                stats.tau,
                estimate.log_normalizer,
                gaps,
                batch_to_estimate,
            )
            self._last_steered = steered.detached() if self.reference_dim else None
            given = (batch.image, batch.text) if batch.hard is None else (batch.image, batch.text, batch.hard)
            pairs = list(zip(given, gradients, strict=True))
            if gap is not None:
                tau_gradient = self._tau_gradient(stats, estimate, batch_to_estimate, gap)
                if learns_own:
                    self._update_temperatures(stats, tau_gradient)
                if self.temperature.learns_logit_scale:
                    mean = gathered.mean(tau_gradient, gathered.local).mean()
                    pairs.append((batch.logit_scale, gathered.world_size * mean * gathered.scale_to_tau))
            if self.training and self.temperature.solves:
                self.temperature.solve(captions)
        return {
            "contrastive_loss": mean_with_gradients(values, *pairs),
            **self._regularizer(stats, batch.logit_scale),
            **self._distillation(stats, steered),
        }

    def _add_labels(self, batch: LocalBatch, outputs: dict[str, Any]) -> LocalBatch:
        if not self.needs_positives:
            return batch
        labels = read_labels(outputs.get("positives"), batch)
        return replace(batch, labels=labels, positives_attract=self.equal_captions == POSITIVE)

    def _contrast(self, local: LocalBatch, gather: bool) -> tuple[ContrastStats, Similarities]:
        batch = gather_batch(local, gather)
        if batch.size < 2:
            raise ValueError(
                "a contrastive loss needs at least 2 samples, found 1: increase the batch size. If this is the last batch of "
                "an epoch, set drop_last=True"
            )
        tau = self.temperature.temperatures(batch)
        # A scheme may return a view of its own temperatures, which it updates later in this step.
        similarities = Similarities(batch, tau.clone() if self.temperature.learns_own else tau)
        of_all = None if gather else lambda: self._contrast(local, gather=True)[0]
        stats = ContrastStats(batch, similarities.tau, similarities.log_sums(), self.objective.log_estimate, of_all)
        return stats, similarities

    def _estimate(self, stats: ContrastStats, hard: HardNegatives | None) -> tuple[Estimate, Tensor]:
        """Return the estimate of ``α``, and ``exp(−α)(ε+g)`` ``(2, B)``. In training mode, update the normalizer first."""
        estimate = self.normalizer.step(stats) if self.training else self.normalizer.predict(stats)
        # The estimate of a masked sample is arbitrary. Replacing it by 0 keeps all later values finite.
        estimate = replace(estimate, log_normalizer=estimate.log_normalizer.masked_fill(stats.batch.ignored, 0))
        if hard is not None:
            stats, estimate = hard.joined, hard.join(estimate, self.objective.estimand)
        return estimate, log_math.saturating_exp(stats.log_estimate - estimate.log_normalizer)

    def _feature_gradients(
        self,
        captions: ContrastStats,
        similarities: Similarities,
        estimate: Estimate,
        batch_to_estimate: Tensor,
        with_gap: bool,
        hard: HardNegatives | None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the gradients of this process's images, texts and hard negatives, ``(B_local, d)`` each.

        With ``with_gap``, also return ``Σ_j w_ij (s_ij − s_ii)`` of this process's anchors, ``(2, B_local)``.
        """
        batch, objective = captions.batch, self.objective
        joined = captions if hard is None else hard.joined
        # The factor 0.5 averages the two sides. DistributedDataParallel later divides by the number of processes.
        half = 0.5 * batch.world_size
        factor = base = half * objective.pair_factor(captions.tau) * batch.sample_weight
        if estimate.batch_coefficient:
            factor = torch.addcmul(base, base, 1 - batch_to_estimate, value=estimate.batch_coefficient)
        # Σ_j w_ij over an anchor's negatives [NeuCLIP 4].
        log_divisor = objective.estimand.log_divisor(joined)
        weight_sum = log_math.saturating_exp(captions.log_sum_negatives - estimate.log_normalizer - log_divisor)
        gradients, mean_similarity = similarities.gradients(captions.log_sums, factor * weight_sum, with_gap)
        parts = [*gradients]
        in_positive = factor * objective.positive_pair(joined, estimate.log_normalizer, weight_sum)
        if hard is not None:
            hard_sum = hard.weight_sums(estimate.log_normalizer, objective.estimand)
            # If α has a gradient, this is the sum of the gradients through g and through α.
            in_hard = hard_sum * base * (1 if estimate.feature_gradient is None else 2 - batch_to_estimate)
            if objective.depends_on_gaps:
                in_positive = in_positive - in_hard
            of_images, of_hard = hard.gradients(in_hard[0])
            gradients[0] += of_images
            parts.append(of_hard)
        in_positive = in_positive[:, batch.local]
        if batch.positive_means is None:
            # With one positive per anchor, no additional buffer of the features' size is needed.
            gradients.addcmul_(in_positive.sum(dim=0)[:, None], batch.others[:, batch.local])
        else:
            gradients.add_(batch.through_positive(in_positive))
        if estimate.feature_gradient is not None:
            through_alpha = captions.tau * (1 - batch_to_estimate) * batch.sample_weight
            gradients.add_(estimate.feature_gradient(through_alpha[:, batch.local]), alpha=half)
        if mean_similarity is None:
            return parts, None
        gap = weight_sum[:, batch.local] * (mean_similarity - batch.positive[..., batch.local])
        return parts, gap if hard is None else gap + hard.gap(hard_sum)

    def _tau_gradient(self, stats: ContrastStats, estimate: Estimate, batch_to_estimate: Tensor, gap: Tensor) -> Tensor:
        """Return the derivative of each local anchor's term with respect to the anchor's temperature, ``(2, B_local)``."""
        of_anchors = (stats.tau, estimate.log_normalizer, batch_to_estimate, stats.batch.positive)
        tau, alpha, batch_to_estimate, positive = (values[..., stats.batch.local] for values in of_anchors)
        gradient = self.objective.tau_gradient(tau, alpha, batch_to_estimate, positive, gap)
        if estimate.tau_slope is not None:
            gradient = gradient + tau * (1 - batch_to_estimate) * estimate.tau_slope
        return gradient

    def _update_temperatures(self, stats: ContrastStats, tau_gradient: Tensor) -> None:
        rho = self.temperature.rho(stats.batch.epoch)
        regularizer = 0.0 if rho is None else self.objective.regularizer(rho)
        self.temperature.update(stats, stats.batch.gather_local(tau_gradient) + regularizer)

    def _regularizer(self, stats: ContrastStats, logit_scale: Tensor) -> dict[str, Tensor]:
        batch = stats.batch
        rho = self.temperature.rho(batch.epoch)
        if rho is None:
            return {}
        factor = self.objective.regularizer(rho)
        values = factor * batch.mean(stats.tau)
        if not self.temperature.learns_logit_scale:
            return {"temperature_loss": values.mean()}
        return {"temperature_loss": mean_with_gradients(values, (logit_scale, factor * batch.scale_to_tau))}

    def _distillation(self, stats: ContrastStats, steered: LocalBatch) -> dict[str, Tensor]:
        if not self.distill:
            return {}
        with torch.no_grad():
            batch, tau = stats.batch, stats.tau
            if self.normalizer.contrasts_locally or not self.steers:
                batch = gather_batch(steered, gather=True)
            if self.normalizer.contrasts_locally:
                tau = batch.gather_local(tau)
            (image, text), model = batch.features[..., : self.reference_dim], batch.features[..., self.reference_dim :]
            reference = torch.stack([image, -text])
            values, gradients, scale_gradient = distill(batch, model, reference, tau, self.reference_temperature)
        pairs = [
            (side[:, self.reference_dim :], self.distill * gradient)
            for side, gradient in zip((steered.image, steered.text), gradients, strict=True)
        ]
        if self.temperature.learns_logit_scale:
            pairs.append((steered.logit_scale, self.distill * scale_gradient * batch.ok))
        return {"distillation_loss": mean_with_gradients(self.distill * values, *pairs)}

    # --- around the step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_normalizers(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        index: Tensor | None = None,
        reference: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-normalizers that the normalizer predicts for these samples. Collective: all ranks call it."""
        with without_autocast(image_features):
            batch = self._batch(image_features, text_features, logit_scale, index)
            stats, _ = self._contrast(self._steered(batch, reference), gather=True)
            alpha = self.normalizer.predict(stats).log_normalizer[:, stats.batch.local]
        return alpha[0], alpha[1]

    @torch.no_grad()
    def anchor_temperatures(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        index: Tensor | None = None,
        reference: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the temperatures ``(2, B_local)`` of these samples' anchors. Collective: all ranks call it."""
        with without_autocast(image_features):
            batch = self._batch(image_features, text_features, logit_scale, index)
            gathered = gather_batch(self._steered(batch, reference), gather=True)
            return self.temperature.temperatures(gathered)[:, gathered.local]

    def _steered(self, batch: LocalBatch, reference: tuple[Tensor, Tensor] | None) -> LocalBatch:
        return with_reference(batch, read_reference(reference, batch, self.reference_dim)) if self.steers else batch

    def start_epoch(self, epoch: int) -> None:
        is_new = epoch != self.epoch
        super().start_epoch(epoch)
        if is_new:
            self.normalizer.start_epoch(epoch)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None = None) -> None:
        with torch.no_grad():
            self.temperature.finish_logit_scale_step(parameter, before)
        super().finish_logit_scale_step(parameter, before)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last call, for the logs. Synchronizes with the device.

        ``infonce`` is the mini-batch InfoNCE loss of the last call's samples at their temperatures. ``chance`` is the value of
        InfoNCE if all embeddings are equal. ``weight_mean`` is the mean of ``exp(−α)(ε+g)``, which is 1 if each ``α`` equals
        the batch's estimate ``log(ε+g)``.
        """
        self._raise_if_out_of_range()
        if self._last is None:
            return {}
        last = self._last
        alpha, tau = last.log_normalizer[:, last.valid], last.tau[:, last.valid]
        infonce = log_math.log_add(last.log_sum_negatives, 1.0)
        metrics = {
            "infonce": (infonce @ last.sample_weight).mean().item(),
            "chance": last.chance(),
            "weight_mean": (last.batch_to_estimate @ last.sample_weight).mean().item(),
        }
        if tau.numel():
            metrics |= {
                "temperature_min": tau.min().item(),
                "temperature_median": tau.double().quantile(0.5).item(),
                "temperature_max": tau.max().item(),
            }
            quantiles = torch.quantile(alpha.double(), alpha.new_tensor(_QUANTILES).double()).tolist()
            metrics |= {f"alpha_q{round(100 * q)}": value for q, value in zip(_QUANTILES, quantiles, strict=True)}
        if self._last_steered is not None:
            metrics |= report(self._last_steered, self.reference_dim)
        return metrics | self.normalizer.metrics(self.epoch) | self.temperature.metrics(self.epoch)


def incompatibility(
    objective: type[Objective], normalizer: type[Normalizer], temperature: type[TemperatureScheme]
) -> str | None:
    """Return why these parts cannot form a loss, or None if they can."""
    if normalizer.estimates is not None and objective.estimand not in normalizer.estimates:
        offered = " or ".join(estimand.formula for estimand in normalizer.estimates)
        return (
            f"the objective needs an estimate of {objective.estimand.formula}, but this normalizer estimates {offered}"
        )
    if normalizer.differentiable and not objective.differentiates_alpha:
        return "the objective treats α as constant, but this normalizer can pass the gradient of α to the encoders"
    if temperature.regularized and not objective.regularized:
        return "the objective has no regularizer ρ, but this temperature scheme needs one"
    if normalizer.contrasts_locally and (temperature.learns_own or temperature.solves):
        return "this normalizer can use each process's own batch, but this temperature scheme needs the global batch"
    return None


@dataclass(frozen=True)
class _Report:
    """Values of a step for :meth:`GlobalContrastiveLoss.metrics`. Embeddings are not included, to save memory."""

    valid: Tensor
    sample_weight: Tensor
    negatives: Tensor
    tau: Tensor
    log_normalizer: Tensor
    log_sum_negatives: Tensor
    batch_to_estimate: Tensor

    def chance(self) -> float:
        """Return the mean of ``log(1 + N)`` over valid samples with ``N`` negatives each; 0 if no sample is valid."""
        negatives = self.negatives[..., self.valid] if self.negatives.ndim else self.negatives
        return statistics.fmean(math.log(1 + number) for number in negatives.reshape(-1).tolist() or [0.0])
