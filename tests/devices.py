"""For tests that a GPU is needed for: they run on the CPU, too, so that each has been run before the day of the GPU."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_each_device = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=_ON_A_GPU)], ids=str)


def all_on_a_gpu(cases: Iterable[tuple], on_the_cpu: Iterable[tuple]) -> list[Any]:
    """Return cases with a device at their end: all on a GPU, and on the CPU those that show that the test is right."""
    devices = [(case, CPU, []) for case in on_the_cpu] + [(case, CUDA, _ON_A_GPU) for case in cases]
    return [
        pytest.param(*case, device, marks=marks, id="-".join(map(str, (*case, device))))
        for case, device, marks in devices
    ]


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
