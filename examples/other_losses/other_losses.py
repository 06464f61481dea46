"""Contrastive losses of other libraries, as ``--loss other_losses:NAME``, to compare losses in one training loop.

Each loss is used as its package on PyPI defines it. (open-clip-torch's losses are ``--loss openclip`` and ``--loss siglip``.)

``CACHED_MNRL``: ``CachedMultipleNegativesRankingLoss`` of sentence-transformers, image to text and text to image;
``NTXENT_XBM``: ``NTXentLoss`` of pytorch-metric-learning with a ``CrossBatchMemory`` for each side;
``LIBAUC_SOGCLR``, ``LIBAUC_ISOGCLR``: the bimodal ``GCLoss`` of libauc at a constant or an individual temperature.

    pip install sentence-transformers pytorch-metric-learning && pip install --no-deps libauc

(libauc's losses import only packages that are already installed. Its other dependencies are for data sets and graph networks.)

These losses run only in one process, and checkpoints do not contain their state. They do not use the model's ``logit_scale``.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    needs_index = True
    keeps_state = True
    depends_on_epoch = True
    scheme = "global_constant"

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
        )

    def start_epoch(self, epoch: int) -> None:
        """Set the library's γ for this epoch: 1 in the first epoch, and constant in later epochs."""
        super().start_epoch(epoch)
        silently(self.loss.loss_fn.adjust_gamma, epoch)

    def value(self, image: Tensor, text: Tensor, index: Tensor | None) -> Tensor:
        return self.loss(image, text, index)[0]


class LibaucIndividualLoss(LibaucLoss):
    """``GCLoss`` with one learned temperature per sample and side (iSogCLR)."""

    scheme = "individual_learnable"


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


CACHED_MNRL = CachedMnrlMethod("cached-mnrl")
NTXENT_XBM = MemoryMethod("ntxent-xbm", other_temperature=0.07)
LIBAUC_SOGCLR = LibaucMethod("libauc-sogclr", other_temperature=0.01)
LIBAUC_ISOGCLR = LibaucIndividualMethod("libauc-isogclr", other_temperature=0.01)
