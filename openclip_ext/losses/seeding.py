"""Random numbers of the losses: the same on every rank, and no generator of the training is touched."""

import hashlib

import torch


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """A generator whose stream is a function of ``parts`` alone.

    What a step draws follows from the seed and from counters that are state anyway, so that there is no generator's state
    to keep, move between devices and restore.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
