"""Add, merge and save low-rank adapters (``--lora-rank``, Hu et al. 2021) with the library peft.

A model file contains merged weights, which stock OpenCLIP loads. Merging rounds, so an exact resume needs the unmerged base
weights and adapters. The same file contains these under :data:`UNMERGED`. Tensors without an adapter are stored only once.

peft is imported inside functions, because it is optional and its import takes seconds.
"""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import compat
from openclip_ext.checkpoint.format import TRAINED_KEY, UNMERGED
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.model import SCALARS
from openclip_ext.training import parallel
from openclip_ext.training.config import LoraConfig

_ADAPTER = "default"  # peft's default name for an adapter


def add_adapters(model: nn.Module, config: LoraConfig, weights: str | None) -> None:
    """Add adapters to a model in place, and freeze all other parameters except the logit scale and bias.

    ``weights`` is the value of ``--pretrained``, which ``adapter_config.json`` names as the base model. Raise UsageError if a
    tower has no adaptable layer.
    """
    import peft

    names = adaptable_layers(model, config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale,
        # A regular expression matches full names. A list would match the ends of names, which are often equal in both towers.
        target_modules="|".join(map(re.escape, names)),
        base_model_name_or_path=weights,
    )
    settings._register_custom_module({nn.MultiheadAttention: _attention_layer()})
    peft.inject_adapter_in_model(settings, model, _ADAPTER)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()  # in 16 bits, small updates would be rounded to 0
            # peft 0.21 adds the adapter of an attention's output layer twice (github.com/huggingface/peft/pull/3774). So this
            # adapter is not trained. Its output stays 0, so all versions of peft give the same result.
            parameter.requires_grad_(".base_layer.out_proj." not in name)
        elif name in SCALARS:
            parameter.requires_grad_(True)


def adaptable_layers(model: nn.Module, targets: str) -> list[str]:
    """Return the names of the layers to adapt in the blocks of ``targets``: ``image``, ``text`` or ``both`` towers."""
    inside = {layer for block in parallel.blocks_of(model) for layer in block.modules()}
    found: dict[str, list[str]] = {"image": [], "text": []}
    for name, layer in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        if layer in inside and _is_adaptable(layer, parent):
            found["image" if name.startswith("visual.") else "text"].append(name)
    asked = list(found) if targets == "both" else [targets]
    for tower in asked:
        if not found[tower]:
            other = "text" if tower == "image" else "image"
            raise UsageError(f"the {tower} tower has no attention or linear layers: use --lora-targets {other}")
    return [name for tower in asked for name in found[tower]]


def _is_adaptable(layer: nn.Module, parent: Any) -> bool:
    if isinstance(layer, nn.MultiheadAttention):
        return layer._qkv_same_embed_dim  # peft supports only a common projection of queries, keys and values
    # These parents read the layer's weight and never call the layer, so an adapter would have no effect.
    reads_weight = isinstance(parent, nn.MultiheadAttention) or (
        layer is getattr(parent, "qkv", None) and getattr(parent, "q_bias", None) is not None
    )
    return isinstance(layer, nn.Linear) and not reads_weight


@functools.cache
def _attention_layer() -> type[nn.Module]:
    from peft.tuners.lora.layer import MultiheadAttention

    class Attention(MultiheadAttention):
        """An ``nn.MultiheadAttention`` with an adapter. The frozen base weights never change.

        peft's class adds the adapter to the weights in each forward pass, and subtracts it afterwards. Both operations round,
        so the base weights drift from the pretrained model. peft's class also replaces the parameter objects in each pass.
        """

        def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
            weight = self.base_layer.in_proj_weight
            adapted = {"in_proj_weight": weight + self.get_delta_weight(_ADAPTER).to(weight.dtype)}
            return torch.func.functional_call(self.base_layer, adapted, (query, *args), options)

        def _restore_weights(self) -> None:
            """Do nothing, because ``forward`` does not change the weights."""

    return Attention


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has adapters. The model may be wrapped."""
    return hasattr(compat.unwrap(model), "peft_config")


def with_merged(content: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model file with a merged ``state_dict`` for the plain model, and the unmerged states in :data:`UNMERGED`."""
    states = {name: content[name] for name in ("state_dict", TRAINED_KEY) if name in content}
    return {**content, "state_dict": merged(states["state_dict"], model), UNMERGED: states}


@torch.no_grad()
def merged(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a plain model's state from an adapted model's state, by adding the adapters to the weights."""
    result = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
    layers = dict(compat.unwrap(model).named_modules())
    adapter = f".lora_A.{_ADAPTER}.weight"
    for name in [name.removesuffix(adapter) for name in state if name.endswith(adapter)]:
        # A DistributedDataParallel model's state has the prefix ``module.``. An average of the weights has no prefix.
        layer: Any = layers[name.removeprefix("module.")]
        down = state[f"{name}{adapter}"]
        change = layer.scaling[_ADAPTER] * (state[f"{name}.lora_B.{_ADAPTER}.weight"] @ down)
        plain = name.replace(".base_layer", "")
        weight = f"{plain}.in_proj_weight" if f"{plain}.in_proj_weight" in result else f"{plain}.weight"
        # 16 bits would round small changes to 0. So the sum has at least float32 precision, like an average of the weights.
        # It is stored on the host, because the device may lack memory for a second copy of the weights.
        result[weight] = (result[weight].to(torch.promote_types(result[weight].dtype, torch.float32)) + change).cpu()
    return result


def save_adapter(content: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Write the adapter of a :func:`with_merged` model file in peft's format: configuration and weights."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    plain: Any = compat.unwrap(model)
    state = {name.removeprefix("module."): value for name, value in content[UNMERGED]["state_dict"].items()}
    state = get_peft_model_state_dict(plain, state, _ADAPTER, save_embedding_layers=False)
    settings = copy.copy(plain.peft_config[_ADAPTER])
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": value.cpu().contiguous() for name, value in state.items()}
    (folder / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
