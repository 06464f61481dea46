"""Convert an OpenCLIP model, its tokenizer and its transform to ``transformers``."""

import json
import re
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor

from openclip_ext.cli.errors import UsageError
from openclip_ext.files.writing import write_text

# Maximum accepted difference between the unit embeddings of the two implementations.
TOLERANCE = 1e-5
_RENAMED = {
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_IN_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
    "attn.out_proj.": "self_attn.out_proj.",
}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
CAPTION = "A cat's toys, 2 of them!"  # CLIP's tokenizer only changes it to lower case
_RESAMPLING = {"bilinear": 2, "bicubic": 3}  # PIL's codes of the methods


def write_clip_model(model: Any, config: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Write a folder for ``CLIPModel``, ``CLIPTokenizer`` and ``CLIPImageProcessor`` of ``transformers``.

    Args:
        model: An OpenCLIP model on the CPU, in float32 and evaluation mode.
        config: The model's configuration, in the format of OpenCLIP's JSON files.
        tokenizer: The model's tokenizer.
        folder: An existing folder.

    Raises:
        UsageError: ``transformers`` is not installed, or does not support the model, its tokenizer or its transform.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError("--to hf needs the package transformers: pip install transformers") from error
    processor, vocabulary = image_processor(model.visual.preprocess_cfg), _vocabulary(tokenizer)
    try:
        weights = convert(model.state_dict())
        clip = transformers.CLIPModel(transformers.CLIPConfig(**_clip_config(model, config, weights)))
        clip.load_state_dict(weights)
    except (KeyError, RuntimeError, ValueError) as error:
        raise UsageError(no_counterpart(str(error).strip().splitlines()[0])) from error
    difference = _difference(model, clip.eval())
    if not difference <= TOLERANCE:
        raise UsageError(no_counterpart(f"its embeddings would differ by {difference:.1g}"))
    files = {"preprocessor_config.json": processor, "vocab.json": vocabulary[0]}
    files["tokenizer_config.json"] = {"tokenizer_class": "CLIPTokenizer", "model_max_length": tokenizer.context_length}
    for name, content in files.items():
        write_text(folder / name, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    merges = ["#version: 0.2", *vocabulary[1], ""]
    write_text(folder / "merges.txt", "\n".join(merges))
    clip.save_pretrained(folder)  # last, because from_pretrained would accept incomplete merges


def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename OpenCLIP's weights to the names of ``CLIPModel``; raise KeyError for a weight that ``CLIPModel`` lacks."""
    converted: dict[str, Tensor] = {}
    for full_name, value in state.items():
        name = full_name.removeprefix("text.")  # models with custom_text have this prefix in their text tower
        if name in _TRANSPOSED:
            converted[_TRANSPOSED[name]] = value.T.contiguous()
        elif block := _BLOCK.fullmatch(name):
            tower = "vision_model" if block[1] else "text_model"
            converted |= converted_in_block(f"{tower}.encoder.layers.{block[2]}.", block[3], value)
        else:
            converted[renamed(name, _RENAMED)] = value
    return converted


def converted_in_block(
    prefix: str, name: str, value: Tensor, qkv: str = "attn.in_proj_", names: dict[str, str] = _IN_BLOCK
) -> dict[str, Tensor]:
    """Return the weights of ``transformers`` for a weight of a block. ``qkv`` starts the name of a joint projection."""
    if not name.startswith(qkv):
        return {prefix + renamed(name, names): value}
    kind = name.removeprefix(qkv)
    parts = zip("qkv", value.chunk(3), strict=True)
    return {f"{prefix}self_attn.{letter}_proj.{kind}": part.contiguous() for letter, part in parts}


def renamed(name: str, prefixes: dict[str, str]) -> str:
    """Replace a weight's name, or its start if the key ends with a dot; raise KeyError if no key matches."""
    for prefix, replacement in prefixes.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return replacement + name.removeprefix(prefix)
    raise KeyError(name)


def _clip_config(model: Any, config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return ``CLIPConfig``'s arguments: sizes from the weights, attention heads and activation from OpenCLIP's ``config``."""
    projection = len(weights["visual_projection.weight"])
    activation = "quick_gelu" if config.get("quick_gelu") else "gelu"

    def tower(name: str, width: int, heads: int) -> dict[str, Any]:
        layers = {key.split(".")[3] for key in weights if key.startswith(f"{name}.encoder.layers.")}
        inner = weights[f"{name}.encoder.layers.0.mlp.fc1.weight"].shape[0]
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": len(layers)}
        # CLIPModel reads projection_dim from the whole configuration, the models of one tower from the tower's configuration.
        return sizes | {"num_attention_heads": heads, "hidden_act": activation, "projection_dim": projection}

    vocabulary, text_width = weights["text_model.embeddings.token_embedding.weight"].shape
    vision_width, _, patch, _ = weights["vision_model.embeddings.patch_embedding.weight"].shape
    height, width = torch.broadcast_to(torch.as_tensor(model.visual.image_size), (2,)).tolist()
    if height != width:
        raise ValueError(f"expected square images, found {height} x {width} pixels")
    text = tower("text_model", text_width, config["text_cfg"].get("heads", 8))
    text["max_position_embeddings"] = len(weights["text_model.embeddings.position_embedding.weight"])
    vision = tower("vision_model", vision_width, vision_width // config["vision_cfg"].get("head_width", 64))
    special = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    return {
        "text_config": {**text, **special, "vocab_size": vocabulary},
        "vision_config": {**vision, "image_size": height, "patch_size": patch},
        "projection_dim": projection,
    }


@torch.no_grad()
def _difference(model: Any, clip: Any) -> float:
    """Return the maximum difference between both models' unit embeddings, for random images and texts."""
    generator = torch.Generator().manual_seed(0)
    text_config, size = clip.config.text_config, clip.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=generator)
    length, end = text_config.max_position_embeddings, text_config.eos_token_id
    texts = torch.randint(1, end - 1, (2, length), generator=generator)
    texts[0, -1] = texts[1, length // 2] = end
    texts[1, length // 2 + 1 :] = 0
    theirs = clip(pixel_values=images, input_ids=texts)
    ours = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
    pairs = zip(ours, (theirs.image_embeds, theirs.text_embeds), strict=True)
    return max((own - their).abs().max().item() for own, their in pairs)


def image_processor(preprocess: dict[str, Any], model: str = "CLIPModel") -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json`` for a transform of OpenCLIP.

    Raises:
        UsageError: ``transformers`` does not support the transform. The error names the class ``model``.
    """
    size, mode, interpolation = preprocess["size"], preprocess["resize_mode"], preprocess["interpolation"]
    height, width = (size, size) if isinstance(size, int) else size
    if mode not in ("shortest", "squash") or interpolation not in _RESAMPLING:
        raise UsageError(no_counterpart(f"it resizes images by {mode}, {interpolation}", model))
    box = {"height": height, "width": width}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": min(height, width)} if mode == "shortest" else box,
        "resample": _RESAMPLING[interpolation],
        "do_center_crop": mode == "shortest",
        "crop_size": box,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess["mean"]),
        "image_std": list(preprocess["std"]),
    }


def _vocabulary(tokenizer: Any) -> tuple[dict[str, int], list[str]]:
    """Return each token's number, and the merges of byte pairs. Special tokens get the names that ``CLIPTokenizer`` uses."""
    if not isinstance(tokenizer, open_clip.SimpleTokenizer):
        raise UsageError(no_counterpart(f"its tokenizer is a {type(tokenizer).__name__}"))
    if tokenizer.clean_fn(CAPTION) != CAPTION.lower() or tokenizer.reduction_fn is not None:
        raise UsageError(no_counterpart("tokenizer_kwargs: its tokenizer does not clean or shorten texts like CLIP's"))
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(token, token): number for token, number in tokenizer.encoder.items()}
    return vocabulary, [" ".join(pair) for pair in tokenizer.bpe_ranks]


def no_counterpart(reason: str, model: str = "CLIPModel") -> str:
    return f"transformers.{model} does not support this model ({reason}): use --to safetensors"
