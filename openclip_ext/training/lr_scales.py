"""Learning rates for each tower (``--lr-image``, ``--lr-text``) and each layer (``--image-layer-decay`` and the text's).

A parameter's rate is its scale times the schedule's. A tower with ``L`` layers and decay ``δ`` has the scales ``δ^(L+1)`` for
its embeddings (or stem), ``δ^(L+1−l)`` for its layer ``l``, from 1, and 1 for what comes after: the projection and its norm.
"""

import re
from collections.abc import Mapping

from torch import nn

from openclip_ext.cli.errors import UsageError

_LAYER = re.compile(r"(?:^|\.)(?:resblocks|blocks|layers?|stages?)\.?(\d+)\.")
_AFTER = re.compile(r"attn_?pool|(?:^|\.)head")
_BEFORE = re.compile(r"embed|token|stem|patch|cls_|ln_pre|norm_pre|(?:^|\.)(?:conv|bn)\d")
_OF_NEITHER = ("logit_scale", "logit_bias")


def lr_scales(model: nn.Module, towers: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the scale of each trained parameter of a model, by its name in the model as it is wrapped.

    ``towers`` has for ``image`` and ``text``, where they have rates of their own, the tower's rate over the run's and the
    decay of its layers.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_image = {name: name.removeprefix("module.").startswith("visual.") for name in names}
    parameters = {
        "image": [name for name in names if is_image[name]],
        "text": [name for name in names if not is_image[name] and not name.endswith(_OF_NEITHER)],
    }
    scales = dict.fromkeys(names, 1.0)
    for tower, (factor, decay) in towers.items():
        own = parameters[tower]
        if not own:
            raise UsageError(f"--lr-{tower} and --{tower}-layer-decay have no effect: nothing of this tower is trained")
        depth = dict.fromkeys(own, 0) if decay == 1 else depths(tower, own)
        scales |= {name: factor * decay ** depth[name] for name in own}
    return scales


def depths(tower: str, names: list[str]) -> dict[str, int]:
    """Count the layers between each parameter and the end of its tower, with the end itself at 0."""
    found = {name: _LAYER.search(name) for name in names}
    numbers = sorted({int(match[1]) for match in found.values() if match})
    if not numbers:
        raise UsageError(
            f"--{tower}-layer-decay: no layers found in this tower, whose parameters are {', '.join(names[:3])}, ..."
        )
    depth = {number: len(numbers) - place for place, number in enumerate(numbers)}
    outside = {name: 0 if _AFTER.search(name) or not _BEFORE.search(name) else len(numbers) + 1 for name in names}
    return {name: outside[name] if match is None else depth[int(match[1])] for name, match in found.items()}
