"""For tests that a GPU is needed for: they run on the CPU, too, so that each has been run before the day of the GPU."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

on_each_device = pytest.mark.parametrize(
    "device",
    [
        torch.device("cpu"),
        pytest.param(
            torch.device("cuda"),
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
    ids=str,
)


@contextlib.contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """Raise where the host would wait for the GPU; on the CPU there is nothing to wait for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
