"""Random numbers of the losses: the same on every rank, and independent of the training's generators."""

import hashlib
import math

import torch
from torch import nn


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator | None:
    """Make a generator whose stream is a function of ``parts`` alone.

    The random numbers of a step follow from the seed and from counters that are state anyway. So no generator's state has to
    be saved, moved between devices and restored. None for the meta device, where nothing is drawn.
    """
    if torch.device(device).type == "meta":
        return None
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def linear(width_in: int, width_out: int, bias: bool, random: torch.Generator | None) -> nn.Linear:
    """Make a linear layer with torch's distribution of start values, drawn from the given generator."""
    layer = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    bound = 1 / math.sqrt(width_in)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=random)
    return layer
