"""OpenCLIP's ``ClipLoss`` and ``SigLipLoss`` with the interface of this package's losses. Their arithmetic is unchanged.

With ``temperature_scheme`` or ``normalizer``, ``openclip`` is composed of these parts and the objective of ``ClipLoss``.

CLIP: Radford et al., *Learning Transferable Visual Models From Natural Language Supervision*, ICML 2021. SigLIP: Zhai et al.,
*Sigmoid Loss for Language Image Pre-Training*, ICCV 2023. Page: ``docs/methods/openclip-siglip.md``.

Example:
    >>> loss = openclip_ext.create_loss("openclip")
    >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
    >>> loss = openclip_ext.create_loss("openclip", temperature_scheme="constant", temperature=0.05)
"""

import math
from typing import Any

import torch
from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext import distributed
from openclip_ext.contrastive.batch import ContrastStats, LocalBatch
from openclip_ext.contrastive.equal_captions import NEGATIVE, POSITIVE, read_labels
from openclip_ext.contrastive.loss import HARD_NEGATIVES, ContrastiveLoss
from openclip_ext.contrastive.normalizer import contrast_minibatch, minibatch_metrics
from openclip_ext.contrastive.objectives import PARTITION_MEAN, Unscaled
from openclip_ext.state.sharded_table import merge_labels

# Outputs of a captioner in addition to its embeddings.
_CAPTIONS = {"logits", "labels"}


class OpenClipLoss(ContrastiveLoss):
    """``open_clip.ClipLoss``, or ``CoCaLoss`` for captioners, or ``DistillClipLoss`` for models with a teacher's outputs.

    With ``equal_captions="mask"``, other samples with the anchor's caption are excluded from the anchor's softmax. With
    ``"positive"``, the loss is the mean cross-entropy over all samples with the anchor's caption.

    With ``hard_negative_features``, the softmax of each image also has the hard negatives of all samples, as in NegCLIP
    (Yuksekgonul et al., *When and why vision-language models behave like bags-of-words*, ICLR 2023, section 4). The softmax of
    the texts is unchanged.
    """

    follows_autocast = True
    uses_logit_bias = True
    trains_captions = True
    _logit_scale: Tensor | None = None
    _chance: float | Tensor

    def __init__(
        self,
        *,
        local_loss: bool,
        gather_with_grad: bool,
        coca_caption_loss_weight: float,
        coca_contrastive_loss_weight: float,
        equal_captions: str,
    ) -> None:
        super().__init__()
        self.equal_captions = equal_captions
        self.needs_positives = equal_captions != NEGATIVE
        # With local_loss, only gather_with_grad gives gathered embeddings, and so the hard negatives, a gradient.
        self.accepts_hard_negatives = gather_with_grad or not local_loss
        common = {
            "local_loss": local_loss,
            "gather_with_grad": gather_with_grad,
            "rank": distributed.rank(),
            "world_size": distributed.world_size(),
        }
        self.clip = ClipLoss(**common)
        self.coca = CoCaLoss(
            caption_loss_weight=coca_caption_loss_weight, clip_loss_weight=coca_contrastive_loss_weight, **common
        )
        self.distill = DistillClipLoss(**common)
        self.trains_captions_only = coca_contrastive_loss_weight == 0

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        distributed.check_world_size(self.clip.world_size)
        if not batch.learning:
            distributed.check_equal_sizes(batch.image)
        features = {"image_features": batch.image, "text_features": batch.text, "logit_scale": batch.logit_scale}
        self._chance = math.log(len(batch.image) * self.clip.world_size)
        if self.needs_positives or HARD_NEGATIVES in outputs:
            terms = {"contrastive_loss": self._with_other_candidates(batch, features, outputs)}
        else:
            terms = self._openclips(features, outputs)
        self._logit_scale = batch.logit_scale.detach()
        weight = self.coca.clip_loss_weight if "caption_loss" in terms else 1.0
        self._infonce = terms["contrastive_loss"].detach()
        # Division by 1 would make the inductor compiler of PyTorch 2.14 return the loss without its graph.
        if weight != 1:
            # If CoCa's contrastive weight is 0, CoCaLoss does not compute InfoNCE.
            self._infonce = self._infonce / weight if weight else torch.tensor(math.nan)
        return terms

    def _openclips(self, features: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, Tensor]:
        loss: nn.Module = self.clip
        used = {"logit_bias": outputs["logit_bias"]}
        if "dist_image_features" in outputs:
            loss, used = self.distill, {name: value for name, value in outputs.items() if name.startswith("dist_")}
        elif outputs.keys() >= _CAPTIONS:
            loss, used = self.coca, {name: outputs[name] for name in _CAPTIONS}
        return loss(**features, **used, output_dict=True)

    def _with_other_candidates(self, batch: LocalBatch, features: dict[str, Tensor], outputs: dict[str, Any]) -> Tensor:
        """Return the loss value of ``open_clip.ClipLoss`` with the options ``equal_captions`` and hard negatives."""
        if outputs.keys() >= _CAPTIONS or "dist_image_features" in outputs:
            raise ValueError(
                "CoCa and distillation models support neither equal_captions nor hard negatives: remove them"
            )
        bias, hard = outputs["logit_bias"], outputs.get(HARD_NEGATIVES)
        image, text = self.clip.get_logits(**features, logit_bias=bias)
        own = targets = self.clip.get_ground_truth(image.device, len(image))
        candidates = torch.full(own.shape, text.shape[1], device=own.device)
        if self.needs_positives:
            labels = merge_labels(distributed.all_gather(read_labels(outputs.get("positives"), batch)))
            equal = labels[own, None] == labels
            if self.equal_captions == POSITIVE:
                targets = (equal / equal.sum(dim=1, keepdim=True)).to(image.dtype)
            else:
                others = equal.scatter(1, own[:, None], False)
                candidates = (~others).sum(dim=1)
                image, text = image.masked_fill(others, -torch.inf), text.masked_fill(others, -torch.inf)
        text_loss, chance = functional.cross_entropy(text, targets), candidates.log().mean()
        if hard is not None:
            harder, _ = self.clip.get_logits(batch.image, hard, batch.logit_scale, bias)
            image = torch.cat([image, harder], dim=1)
            if targets is not own:
                targets = functional.pad(targets, (0, harder.shape[1]))
            chance = (chance + (candidates + harder.shape[1]).log().mean()) / 2
        self._chance = chance
        return (functional.cross_entropy(image, targets) + text_loss) / 2

    def metrics(self) -> dict[str, float]:
        """Return ``infonce`` (without CoCa's weight), ``chance`` and the temperature. Synchronizes with the device."""
        if self._logit_scale is None:
            return {}
        temperature = 1 / self._logit_scale.item()
        metrics = {f"temperature_{name}": temperature for name in ("min", "median", "max")}
        return metrics | {"infonce": self._infonce.item(), "chance": float(self._chance)}

    @torch.no_grad()
    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the mini-batch estimate ``log g``, which this loss uses implicitly as the log-normalizer."""
        batch = self._batch(image_features, text_features, logit_scale, None)
        stats = contrast_minibatch(batch, gather=True)
        log_g = stats.log_mean_negatives[:, stats.batch.local]
        return log_g[0], log_g[1]


class InfoNce(Unscaled):
    """The objective of ``ClipLoss``: ``−log softmax`` of the positive pair among all pairs of its anchor."""

    estimand = PARTITION_MEAN

    def value(self, stats: ContrastStats, alpha: Tensor, batch_to_estimate: Tensor) -> Tensor:
        return alpha + torch.log1p(stats.batch.negatives)


class SiglipLoss(ContrastiveLoss):
    """``open_clip.SigLipLoss``."""

    follows_autocast = True
    uses_logit_bias = True
    initial_logit_scale = math.log(10)
    initial_logit_bias = -10.0

    def __init__(self, *, loss_dist_impl: str | None) -> None:
        super().__init__()
        self.siglip = SigLipLoss(rank=distributed.rank(), world_size=distributed.world_size(), dist_impl=loss_dist_impl)
        self._last: LocalBatch | None = None

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        distributed.check_world_size(self.siglip.world_size)
        if not batch.learning:
            distributed.check_equal_sizes(batch.image)
        self._last = batch.detached()
        return self.siglip(batch.image, batch.text, batch.logit_scale, outputs["logit_bias"], output_dict=True)

    def metrics(self) -> dict[str, float]:
        """Return the last call's temperature, and ``infonce`` and ``chance`` of this process's samples."""
        return {} if self._last is None else minibatch_metrics(self._last)
