"""Every loss on fake CUDA tensors: no tensor on a wrong device, no wait, and no more launches than its bound."""

from typing import Any

import pytest
import torch

from openclip_ext.contrastive.checks import CHECKED_CALLS
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss, list_losses
from tests.fake_cuda.bounds import bound, options
from tests.fake_cuda.device import CUDA, fake_cuda, to_fake_cuda
from tests.fake_cuda.launches import Launches
from tests.losses.cases import CASES, SAMPLES, WIDTH, Case

# Three epochs begin in the calls, and restarts and fits of every few steps are among them.
BATCH, CALLS = 6, CHECKED_CALLS + 2
# Temperatures are not solved before this call.
SOLVES_FROM = 100
# Compositions that have no reference of their own.
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
ALL: dict[str, Case] = {
    **{name: Case(name, None) for name in list_losses()},
    **{name: Case(loss, None, options) for name, (loss, options) in _MORE.items()},
    **CASES,
}
# Features, autocast, where the index is.
_FORMS = {
    "fp32": (torch.float32, None, "cuda"),
    "amp": (torch.float32, torch.float16, "cuda"),
    "bf16": (torch.bfloat16, None, "cuda"),
    "index-on-cpu": (torch.float32, None, "cpu"),
    "scale-as-number": (torch.float32, None, "cuda"),
}


def call(loss: ContrastiveLoss, form: str = "fp32", device: torch.device = CUDA) -> None:
    """One call with the backward pass, on inputs as the trainer makes them."""
    dtype, autocast, index_device = _FORMS[form]
    images, texts = (torch.empty(BATCH, WIDTH, dtype=dtype, device=device).requires_grad_() for _ in range(2))
    logit_scale, logit_bias = (torch.empty((), device=device).requires_grad_() for _ in range(2))
    index = torch.empty(BATCH, dtype=torch.int64, device="cpu" if index_device == "cpu" else device)
    if loss.needs_index:
        loss.prefetch(torch.empty(BATCH, dtype=torch.int64, device="cpu"))
    positives = {"positives": index} if loss.needs_positives else {}
    scale = 14.3 if form == "scale-as-number" else logit_scale
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        value = loss(images, texts, scale, logit_bias=logit_bias, index=index, **positives)
    if loss.training:
        value.backward()
        assert images.grad is not None and images.grad.device == device
        assert images.grad.dtype == dtype


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in ALL for form in _FORMS if form == "fp32" or name in list_losses()]
)
def test_no_call_waits_or_mixes_devices(name: str, form: str) -> None:
    loss = ALL[name].create()
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(loss)
        launches.reset()
        for number in range(CALLS):
            loss.start_epoch(number // 2)
            call(loss, form)
        loss.eval()
        call(loss, form)
    assert launches.unknown_waits == {}


@pytest.mark.parametrize("name", list_losses())
def test_no_call_has_more_launches_than_its_bound(name: str) -> None:
    assert launches_of(name) <= bound("loss", name)


def launches_of(name: str) -> int:
    """Launches of the most expensive of some calls in training mode."""
    most = 0
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options(name))
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(loss)
        for number in range(CALLS):
            loss.start_epoch(number // 2)
            loss.calls += number == 2 and SOLVES_FROM
            launches.reset()
            call(loss)
            most = max(most, launches.number if number >= CHECKED_CALLS else 0)
    return most


@pytest.mark.parametrize("name", ["fastclip", "fastclip-v2", "isogclr", "sogclr"])
def test_tables_on_the_host_wait_for_no_device(name: str) -> None:
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, state_device="cpu")
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(loss)
        launches.reset()
        for _ in range(CALLS):
            call(loss)
    assert launches.unknown_waits == {}


@pytest.mark.parametrize("name", list_losses())
def test_a_loss_works_on_a_device_that_is_not_current(name: str) -> None:
    loss, second = ALL[name].create(), torch.device("cuda", 1)
    with fake_cuda():
        to_fake_cuda(loss, second)
        for _ in range(3):
            call(loss, device=second)
        assert {tensor.device for tensor in (*loss.parameters(), *loss.buffers())} <= {second}


@pytest.mark.parametrize("name", [name for name in list_losses() if name not in ("cliplite", "simclr")])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_logit_scale_on_the_host_is_taken(name: str, as_tensor: bool) -> None:
    """As ClipLoss takes it. A tensor's own gradient goes back to the host; the forward pass waits for nothing."""
    loss = ALL[name].create()
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(loss)
        images, texts = (torch.empty(BATCH, WIDTH, device=CUDA).requires_grad_() for _ in range(2))
        index = torch.empty(BATCH, dtype=torch.int64, device=CUDA)
        launches.reset()
        value = loss(images, texts, torch.empty(()) if as_tensor else 10.0, torch.empty((), device=CUDA), index=index)
        assert launches.unknown_waits == {}
        value.backward()
    assert images.grad is not None and images.grad.device == CUDA
