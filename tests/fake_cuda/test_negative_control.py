"""The fake device finds each kind of sync, and mixed devices are an error. The other tests in this folder rely on this."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.launches import Launches

_WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.__setitem__(x > 0, x[:1]),
    "nonzero": lambda x: x.nonzero(),
    "to the host": lambda x: x.cpu(),
    "to the device": lambda x: torch.zeros(4).to(x.device),
    "copy": lambda x: x.copy_(torch.zeros(4)),
    "index on the CPU": lambda x: x[torch.tensor([0, 1])],
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
}
_GOES_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1).sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "to the host without blocking": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "to the device without blocking": lambda x: torch.zeros(4).to(x.device, non_blocking=True),
    "full": lambda x: torch.full((3,), 2.0, device=x.device),
}


def _watched(call: Callable[[Tensor], object]) -> Launches:
    with fake_cuda(), Launches() as launches:
        x = torch.empty(4, device="cuda")
        launches.reset()
        # These errors are expected: a fake tensor has no value that the host could read.
        with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
            call(x)
    return launches


@pytest.mark.parametrize("name", _WAITS)
def test_a_wait_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing Lightning sets this
    assert _watched(_WAITS[name]).waits


@pytest.mark.parametrize("name", _GOES_ON)
def test_what_does_not_wait_is_counted_only(name: str) -> None:
    launches = _watched(_GOES_ON[name])
    assert not launches.waits
    assert launches.number


def test_tensors_on_two_devices_do_not_mix() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match="device"):
        _ = torch.empty(4, device="cuda") + torch.empty(4)
    with fake_cuda(), pytest.raises(RuntimeError, match="device"):
        _ = torch.empty(4, device="cuda:0") + torch.empty(4, device="cuda:1")


def test_a_backward_pass_runs_and_the_real_device_is_back_afterwards() -> None:
    with fake_cuda():
        x = torch.empty(4, 4, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None and x.grad.is_cuda
    real = torch.ones(2, requires_grad=True)
    real.sum().backward()
    assert real.grad is not None and real.grad.tolist() == [1.0, 1.0]
    assert not torch.cuda.is_available()
