"""Helpers for tests on a GPU. These tests also run on the CPU, to find mistakes in the tests themselves."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# With torch 2.6, FSDP2 needs a GPU.
CAN_SHARD = torch.cuda.is_available() or hasattr(torch.cpu.Stream, "record_event")
needs_sharding = pytest.mark.skipif(not CAN_SHARD, reason=f"torch {torch.__version__} shards parameters only on a GPU")
on_each_device = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=_ON_A_GPU)], ids=str)


def all_on_a_gpu(cases: Iterable[tuple], on_the_cpu: Iterable[tuple]) -> list[Any]:
    """Return test parameters whose last value is the device: ``cases`` on a GPU, and ``on_the_cpu`` on the CPU."""
    devices = [(case, CPU, []) for case in on_the_cpu] + [(case, CUDA, _ON_A_GPU) for case in cases]
    return [
        pytest.param(*case, device, marks=marks, id="-".join(map(str, (*case, device))))
        for case, device, marks in devices
    ]


@contextlib.contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """Raise an error at a host-device sync inside the ``with`` block. This has no effect if ``device`` is the CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
