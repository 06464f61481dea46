"""Projection heads, which a loss trains together with the model: their format in checkpoints and their use in evaluations.

A checkpoint contains the heads under :data:`HEADS_KEY`, next to the ``state_dict`` that stock OpenCLIP loads:
``{"kind": kind of a METHOD's head, "config": plain types, "state_dict": tensors}``.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext.cli.errors import UsageError
from openclip_ext.losses.registry import head_classes

HEADS_KEY = "heads"


class ProjectedModel(nn.Module):
    """An OpenCLIP model with the heads ``image`` and ``text``, which project the model's unit embeddings (CLIP-Lite)."""

    # Any, because neither OpenCLIP's models nor heads have a common base class.
    model: Any
    heads: Any

    def __init__(self, model: nn.Module, heads: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.heads = heads
        self.training = model.training

    @property
    def visual(self) -> nn.Module:
        return self.model.visual

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """Return the model's outputs. The embeddings are projected and have unit norm."""
        outputs = dict(self.model(image, text))
        for name, head in (("image_features", self.heads.image), ("text_features", self.heads.text)):
            if outputs.get(name) is not None:
                outputs[name] = F.normalize(head(outputs[name]), dim=-1)
        return outputs

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Encode images ``(B, 3, H, W)`` to projected embeddings ``(B, d')``."""
        features = self.heads.image(self.model.encode_image(image, normalize=True))
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Encode tokens ``(B, context_length)`` to projected embeddings ``(B, d')``."""
        features = self.heads.text(self.model.encode_text(text, normalize=True))
        return F.normalize(features, dim=-1) if normalize else features


def heads_entry(heads: nn.Module) -> dict[str, Any]:
    """Return the checkpoint entry for the heads."""
    state = heads.state_dict()
    return {"kind": heads.kind, "config": heads.config, "evaluated": heads.evaluated, "state_dict": state}


def _build_heads(entry: dict[str, Any], source: str | Path) -> nn.Module:
    # Only registered classes are accepted, because a file must not decide which code is imported.
    known: dict[str, Any] = {head.kind: head for head in head_classes()}
    kind = entry.get("kind")
    if kind not in known:
        fix = "If they are of your own loss, import it in Python with registry.find_method, and evaluate there"
        raise UsageError(
            f"{source} needs heads of the kind {kind!r}: expected one of {', '.join(sorted(known))}. {fix}"
        )
    heads: nn.Module = known[kind](**entry["config"])
    if any(value.dtype == torch.float64 for value in entry["state_dict"].values()):
        heads.double()
    heads.load_state_dict(entry["state_dict"])
    return heads


def stored_heads(path: str | Path) -> dict[str, Any] | None:
    """Return the :func:`heads_entry` in a checkpoint file; None if the file has no heads or is not a checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        # The path may be a pretrained tag or a folder. The file may have another format or contain a scripted model. OpenCLIP
        # may load them, but they have no heads.
        return None
    return content.get(HEADS_KEY) if isinstance(content, dict) else None


def read_heads(path: str | Path) -> nn.Module | None:
    """Return the heads of a checkpoint file if evaluations use them, otherwise None.

    Raise UsageError if neither the package nor a registered method has heads of this kind.
    """
    entry = stored_heads(path)
    return _build_heads(entry, path) if entry is not None and entry["evaluated"] else None


def with_heads(model: nn.Module, heads: nn.Module | None) -> nn.Module:
    """Return the model for evaluations: with the heads as last layers if evaluations use the heads, otherwise unchanged."""
    if heads is None or not heads.evaluated:
        return model
    return ProjectedModel(model, heads.to(next(model.parameters()).device))
