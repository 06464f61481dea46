"""Global contrastive losses: a surrogate over estimated log-normalizers, with a temperature scheme.

How the gradient is exact without communication in the backward pass: for given ``α`` and ``τ`` the loss's gradient is
linear in the pairs' weights, and a process that knows all embeddings and all ``α_i`` can compute the gradients of its own
embeddings by itself, as anchors and as everybody's negatives. So the forward pass gathers ``2·B·d`` values and ``2·B``
scalars, and the backward pass nothing. Gradients of the embeddings are multiplied by the number of processes, so that the
mean over processes that DistributedDataParallel takes of the parameters' gradients is the gradient of one process with the
whole batch; the gradient of a global temperature is the mean over this process's own anchors.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext.contrastive import log_math as F
from openclip_ext.contrastive.batch import GatheredBatch, LocalBatch, gather_batch
from openclip_ext.contrastive.loss import ContrastiveLoss, without_autocast
from openclip_ext.contrastive.normalizer import Estimate, Normalizer
from openclip_ext.contrastive.objectives import Anchors, Surrogate
from openclip_ext.contrastive.similarities import Similarities
from openclip_ext.contrastive.temperature import TemperatureScheme
from openclip_ext.losses.amorlip import PartitionNormalizer

_QUANTILES = (0.1, 0.5, 0.9)


class _WithGradients(torch.autograd.Function):
    """A value whose gradients were computed along with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: int, *tensors_and_gradients: Tensor) -> Tensor:
        ctx.types = [tensor.dtype for tensor in tensors_and_gradients[:number]]
        ctx.save_for_backward(*tensors_and_gradients[number:])
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            (upstream * gradient).to(dtype) if needed else None
            for gradient, dtype, needed in zip(ctx.saved_tensors, ctx.types, ctx.needs_input_grad[2:], strict=False)
        ]
        return None, None, *gradients, *[None] * len(gradients)


def with_gradients(value: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """``value`` (0-d, without graph) with a given gradient for each ``(tensor, gradient)``."""
    tensors, gradients = zip(*pairs, strict=True)
    return _WithGradients.apply(value, len(pairs), *tensors, *gradients)


class GlobalContrastiveLoss(ContrastiveLoss):
    """An estimator of the log-normalizers, a temperature scheme, and the surrogate between them.

    Create it with :func:`openclip_ext.create_loss`, which names the combinations that papers have. Equations:
    ``docs/methods/README.md``.

    Args:
        surrogate: what is minimised for given log-normalizers.
        normalizer: gives the log-normalizers.
        temperature: gives the temperatures.
        embed_dim: width of the embeddings, where a part of the loss fixes it.
        num_samples: size of the index space, where a part of the loss needs the index.
        views: see :class:`LocalBatch`.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        normalizer: Normalizer,
        temperature: TemperatureScheme,
        embed_dim: int | None,
        num_samples: int | None,
        views: int = 1,
    ) -> None:
        super().__init__()
        self.views = views
        self.surrogate = surrogate
        self.normalizer = normalizer
        self.temperature = temperature
        self.embed_dim = embed_dim
        self.num_samples = num_samples
        self.needs_index = normalizer.needs_index or temperature.needs_index
        self.learns_logit_scale = temperature.learns_logit_scale
        self.initial_logit_scale = temperature.initial_logit_scale
        self.logit_scale_lr = temperature.logit_scale_lr
        self.normalizers_include_positive = surrogate.includes_positive
        self._last: _Report | None = None
        self.register_buffer("index_out_of_range", torch.zeros((), dtype=torch.bool), persistent=False)

    @torch.no_grad()
    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`ContrastiveLoss`."""
        with without_autocast(image_features):
            batch = self._batch(image_features, text_features, logit_scale, index)
            block, _ = self._contrasted(batch, gather=True)
            alpha = self.normalizer.predict(block).alpha[:, block.own]
        return alpha[0], alpha[1]

    def start_epoch(self, epoch: int) -> None:
        """See :class:`ContrastiveLoss`."""
        if epoch == self.epoch:
            return
        super().start_epoch(epoch)
        self.normalizer.start_epoch(epoch)

    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None = None) -> None:
        """See :class:`ContrastiveLoss`."""
        with torch.no_grad():
            self.temperature.finish_logit_scale_step(parameter, before)

    def pop_nonfinite(self) -> list[tuple[int, list[int]]]:
        """See :class:`ContrastiveLoss`."""
        self._raise_if_out_of_range()
        return super().pop_nonfinite()

    def metrics(self) -> dict[str, float]:
        """Numbers of the last call, for the logs. Waits for the device.

        ``infonce`` is the plain mini-batch loss at the same temperatures, over the samples that were contrasted with one
        another, and ``chance`` its value for a model that knows nothing; ``weight_mean`` is the mean of ``exp(−α)(ε+g)``,
        1 for an estimate that agrees with the batch.
        """
        self._raise_if_out_of_range()
        if self._last is None:
            return {}
        last = self._last
        alpha, tau = last.alpha[last.valid], last.tau[last.valid]
        metrics = {
            "infonce": last.infonce.mean().item(),
            "chance": math.log(last.valid.shape[1] + 1 - self.views),
            "weight_mean": last.weight_mean.mean().item(),
        }
        if len(tau):
            metrics |= {
                "temperature_min": tau.min().item(),
                "temperature_median": tau.median().item(),
                "temperature_max": tau.max().item(),
            }
            quantiles = torch.quantile(alpha.double(), alpha.new_tensor(_QUANTILES).double()).tolist()
            metrics |= {f"alpha_q{round(100 * q)}": value for q, value in zip(_QUANTILES, quantiles, strict=True)}
        return metrics | self.normalizer.metrics(self.epoch) | self.temperature.metrics(self.epoch)

    def _raise_if_out_of_range(self) -> None:
        if self.index_out_of_range:
            self.index_out_of_range.zero_()
            raise ValueError(
                f"an index was outside of [0, {self.num_samples}) (those samples were left out): num_samples is too small, "
                "or the index is of another data set"
            )

    def _batch(self, *inputs: Any, **options: Any) -> LocalBatch:
        """See :class:`ContrastiveLoss`; with a checked index where the loss needs one."""
        batch = super()._batch(*inputs, **options)
        batch.index = self.check_index(batch.index, batch.image) if self.needs_index else None
        return batch

    def check_index(self, index: Tensor | None, features: Tensor) -> Tensor:
        """The index as int64 on the features' device; ValueError unless it has a position for each of them."""
        if index is None:
            raise ValueError(
                "this loss keeps state for each sample and needs index=, a (batch,) int64 tensor of positions in the data set"
            )
        integral = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
        if not integral or index.dtype == torch.bool or tuple(index.shape) != (len(features),):
            found = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(type(index).__name__)
            raise ValueError(f"index: expected int64 of shape ({len(features)},), found {found}")
        index = index.to(features.device, torch.int64, non_blocking=True)
        outside = (index < 0) | (index >= self.num_samples)
        if outside.is_cpu and bool(outside.any()):
            raise ValueError(
                f"index {index[outside].tolist()[:5]}: expected 0 <= index < num_samples={self.num_samples}: num_samples is "
                "too small, or the index is of another data set"
            )
        self.index_out_of_range = self.index_out_of_range.to(index.device) | outside.any()
        return index

    def _contrasted(self, batch: LocalBatch, gather: bool) -> tuple[GatheredBatch, Similarities]:
        """A block with its temperatures, similarities and batch estimates."""
        block = gather_batch(batch, self.num_samples if self.needs_index else None, gather)
        if block.size < 2 * block.views:
            raise ValueError("a contrastive loss needs at least 2 samples to contrast, found 1: raise the batch size")
        block.tau = self.temperature.temperatures(block)
        similarities = Similarities(block)
        block.log_g = similarities.log_g()
        block.log_estimate = self.surrogate.log_estimate(block.log_g, block)
        return block, similarities

    @torch.no_grad()
    def _estimated(self, batch: LocalBatch) -> tuple[GatheredBatch, Similarities, Estimate]:
        """What to contrast, and its log-normalizers; in training mode the normalizer takes its step."""
        normalizer = self.normalizer
        local = isinstance(normalizer, PartitionNormalizer) and not normalizer.gather_stage2
        block, similarities = self._contrasted(batch, gather=not local)
        if not self.training:
            return block, similarities, normalizer.predict(block)
        if local and normalizer.fits_now():
            fit_block, _ = self._contrasted(batch, gather=True)
            return block, similarities, normalizer.step(block, fit_block)
        return block, similarities, normalizer.step(block)

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """See :class:`ContrastiveLoss`."""
        block, similarities, estimate = self._estimated(batch)
        learns_own = self.training and self.temperature.learns_own
        with torch.no_grad():
            anchors = Anchors(
                tau=block.tau,
                alpha=torch.where(block.valid, estimate.alpha, 0),
                log_g=block.log_g,
                error=F.saturating_exp(block.log_estimate - estimate.alpha),
                positive=block.positive,
            )
            value = 0.5 * block.mean(self.surrogate.value(anchors)).sum()
            gradients, own = self._feature_gradients(
                block, similarities, estimate, anchors, with_tilt=learns_own or self.temperature.learns_logit_scale
            )
            self._last = _Report.of(block, anchors)
        pairs = [(batch.image, gradients[0]), (batch.text, gradients[1])]
        if own.tilt is not None:
            tau_gradient = torch.where(block.valid[block.own], self.surrogate.tau_gradient(own), 0)
            if learns_own:
                self._update_temperatures(block, tau_gradient)
            if self.temperature.learns_logit_scale:
                pairs.append((batch.logit_scale, self._through_logit_scale(0.5 * tau_gradient.sum(), block)))
        return {"contrastive_loss": with_gradients(value, *pairs), **self._regularizer(block, batch.logit_scale)}

    def _feature_gradients(
        self, block: GatheredBatch, similarities: Similarities, estimate: Estimate, anchors: Anchors, with_tilt: bool
    ) -> tuple[Tensor, Anchors]:
        """Gradients of this process's images and texts ``(2, B_local, d)``, and its anchors, with their tilt if asked for."""
        surrogate = self.surrogate
        excess = 1 - anchors.error
        factor = surrogate.pair_factor(block.tau) * (1 + estimate.batch_share * excess)
        factor = torch.where(block.valid, 0.5 * factor / block.count, 0)
        log_sum = block.log_g + torch.log(block.negatives)
        # exp(-α) divided by what the surrogate divides by, times the sum over the negatives [NeuCLIP 4].
        weight_sum = F.saturating_exp(log_sum - anchors.alpha - surrogate.log_divisor(block))
        pairs = similarities.gradients(block.log_g, factor * weight_sum, with_mean_similarity=with_tilt)
        own = _own_anchors(anchors, weight_sum, pairs.mean_similarity, block)
        through_own_pair = (factor * surrogate.own_pair(anchors, weight_sum, block))[:, block.own].sum(dim=0)
        gradients = pairs.features.addcmul_(through_own_pair[:, None], block.features[:, block.own].flip(0))
        if estimate.feature_gradient is not None:
            through_alpha = torch.where(block.valid, 0.5 * block.tau * excess / block.count, 0)
            gradients += estimate.feature_gradient(through_alpha[:, block.own])
        return torch.where(block.valid[block.own, None], gradients, 0) * block.world_size, own

    def _update_temperatures(self, block: GatheredBatch, tau_gradient: Tensor) -> None:
        gradient = block.gather_own(tau_gradient) + self.surrogate.regularizer(self.temperature.rho(block.epoch))
        self.temperature.update(block, gradient)

    def _through_logit_scale(self, tau_gradient: Tensor, block: GatheredBatch) -> Tensor:
        """Gradient of the logit scale from that of τ, a sum over this process's anchors: the mean over its share."""
        mean = tau_gradient * block.world_size / block.count
        return torch.where(block.ok, -mean / block.logit_scale.square(), 0)

    def _regularizer(self, block: GatheredBatch, logit_scale: Tensor) -> dict[str, Tensor]:
        rho = self.temperature.rho(block.epoch)
        if rho is None:
            return {}
        factor = self.surrogate.regularizer(rho)
        value = factor * block.mean(block.tau).mean()
        if not self.temperature.learns_logit_scale:
            return {"temperature_loss": value}
        gradient = torch.where(block.ok, -factor / block.logit_scale.square(), 0)
        return {"temperature_loss": with_gradients(value, (logit_scale, gradient))}


@dataclass
class _Report:
    """What :meth:`GlobalContrastiveLoss.metrics` needs of a step."""

    valid: Tensor
    tau: Tensor
    alpha: Tensor
    infonce: Tensor
    weight_mean: Tensor

    @classmethod
    def of(cls, block: GatheredBatch, anchors: Anchors) -> "_Report":
        return cls(
            valid=block.valid.expand(2, -1),
            tau=anchors.tau,
            alpha=anchors.alpha,
            infonce=block.mean(F.infonce(block.log_g, block.negatives)),
            weight_mean=block.mean(anchors.error),
        )


def _own_anchors(anchors: Anchors, weight_sum: Tensor, mean_similarity: Tensor | None, block: GatheredBatch) -> Anchors:
    """The anchors of this process, with their tilt where the mean similarity of their negatives is given."""
    own = block.own
    tilt = None
    if mean_similarity is not None:
        tilt = weight_sum[:, own] * (mean_similarity - block.positive[own])
    return Anchors(
        tau=anchors.tau[:, own],
        alpha=anchors.alpha[:, own],
        log_g=anchors.log_g[:, own],
        error=anchors.error[:, own],
        positive=anchors.positive[own],
        tilt=tilt,
    )
