"""Random numbers of the losses: equal on every rank, and independent of the training's generators."""

import hashlib
import math

import torch
from torch import nn


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator | None:
    """Return a generator whose stream depends only on ``parts``; None for the meta device.

    Random numbers of a step depend on the seed and on counters that are already state. Generators therefore need not be saved,
    moved between devices or restored.
    """
    if torch.device(device).type == "meta":
        return None
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def linear(width_in: int, width_out: int, bias: bool, random: torch.Generator | None) -> nn.Linear:
    """Return a linear layer with torch's distribution of initial values, drawn from the given generator."""
    layer = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    bound = 1 / math.sqrt(width_in)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=random)
    return layer
