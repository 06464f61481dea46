"""Every loss on fake CUDA tensors: correct devices, no host-device sync, and at most the allowed kernel launches.

On fake ranks, collectives are stubs that count their calls and record the devices of their tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss, list_losses
from tests.fake_cuda.bounds import bound, options
from tests.fake_cuda.device import CUDA, fake_cuda, pretend_values, to_fake_cuda
from tests.fake_cuda.launches import Launches
from tests.losses.cases import CASES, SAMPLES, WIDTH, Case, kinds

# Number of training calls: the first creates the state, the third starts epoch 1, and every second call restarts and fits.
BATCH, CALLS = 6, 3
# From this number of calls on, a loss no longer checks the training loop, and solved temperatures move.
SOLVES_FROM = 100
# Combinations of parts that have no reference.
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "openclip-mask": ("openclip", {"equal_captions": "mask"}),
    "fastclip-predicted": ("fastclip", {"temperature_scheme": "predicted"}),
    "neuclip-solved": (
        "neuclip",
        {"prototypes": 9, "temperature_scheme": "solved", "temperature_queue": 9, "rho": 1.0},
    ),
    "neuclip-per-sample": ("neuclip", {"prototypes": 9, "temperature_scheme": "per-sample"}),
    "queueclip-per-sample": ("queueclip", {"prototypes": 9, "temperature_scheme": "per-sample"}),
    "queueclip-predicted": ("queueclip", {"prototypes": 9, "temperature_scheme": "predicted"}),
    "amorlip-local": ("amorlip", {}),
}
# Losses that run the same code on a device as another tested loss. Each still has its own bound.
LIKE_ANOTHER = {"siglip", "fastclip", "fastclip-v0", "fastclip-v1", "fastclip-v3", "sogclr", "isogclr"}
RANKS = 4
# OpenCLIP's losses are excluded from the tests on fake ranks, because they do not use this package's collectives.
GATHER_BY_THEMSELVES = [name for name in kinds() if CASES[name].loss == "openclip"]
ALL = CASES | {name: Case(loss, None, options) for name, (loss, options) in _MORE.items()}


@dataclass(frozen=True)
class Form:
    """The dtypes and devices of the inputs of a call."""

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    device: torch.device = CUDA
    index_device: torch.device | None = None
    scale: float | Tensor | None = None


PLAIN = Form()
_FORMS = {
    "amp, index on the host, scale is a number": Form(
        autocast=torch.float16, index_device=torch.device("cpu"), scale=14.3
    ),
    "bf16, not the current device, scale on the host": Form(
        dtype=torch.bfloat16, device=torch.device("cuda", 1), scale=torch.tensor(14.3)
    ),
}


def go_on(loss: ContrastiveLoss, number: int) -> None:
    """Prepare call ``number``. Call 0 is the first call of a loss; from call 1 on, the loss behaves as after 100 calls."""
    loss.start_epoch(number // 2)
    if number == 1:
        loss.calls += SOLVES_FROM
        pretend_values()


def call(loss: ContrastiveLoss, form: Form = PLAIN) -> None:
    """Call a loss with inputs like the trainer's, and run the backward pass if it is in training mode."""
    device = form.device
    images, texts = (torch.empty(BATCH, WIDTH, dtype=form.dtype, device=device).requires_grad_() for _ in range(2))
    logit_scale, logit_bias = (torch.empty((), device=device).requires_grad_() for _ in range(2))
    index = torch.empty(BATCH, dtype=torch.int64, device=form.index_device or device)
    positives = {"positives": index} if loss.needs_positives else {}
    scale = logit_scale if form.scale is None else form.scale
    with torch.autocast("cuda", form.autocast, enabled=form.autocast is not None):
        value = loss(images, texts, scale, logit_bias=logit_bias, index=index, **positives)
    if loss.training:
        value.backward()
        assert images.grad is not None and images.grad.device == device
        assert images.grad.dtype == form.dtype


def run_calls(loss: ContrastiveLoss, form: Form = PLAIN, before_call: Callable[[], None] = lambda: None) -> list[int]:
    """Make three training calls and one evaluation call; assert that no call syncs; return each call's number of launches."""
    numbers = []
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(loss, form.device)
        for number in range(CALLS + 1):
            loss.train(number < CALLS)
            go_on(loss, number)
            launches.reset()
            before_call()
            call(loss, form)
            assert launches.unknown_waits == {}
            numbers.append(launches.number)
        assert {tensor.device for tensor in (*loss.parameters(), *loss.buffers())} <= {form.device}
    return numbers


# test_no_rank_waits_for_its_device makes the same calls with the other losses.
@pytest.mark.parametrize("name", [*GATHER_BY_THEMSELVES, *_MORE])
def test_no_call_waits_or_mixes_devices(name: str) -> None:
    run_calls(ALL[name].create())


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("name", sorted(set(list_losses()) - LIKE_ANOTHER))
def test_no_form_of_inputs_waits_or_mixes_devices(name: str, form: str) -> None:
    run_calls(create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES), _FORMS[form])


@pytest.mark.parametrize("name", list_losses())
def test_no_call_has_more_launches_than_its_bound(name: str) -> None:
    assert launches_of(name) <= bound("loss", name)


def launches_of(name: str) -> int:
    """Return the largest number of launches in any training call except the first."""
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options(name))
    return max(run_calls(loss)[1:CALLS])


@contextmanager
def four_ranks() -> Iterator[list[Counter[str]]]:
    """Make this process rank 1 of four. Yield a list. Its last counter counts collectives by name and tensor device."""
    seen: list[Counter[str]] = []

    def stub(name: str) -> Any:
        def collective(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> None:
            seen[-1][f"{name} on {tensor.device.type}"] += 1
            assert (tensor.device.type == "cpu") == (group == "gloo"), "expected gloo for the CPU, NCCL for CUDA"

        return collective

    with ExitStack() as stack:
        for name, value in {"world_size": RANKS, "rank": 1, "is_initialized": True, "_control_group": "gloo"}.items():
            stack.enter_context(mock.patch.object(distributed, name, lambda value=value: value))
        for name in ("all_gather_into_tensor", "all_reduce"):
            stack.enter_context(mock.patch.object(dist, name, stub(name)))
        yield seen


@pytest.mark.parametrize("name", [name for name in kinds() if name not in GATHER_BY_THEMSELVES])
def test_no_rank_waits_for_its_device(name: str) -> None:
    with four_ranks() as collectives:
        run_calls(ALL[name].create(), before_call=lambda: collectives.append(Counter()))
    last_in_training = collectives[CALLS - 1]
    assert sum(last_in_training.values()) <= 12
    assert not last_in_training["all_gather_into_tensor on cpu"]
