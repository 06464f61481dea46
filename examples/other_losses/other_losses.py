"""Contrastive losses of other libraries, as ``--loss other_losses:NAME``, to compare losses in one training loop.

Each loss is used as its package on PyPI defines it. (open-clip-torch's losses are ``--loss openclip`` and ``--loss siglip``.)

``CACHED_MNRL``: ``CachedMultipleNegativesRankingLoss`` of sentence-transformers, image to text and text to image;
``NTXENT_XBM``: ``NTXentLoss`` of pytorch-metric-learning with a ``CrossBatchMemory`` for each side;
``LIBAUC_SOGCLR``, ``LIBAUC_ISOGCLR``: the bimodal ``GCLoss`` of libauc at a constant or an individual temperature;
``LIBAUC_FASTCLIP``: the same with FastCLIP's schedule of γ, at a constant or a learned temperature;
``MOMENTUM_QUEUE``: a queue of negatives from a momentum encoder (MoCo, He et al. 2020), for two towers as in ALBEF (Li et al.
2021, eq. 1 and 2, without distillation). This one is written here, because no package on PyPI has it for CLIP.

    pip install sentence-transformers pytorch-metric-learning && pip install --no-deps libauc

(libauc's losses import only packages that are already installed. Its other dependencies are for data sets and graph networks.)

These losses run only in one process, and checkpoints do not contain their state. They do not use the model's ``logit_scale``.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import minibatch_metrics
from openclip_ext.losses.method import Method, option


class OtherLoss(ContrastiveLoss):
    """A loss of another library.

    Args:
        other_temperature: the constant temperature τ, or its initial value if the loss learns it.
    """

    learns_logit_scale = False
    uses_logit_scale = False
    _last: LocalBatch | None = None

    def __init__(self, *, other_temperature: float) -> None:
        super().__init__()
        self.temperature = other_temperature

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        """Return the other library's loss of embeddings ``(B, d)``. ``index`` ``(B,)`` has the samples' indices."""
        raise NotImplementedError

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        self._last = batch.detached()
        return {"contrastive_loss": self.value(batch.image, batch.text, batch.index)}

    def metrics(self) -> dict[str, float]:
        """Return ``infonce``, ``chance`` and the temperature of the model, as every loss does."""
        return {} if self._last is None else minibatch_metrics(self._last)


class CachedMnrl(OtherLoss):
    """``CachedMultipleNegativesRankingLoss`` in both directions, which is OpenCLIP's loss at a constant temperature."""

    def __init__(self, *, other_temperature: float) -> None:
        super().__init__(other_temperature=other_temperature)
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        # The class needs a model to embed texts, but here the training loop has already embedded them.
        self.loss = CachedMultipleNegativesRankingLoss(
            SentenceTransformer(modules=[nn.Identity()]),
            scale=1 / other_temperature,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
        )

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        return self.loss.calculate_loss([[image], [text]])


class NTXentWithMemory(OtherLoss):
    """``NTXentLoss`` with two memories (``CrossBatchMemory``): texts for the images, and images for the texts.

    Args:
        embed_dim: embedding dimension.
        num_samples: number of training samples. The index of a sample is the label of its pair.
        memory: number of stored embeddings per side.
    """

    needs_index = True
    keeps_state = True

    def __init__(self, *, embed_dim: int, num_samples: int, other_temperature: float, memory: int) -> None:
        super().__init__(other_temperature=other_temperature)
        from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss

        self.embed_dim, self.num_samples = embed_dim, num_samples
        self.memories = nn.ModuleList(
            CrossBatchMemory(NTXentLoss(temperature=other_temperature), embed_dim, memory) for _ in range(2)
        )

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        assert index is not None
        labels = index.repeat(2)
        stored = torch.arange(len(labels), device=labels.device) >= len(index)
        sides = ((image, text), (text, image))
        losses = [
            memory(torch.cat(side), labels, enqueue_mask=stored)
            for memory, side in zip(self.memories, sides, strict=True)
        ]
        return torch.stack(losses).mean()


class LibaucLoss(OtherLoss):
    """``GCLoss(mode="bimodal")``.

    Args:
        num_samples: number of training samples.
        other_gamma: weight γ of the new estimate in the moving averages.

    Attributes:
        scheme: the argument ``temperature_scheme`` of ``GCLoss``.
        schedule: the arguments of ``GCLoss`` for the schedule of γ. Empty means a constant γ after the first epoch.
    """

    needs_index = True
    keeps_state = True
    depends_on_epoch = True
    scheme = "global_constant"
    schedule: Mapping[str, Any] = {}

    def __init__(self, *, num_samples: int, other_temperature: float, other_gamma: float) -> None:
        super().__init__(other_temperature=other_temperature)
        from libauc.losses.contrastive import GCLoss

        self.num_samples = num_samples
        self.loss = silently(
            GCLoss,
            "bimodal",
            N=num_samples,
            tau=other_temperature,
            gamma=other_gamma,
            temperature_scheme=self.scheme,
            **self.schedule,
        )

    def start_epoch(self, epoch: int) -> None:
        """Set the library's γ for this epoch, which is 1 in the first epoch."""
        super().start_epoch(epoch)
        silently(self.loss.loss_fn.adjust_gamma, epoch)

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        return self.loss(image, text, index)[0]


class LibaucIndividualLoss(LibaucLoss):
    """``GCLoss`` with one learned temperature per sample and side (iSogCLR)."""

    scheme = "individual_learnable"


class LibaucFastClipLoss(LibaucLoss):
    """``GCLoss`` with FastCLIP's cosine schedule of γ, and optionally its learned temperature (``global_learnable``).

    libauc leaves the update of the learned temperature to the user. As in FastCLIP's published code, AdamW updates it after
    each step, without weight decay, and a floor bounds it.

    Args:
        other_decay_epochs: number of epochs after which γ is ``other_gamma``.
        other_lr_tau: learning rate of the temperature. 0 means a constant temperature.
        other_tau_min: floor of the learned temperature.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        other_temperature: float,
        other_gamma: float,
        other_decay_epochs: int,
        other_lr_tau: float,
        other_tau_min: float,
    ) -> None:
        self.scheme = "global_learnable" if other_lr_tau else "global_constant"
        self.schedule = {"gamma_schedule": "cosine", "gamma_decay_epochs": other_decay_epochs}
        super().__init__(num_samples=num_samples, other_temperature=other_temperature, other_gamma=other_gamma)
        self.tau_min = other_tau_min
        tau = self.loss.loss_fn.tau
        self.tau_optimizer = torch.optim.AdamW([tau], lr=other_lr_tau, weight_decay=0.0) if other_lr_tau else None

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        if self.tau_optimizer is not None:
            # The gradient is that of the step before. It is None in the first step.
            self.tau_optimizer.step()
            self.tau_optimizer.zero_grad()
            self.loss.loss_fn.tau.data.clamp_(min=self.tau_min)
        return super().value(image, text, index)


class MomentumQueue(OtherLoss):
    """Cross-entropy of a query among the keys of a momentum encoder: those of the batch, and a queue of earlier keys.

    The momentum encoder is a moving average of the model's weights, and gets no gradient. Call :meth:`attach` once.

    Args:
        embed_dim: embedding dimension.
        key_memory: number of earlier keys per side.
        key_momentum: weight of the old value in the moving average. 0 means no second encoder: the keys are the model's own
            embeddings, with a gradient in their batch and without in later batches (a cross-batch memory, Wang et al. 2020).
    """

    keeps_state = True

    def __init__(self, *, embed_dim: int, other_temperature: float, key_memory: int, key_momentum: float) -> None:
        super().__init__(other_temperature=other_temperature)
        self.embed_dim, self.momentum = embed_dim, key_momentum
        self.register_buffer("queue", torch.zeros(2, key_memory, embed_dim))
        self.stored, self.next = 0, 0
        self.keys: Tensor | None = None

    def attach(self, model: nn.Module) -> None:
        """Embed the inputs of each forward pass of ``model`` in training mode also with the momentum encoder."""
        if not self.momentum:
            return
        encoder = copy.deepcopy(model).requires_grad_(False)

        def embed(model: nn.Module, inputs: Any, _: Any) -> None:
            if not model.training:
                return
            with torch.no_grad():
                for key, query in zip(encoder.parameters(), model.parameters(), strict=True):
                    key.lerp_(query, 1 - self.momentum)
                found = encoder(*inputs)
                self.keys = torch.stack([found["image_features"], found["text_features"]])

        model.register_forward_hook(embed)

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        if self.momentum and self.keys is None:
            raise RuntimeError(
                "the momentum encoder does not exist: call attach(model), as scripts.experiments.grid does"
            )
        keys = torch.stack([image, text]) if self.keys is None else self.keys
        own = torch.arange(len(image), device=image.device)
        losses = []
        for query, batch_keys, queue in ((image, keys[1], self.queue[1]), (text, keys[0], self.queue[0])):
            candidates = torch.cat([batch_keys, queue[: self.stored]])
            losses.append(functional.cross_entropy(query @ candidates.T / self.temperature, own))
        size = self.queue.shape[1]
        places = (self.next + own) % size
        self.queue[:, places] = keys.detach()
        self.next, self.stored = (self.next + len(own)) % size, min(self.stored + len(own), size)
        return torch.stack(losses).mean()


def silently(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and discard what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call(*args, **kwargs)


@dataclass(frozen=True)
class OtherMethod(Method):
    """A loss of another library with its option."""

    other_temperature: float = option(0.05, "temperature of the other library's loss", symbol="τ")


class CachedMnrlMethod(OtherMethod):
    module = CachedMnrl


@dataclass(frozen=True)
class MemoryMethod(OtherMethod):
    module = NTXentWithMemory
    needs = ("embed_dim", "num_samples")
    memory: int = option(1024, "number of embeddings in each memory of pytorch-metric-learning", minimum=1)


@dataclass(frozen=True)
class LibaucMethod(OtherMethod):
    module = LibaucLoss
    needs = ("num_samples",)
    other_gamma: float = option(0.9, "weight of the new estimate in libauc's loss", symbol="γ")


class LibaucIndividualMethod(LibaucMethod):
    module = LibaucIndividualLoss


@dataclass(frozen=True)
class LibaucFastClipMethod(LibaucMethod):
    module = LibaucFastClipLoss
    other_decay_epochs: int = option(15, "epochs until libauc's γ has its final value", minimum=1)
    other_lr_tau: float = option(0.0, "learning rate of libauc's temperature; 0: constant", minimum=0.0)
    other_tau_min: float = option(0.01, "floor of libauc's learned temperature")


@dataclass(frozen=True)
class MomentumMethod(OtherMethod):
    module = MomentumQueue
    needs = ("embed_dim",)
    key_memory: int = option(4096, "number of earlier keys per side", minimum=1)
    key_momentum: float = option(0.99, "weight of the old value in the momentum encoder's average", minimum=0.0)


CACHED_MNRL = CachedMnrlMethod("cached-mnrl")
NTXENT_XBM = MemoryMethod("ntxent-xbm", other_temperature=0.07)
LIBAUC_SOGCLR = LibaucMethod("libauc-sogclr", other_temperature=0.01)
LIBAUC_ISOGCLR = LibaucIndividualMethod("libauc-isogclr", other_temperature=0.01)
LIBAUC_FASTCLIP = LibaucFastClipMethod("libauc-fastclip", other_temperature=0.07, other_gamma=0.2)
MOMENTUM_QUEUE = MomentumMethod("momentum-queue")
