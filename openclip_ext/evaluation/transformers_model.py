"""Load a dual encoder of Hugging Face's ``transformers`` for ``openclip-ext embed``, such as CLIP or SigLIP."""

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.models import LoadedModel, weights_digest

PREFIX = "transformers:"


class DualEncoder(nn.Module):
    """The two towers of a ``transformers`` model, with methods named as in OpenCLIP."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def encode_image(self, images: Tensor) -> Tensor:
        """Return the embeddings ``(B, d)`` of images ``(B, 3, H, W)``."""
        return _pooled(self.model.get_image_features(pixel_values=images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``(B, d)`` of the output ``(B, 2, L)`` of :func:`_tokenize`."""
        ids, mask = tokens.unbind(dim=1)
        return _pooled(self.model.get_text_features(input_ids=ids, attention_mask=mask))


def _preprocess(image: Any, processor: Any) -> Tensor:
    """Turn a Pillow image into ``(3, H, W)`` with a Hugging Face image processor."""
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


def _tokenize(texts: list[str], tokenizer: Any, length: int) -> Tensor:
    """Return the token ids and attention masks ``(B, 2, L)`` int64 of a Hugging Face tokenizer.

    A tokenizer that returns no mask belongs to a model that was trained without a mask, such as SigLIP. The mask is then 1.
    """
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = found["input_ids"]
    return torch.stack([ids, found.get("attention_mask", torch.ones_like(ids))], dim=1)


def load_transformers_model(name: str, device: str | torch.device, checkpoint: str | None = None) -> LoadedModel:
    """Load a model with its image processor and tokenizer. ``name`` is ``transformers:`` and a folder or a name on the hub.

    Raises:
        UsageError: transformers is not installed, a file is missing, the model is no dual encoder, or ``checkpoint`` is given
            (the model's own folder contains the weights).
    """
    if checkpoint is not None:
        raise UsageError(f"--pretrained {checkpoint}: --model {name} includes its weights. Fix: omit --pretrained")
    try:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    except ImportError as error:
        raise UsageError(f"--model {name} needs transformers ({error}). Fix: pip install transformers") from error
    path = name.removeprefix(PREFIX)
    try:
        model, processor, tokenizer = (
            kind.from_pretrained(path) for kind in (AutoModel, AutoImageProcessor, AutoTokenizer)
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    needed = ("get_image_features", "get_text_features", "logit_scale")
    if missing := [attribute for attribute in needed if not hasattr(model, attribute)]:
        raise UsageError(
            f"--model {name} is a {type(model).__name__} without {', '.join(missing)}: expected a model with an image and "
            "a text tower, such as CLIPModel or SiglipModel"
        )
    config = {"model": json.loads(model.config.to_json_string()), "preprocess": json.loads(processor.to_json_string())}
    length = min(tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
    preprocess = partial(_preprocess, processor=processor)
    tokenize = partial(_tokenize, tokenizer=tokenizer, length=length)
    encoder = DualEncoder(model.eval().to(device))
    return LoadedModel(encoder, preprocess, tokenize, name, path, config, weights_digest(model))


def _pooled(features: Any) -> Tensor:
    """Return the embeddings as a tensor. transformers 5 wraps them in an output object."""
    return features if isinstance(features, Tensor) else features.pooler_output
