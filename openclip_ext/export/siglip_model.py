"""Convert a SigLIP model of OpenCLIP, its tokenizer and its transform to ``transformers``."""

import json
import re
import string
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext.cli.errors import UsageError
from openclip_ext.export.clip_model import (
    CAPTION,
    TOLERANCE,
    converted_in_block,
    image_processor,
    no_counterpart,
    renamed,
)
from openclip_ext.files.writing import write_text

_CLASS = "SiglipModel"
_TEXT = {
    "token_embedding.": "embeddings.token_embedding.",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.": "final_layer_norm.",
    "text_projection.": "head.",
}
_IMAGE = {
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "pos_embed": "embeddings.position_embedding.weight",
    "norm.": "post_layernorm.",
    "attn_pool.latent": "head.probe",
    "attn_pool.proj.": "head.attention.out_proj.",
    "attn_pool.norm.": "head.layernorm.",
    "attn_pool.mlp.": "head.mlp.",
}
_IN_IMAGE_BLOCK = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "attn.proj.": "self_attn.out_proj.",
    "mlp.": "mlp.",
}
_BLOCK = re.compile(r"(?:transformer\.res)?blocks\.(\d+)\.(.+)")
_POOL = "visual.trunk.attn_pool."


def write_siglip_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder for ``SiglipModel`` and ``SiglipImageProcessor`` of ``transformers``, and prepare the tokenizer.

    Args:
        model: An OpenCLIP model with a ``logit_bias``, on the CPU, in float32 and evaluation mode.
        tokenizer: The model's tokenizer. It is changed: the tokenizer of ``transformers`` that it wraps then cleans texts
            itself, so that ``tokenizer.save_pretrained`` writes a complete tokenizer.
        folder: An existing folder.

    Raises:
        UsageError: ``transformers`` does not support the model, its tokenizer or its transform.
    """
    import transformers

    processor = image_processor(model.visual.preprocess_cfg, _CLASS)
    _complete_tokenizer(tokenizer)
    try:
        weights = convert(model.state_dict())
        siglip = transformers.SiglipModel(transformers.SiglipConfig(**_siglip_config(model, weights)))
        siglip.load_state_dict(weights)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        raise UsageError(no_counterpart(str(error).strip().splitlines()[0], _CLASS)) from error
    difference = _difference(model, siglip.eval())
    if not difference <= TOLERANCE:
        raise UsageError(no_counterpart(f"its embeddings would differ by {difference:.1g}", _CLASS))
    write_text(folder / "preprocessor_config.json", json.dumps(processor, indent=2) + "\n")
    siglip.save_pretrained(folder)


def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename OpenCLIP's weights to the names of ``SiglipModel``; raise KeyError for a weight that ``SiglipModel`` lacks."""
    converted = {name: state[name].reshape(1) for name in ("logit_scale", "logit_bias")}
    for kind in ("weight", "bias"):  # torch's attention has one matrix for queries, keys and values
        parts = [state[f"{_POOL}{name}.{kind}"] for name in ("q", "kv")]
        converted[f"vision_model.head.attention.in_proj_{kind}"] = torch.cat(parts)
    for full_name, value in state.items():
        if full_name in converted or full_name.startswith((f"{_POOL}q.", f"{_POOL}kv.")):
            continue
        is_text = full_name.startswith("text.")
        tower = "text_model." if is_text else "vision_model."
        name = full_name.removeprefix("text." if is_text else "visual.trunk.")
        if block := _BLOCK.fullmatch(name):
            prefix = f"{tower}encoder.layers.{block[1]}."
            converted |= (
                converted_in_block(prefix, block[2], value)
                if is_text
                else converted_in_block(prefix, block[2], value, "attn.qkv.", _IN_IMAGE_BLOCK)
            )
        else:
            new = renamed(name, _TEXT if is_text else _IMAGE)
            converted[tower + new] = value.squeeze(0) if name == "pos_embed" else value
    return converted


def _siglip_config(model: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return ``SiglipConfig``'s arguments: sizes from the weights; attention heads and activations from the modules."""
    image, text = model.visual.trunk, model.text

    def tower(name: str, blocks: Any, norm: nn.LayerNorm, activation: nn.Module) -> dict[str, Any]:
        inner, width = weights[f"{name}.encoder.layers.0.mlp.fc1.weight"].shape
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": len(blocks)}
        act = {"hidden_act": _name_of_activation(activation), "layer_norm_eps": norm.eps}
        return sizes | act | {"num_attention_heads": blocks[0].attn.num_heads}

    vision_config = tower("vision_model", image.blocks, image.norm, image.blocks[0].mlp.act)
    text_config = tower("text_model", text.transformer.resblocks, text.ln_final, text.transformer.resblocks[0].mlp.gelu)
    vocabulary, _ = weights["text_model.embeddings.token_embedding.weight"].shape
    positions, _ = weights["text_model.embeddings.position_embedding.weight"].shape
    height, width = torch.broadcast_to(torch.as_tensor(model.visual.image_size), (2,)).tolist()
    if height != width:
        raise ValueError(f"expected square images, found {height} x {width} pixels")
    patch = weights["vision_model.embeddings.patch_embedding.weight"].shape[-1]
    sizes = {"projection_size": len(weights["text_model.head.weight"]), "vocab_size": vocabulary}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the tokenizer knows its own
    return {
        "text_config": {**text_config, **sizes, **special, "max_position_embeddings": positions},
        "vision_config": {**vision_config, "image_size": height, "patch_size": patch},
    }


def _name_of_activation(activation: nn.Module) -> str:
    from transformers.activations import ACT2FN

    values = torch.linspace(-5, 5, 101)
    for name in ("gelu", "gelu_pytorch_tanh", "quick_gelu"):
        if torch.allclose(ACT2FN[name](values), activation(values), rtol=0, atol=1e-6):
            return name
    raise ValueError(f"activation {type(activation).__name__}")


@torch.no_grad()
def _difference(model: Any, siglip: Any) -> float:
    """Return the maximum difference between both models' unit embeddings, for random images and texts."""
    generator = torch.Generator().manual_seed(0)
    text, size = siglip.config.text_config, siglip.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=generator)
    texts = torch.randint(text.vocab_size, (2, text.max_position_embeddings), generator=generator)
    theirs = siglip(pixel_values=images, input_ids=texts)
    ours = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
    pairs = zip(ours, (theirs.image_embeds, theirs.text_embeds), strict=True)
    return max((own - their).abs().max().item() for own, their in pairs)


def _complete_tokenizer(tokenizer: Any) -> None:
    """Let the wrapped tokenizer of ``transformers`` canonicalize texts like OpenCLIP's, if OpenCLIP's does."""
    from tokenizers import Regex, normalizers

    wrapped = getattr(tokenizer, "tokenizer", None)
    backend = getattr(wrapped, "backend_tokenizer", None)
    if wrapped is None or backend is None:
        raise UsageError(no_counterpart(f"its tokenizer is a {type(tokenizer).__name__}", _CLASS))
    if tokenizer.clean_fn("A_b!") == "a b":
        punctuation = Regex(f"[{re.escape(string.punctuation)}]")
        steps = [normalizers.Replace("_", " "), normalizers.Replace(punctuation, ""), normalizers.Lowercase()]
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        last = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence(steps + last)
    wrapped.model_max_length = tokenizer.context_length
    # OpenCLIP's text tower also attends to the padding, so the written tokenizer returns no mask.
    wrapped.model_input_names = wrapped.init_kwargs["model_input_names"] = ["input_ids"]
    tokens = wrapped([CAPTION], padding="max_length", truncation=True, return_tensors="pt").input_ids
    if not torch.equal(tokens, tokenizer([CAPTION])):
        raise UsageError(no_counterpart("its tokenizer cleans or ends texts unlike that of transformers", _CLASS))
