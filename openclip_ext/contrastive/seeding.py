"""Random numbers of the losses: the same on every rank, and no generator of the training is touched."""

import hashlib
import math

import torch
from torch import nn


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator | None:
    """A generator whose stream is a function of ``parts`` alone.

    What a step draws follows from the seed and from counters that are state anyway, so that there is no generator's state
    to keep, move between devices and restore. None for the meta device, on which nothing is drawn.
    """
    if torch.device(device).type == "meta":
        return None
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def linear(width_in: int, width_out: int, bias: bool, random: torch.Generator) -> nn.Linear:
    """A linear layer with torch's distribution of start values, from a generator of one's own."""
    layer = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    bound = 1 / math.sqrt(width_in)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=random)
    return layer
