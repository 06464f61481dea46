"""The device: builds ``device.cpp``, and stands in for what ``torch.cuda`` asks of a driver."""

import contextlib
import ctypes
import functools
import hashlib
import itertools
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
from torch._subclasses.fake_tensor import FakeTensorMode

_SOURCE = Path(__file__).with_name("device.cpp")
CUDA = torch.device("cuda", 0)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled device, kept in the temporary folder from run to run.

    Raises:
        pytest.skip.Exception: there is no C++ compiler, or a real device, which needs no fake.
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
    """Let autograd start a thread for each fake device. It does so once in a process, in the first backward pass."""
    device = library()
    device.enter()
    try:
        torch.ones((), requires_grad=True).backward()
    finally:
        device.leave()


# Of each device, the stream that work goes to.
_current: dict[torch.device, "FakeStream"] = {}
_clock = itertools.count(1)


class FakeStream:
    """A stream of a device, which knows what it is ordered behind; the host never waits for it.

    Attributes:
        seen: of other streams, the time until which their work is done when this one's goes on.
        kept: the memory that is not given away before this stream has used it (``record_stream``), by address. Holding
            it keeps its address from being another tensor's later.
    """

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)
        self.seen: dict[FakeStream, int] = {}
        self.kept: dict[int, torch.UntypedStorage] = {}

    def wait_stream(self, other: "FakeStream") -> None:
        """Order this stream behind another one."""
        self.seen[other] = next(_clock)

    def wait_event(self, event: "FakeEvent") -> None:
        """Order this stream behind an event."""
        assert event.stream is not None, "the event was not recorded"
        self.seen[event.stream] = max(self.seen.get(event.stream, 0), event.time)

    def __enter__(self) -> "FakeStream":
        self._outer, _current[self.device] = current_stream(self.device), self
        return self

    def __exit__(self, *error: object) -> None:
        _current[self.device] = self._outer


class FakeEvent:
    """An event, which remembers the stream it was recorded on, and when."""

    recorded: "list[FakeEvent]" = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.stream: FakeStream | None = None
        self.time = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream, self.time = stream or current_stream(), next(_clock)
        FakeEvent.recorded.append(self)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True


def current_stream(device: Any = None) -> FakeStream:
    """The device's stream, of the first device by default."""
    device = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)
    return _current.setdefault(device, FakeStream(device))


def memory_of(tensor: Tensor) -> int:
    """What views of a tensor share."""
    return tensor.untyped_storage()._cdata


def _record_stream(tensor: Tensor, stream: FakeStream) -> None:
    stream.kept[memory_of(tensor)] = tensor.untyped_storage()


def now() -> int:
    """The time, as events have it."""
    return next(_clock)


class _Generator:
    """Stands for a CUDA generator: fake tensors draw no numbers."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls) if torch.device(device).type == "cuda" else _REAL_GENERATOR(device)

    def manual_seed(self, seed: int) -> None:
        return None


_REAL_GENERATOR = torch.Generator


def _without_pinning(function: Any) -> Any:
    """A tensor factory whose ``pin_memory=True`` does nothing: no driver pins memory."""

    def call(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return function(*args, **options)

    return call


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Let new tensors be fake, on two CUDA devices or on the CPU; the first device is current."""
    device = library()
    cuda = {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "current_stream": current_stream,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        # torch.tensor() would ask the driver for memory otherwise: Lightning lets is_available() go by device_count().
        "is_available": lambda: False,
        "is_bf16_supported": lambda *args, **options: True,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "stream": lambda stream: stream,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch, "empty", _without_pinning(torch.empty)))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _record_stream))
        stack.enter_context(mock.patch.object(FakeEvent, "recorded", []))
        # New streams: they know nothing of memory that another test used.
        stack.enter_context(mock.patch.dict(_current, clear=True))
        device.enter()
        stack.callback(device.leave)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def to_fake_cuda(module: nn.Module, device: torch.device = CUDA) -> nn.Module:
    """Replace a module's parameters and buffers by fake ones on a device, within :func:`fake_cuda`."""
    moved: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return moved[id(tensor)]

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)
    return module
