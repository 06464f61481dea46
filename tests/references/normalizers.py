"""Exact log-normalizers of NeuCLIP, equation (9), in float64 loops, without the package's code."""

import math

import torch

from tests.references.contrastive import inner


def exact_log_normalizers(
    images: torch.Tensor,
    texts: torch.Tensor,
    anchors: list[int],
    tau: torch.Tensor,
    eps: float,
    batch: int | None = None,
) -> torch.Tensor:
    """Return ``log(ε + g_i(S))`` or, for a ``batch`` size B, ``log((1 + (B−1)·g_i(S))/B)`` with the positive, ``(2, A)``."""
    images, texts = images.double(), texts.double()
    result = torch.zeros(2, len(anchors), dtype=torch.float64)
    for side in (0, 1):
        for number, i in enumerate(anchors):
            g = inner(images, texts, tau[side, number].item(), side, i).item()
            total = eps + g if batch is None else (1 + (batch - 1) * g) / batch
            result[side, number] = math.log(total)
    return result
