"""Encode texts without their padding.

OpenCLIP pads every text to the context length of 77 tokens, but a prompt has about 15. A causal text tower that pools at the
end-of-text token ignores all later tokens, so they can be cut off.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from openclip_ext.evaluation.models import ImageTextModel
from openclip_ext.evaluation.text_tower import cut_positions, find_causal_tower

logger = logging.getLogger(__name__)

# Lengths are rounded up to a multiple of this, so that there are few different shapes.
_STEP = 8
_CHECKED_TEXTS = 8
# Lowest cosine between the two results at which they count as equal, allowing for the rounding of the type.
_AGREEMENT = {torch.float16: 0.999, torch.bfloat16: 0.99}
_AGREEMENT_IN_FLOAT32 = 1 - 1e-5


class TextEncoder:
    """Runs ``model.encode_text`` on only as many tokens as the longest text of the batch has.

    Texts are cut only if the tower is recognized as causal with pooling at the end-of-text token. The first texts are
    encoded both ways; if the results differ, all texts are encoded whole.
    """

    def __init__(self, model: ImageTextModel):
        self._model = _EncodeText(model)
        self._tower = find_causal_tower(model)
        self._checked = False

    def __call__(self, tokens: Tensor) -> Tensor:
        """Encode ``(B, context_length)`` int64 to ``(B, d)``."""
        longest = int(self.lengths(tokens).max())
        length = min(-(-longest // _STEP) * _STEP, tokens.shape[1])
        if length < tokens.shape[1] and not self._checked:
            self._checked = True
            if not self._agrees(tokens[:_CHECKED_TEXTS], length):
                logger.warning("This text tower gives other embeddings without padding: texts are encoded whole.")
                self._tower = None
        if length == tokens.shape[1] or self._tower is None:
            return self._model(tokens)
        return self._cut(tokens, length)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Count the tokens that each text needs: ``(B, context_length)`` int64 -> ``(B,)`` int64."""
        if self._tower is None:
            return torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        # The end-of-text token has the largest number, by which the tower itself finds it.
        return tokens.argmax(dim=-1) + 1

    def _cut(self, tokens: Tensor, length: int) -> Tensor:
        assert self._tower is not None, "others encode whole texts"
        prefix, module = self._tower
        replaced = {f"model.{prefix}{name}": value for name, value in cut_positions(module, length).items()}
        return functional_call(self._model, replaced, (tokens[:, :length],))

    def _agrees(self, tokens: Tensor, length: int) -> bool:
        whole = self._model(tokens)
        try:
            cut = self._cut(tokens, length)
        except (RuntimeError, ValueError):  # shapes that this tower cannot take
            return False
        least = _AGREEMENT.get(whole.dtype, _AGREEMENT_IN_FLOAT32)
        return bool((F.cosine_similarity(whole.float(), cut.float()) >= least).all())


class _EncodeText(nn.Module):
    """Makes ``encode_text`` the forward method, for ``functional_call``."""

    def __init__(self, model: ImageTextModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.encode_text(tokens)
