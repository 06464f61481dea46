"""Random numbers for the losses. They are equal on every rank, and do not depend on the run's other generators."""

import hashlib
import math

import torch
from torch import nn


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator | None:
    """Return a generator whose random numbers depend only on ``parts``; None for the meta device.

    ``parts`` are the seed and counters. These are already part of the state, so generators need not be saved.
    """
    if torch.device(device).type == "meta":
        return None
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def linear(width_in: int, width_out: int, bias: bool, random: torch.Generator | None) -> nn.Linear:
    """Return a linear layer with torch's distribution of initial values, drawn from the generator ``random``."""
    layer = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    bound = 1 / math.sqrt(width_in)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=random)
    return layer
