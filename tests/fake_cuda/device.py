"""The fake CUDA device: compile ``device.cpp``, and replace the functions of ``torch.cuda`` that need a driver."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from openclip_ext.contrastive import checks

_SOURCE = Path(__file__).with_name("device.cpp")
CUDA = torch.device("cuda", 0)


@torch.library.register_fake("aten::_fused_adagrad_")
def _fused_adagrad(*tensors: Any, **options: Any) -> None:
    """Make this operation possible with fake tensors. It changes tensors in place, and returns nothing."""


@functools.cache
def library() -> ctypes.CDLL:
    """Compile ``device.cpp`` and load it; the library is cached in the temporary folder.

    Raises:
        pytest.skip.Exception: there is no C++ compiler, or the machine has a real CUDA device.
    """
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device; run pytest -m gpu")
    if shutil.which("g++") is None:
        pytest.skip("fake CUDA devices need the C++ compiler g++ (Debian's package g++)")
    name = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"openclip_ext-fake-cuda-{os.getuid()}-{name}.so"
    if not built.exists():
        home = Path(torch.__file__).parent
        includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        unfinished = built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", "-w", *includes, str(_SOURCE), "-o", str(unfinished)]
        subprocess.run([*command, f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
        unfinished.replace(built)
    return ctypes.CDLL(str(built))


def start_autograd() -> None:
    """Start autograd's threads for the fake devices. Threads start only in the first backward pass of a process."""
    device = library()
    device.enter()
    try:
        torch.ones((), requires_grad=True).backward()
    finally:
        device.leave()


class FakeStream:
    """Replacement for a CUDA stream. A fake device has only one stream."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)


class FakeEvent:
    """Replacement for a CUDA event. It stores the stream on which it was recorded."""

    recorded: "list[FakeEvent]" = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or FakeStream()
        FakeEvent.recorded.append(self)

    def synchronize(self) -> None:
        """Do nothing, because no work is pending on a fake device."""


class _Generator:
    """Replacement for a CUDA generator. It needs no state, because fake tensors have no values."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls) if torch.device(device).type == "cuda" else _REAL_GENERATOR(device)

    def manual_seed(self, seed: int) -> None:
        return None


_REAL_GENERATOR = torch.Generator


def _without_pinning(function: Any) -> Any:
    """Return a tensor factory that ignores ``pin_memory=True``, because pinning memory needs a driver."""

    def call(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return function(*args, **options)

    return call


def pretend_values() -> None:
    """Until :func:`fake_cuda` ends, let losses read values of fake tensors, so that these reads count as syncs."""
    checks._HAVE_VALUES = (*checks._HAVE_VALUES, FakeTensor)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Within this context, new tensors are fake. There are two fake CUDA devices; the first one is current."""
    device = library()
    cuda = {
        "Event": FakeEvent,
        "current_stream": FakeStream,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        # Lightning makes is_available() depend on device_count(). If it returned True, torch.tensor() would call the driver.
        "is_available": lambda: False,
        "is_bf16_supported": lambda *args, **options: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch, "empty", _without_pinning(torch.empty)))
        stack.enter_context(mock.patch.object(FakeEvent, "recorded", []))
        stack.enter_context(mock.patch.object(checks, "_HAVE_VALUES", checks._HAVE_VALUES))
        device.enter()
        stack.callback(device.leave)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def to_fake_cuda(module: nn.Module, device: torch.device = CUDA) -> nn.Module:
    """Replace a module's parameters and buffers with fake tensors on a device, within :func:`fake_cuda`."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return module.to_empty(device=device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
