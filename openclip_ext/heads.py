"""Modules that a loss trains with the model: in checkpoints, and, where evaluation goes through them, around a model.

A checkpoint holds them under :data:`HEADS_KEY`, beside OpenCLIP's ``state_dict``, which stock OpenCLIP loads without
them: ``{"kind": a name in HEADS, "config": plain types, "state_dict": tensors}``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext.losses.cliplite import Projections
from openclip_ext.losses.simclr import Projector

HEADS_KEY = "heads"

# Kind of heads -> builder from their config. A training method that keeps heads in its checkpoints adds its own here.
HEADS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    Projections.kind: lambda config: Projections(**config),
    Projector.kind: lambda config: Projector(**config),
}


class HeadsError(ValueError):
    """Heads in a checkpoint that cannot be used. The message says what was found and what to do."""


class ProjectedModel(nn.Module):
    """An OpenCLIP model whose embeddings pass through heads that were trained with it (CLIP-Lite's projections).

    It has what evaluations use of a model: the call that returns a dictionary, ``encode_image``, ``encode_text`` and
    ``visual``.

    Args:
        model: its unit embeddings are what the heads were trained on.
        heads: has ``image`` and ``text``, modules from ``(B, d)`` to ``(B, d')``.
    """

    # OpenCLIP's models have no common typed base, nor have heads: what is used of them is named above.
    model: Any
    heads: Any

    def __init__(self, model: nn.Module, heads: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.heads = heads
        self.training = model.training

    @property
    def visual(self) -> nn.Module:
        """The visual tower."""
        return self.model.visual

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """What the model returns, with projected unit embeddings."""
        outputs = dict(self.model(image, text))
        for name, head in (("image_features", self.heads.image), ("text_features", self.heads.text)):
            if outputs.get(name) is not None:
                outputs[name] = F.normalize(head(outputs[name]), dim=-1)
        return outputs

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """``(B, 3, H, W)`` -> ``(B, d')``."""
        features = self.heads.image(self.model.encode_image(image, normalize=True))
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """``(B, context_length)`` -> ``(B, d')``."""
        features = self.heads.text(self.model.encode_text(text, normalize=True))
        return F.normalize(features, dim=-1) if normalize else features


def heads_entry(heads: nn.Module) -> dict[str, Any]:
    """What a checkpoint holds of heads."""
    return {"kind": heads.kind, "config": heads.config, "state_dict": heads.state_dict()}


def build_heads(entry: dict[str, Any], source: str | Path) -> nn.Module:
    """Heads from a checkpoint's entry.

    Args:
        entry: as :func:`heads_entry` made it.
        source: the checkpoint, for the message.

    Raises:
        HeadsError: this version knows no such heads.
    """
    kind = entry.get("kind")
    if kind not in HEADS:
        raise HeadsError(
            f"{source} holds heads of the kind {kind!r}, without which its embeddings mean nothing; "
            f"known kinds: {', '.join(HEADS) or 'none'}. Evaluate it with the version that trained it."
        )
    heads = HEADS[kind](entry["config"])
    if any(value.dtype == torch.float64 for value in entry["state_dict"].values()):
        heads.double()
    heads.load_state_dict(entry["state_dict"])
    return heads


def read_heads(path: str | Path) -> nn.Module | None:
    """The heads that a checkpoint file holds, or None: also for files that are not a dictionary, and for tags."""
    path = Path(path)
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt") or not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        # An old or scripted file, which has none: OpenCLIP reads it, or says why not.
        return None
    entry = content.get(HEADS_KEY) if isinstance(content, dict) else None
    return None if entry is None else build_heads(entry, path)


def with_heads(model: nn.Module, heads: nn.Module | None) -> nn.Module:
    """The model that evaluations see: itself, or with the heads behind it, on its device, if they are evaluated."""
    if heads is None or not heads.evaluated:
        return model
    return ProjectedModel(model, heads.to(next(model.parameters()).device))
