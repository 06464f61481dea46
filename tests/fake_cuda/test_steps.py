"""The trainer's optimizer steps on fake CUDA tensors, with all flags that change how a step is computed."""

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

from openclip_ext.contrastive import similarities
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import METHODS, options_used_by
from openclip_ext.training.config import StepConfig
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep, gradient_scaler
from tests.fake_cuda import bounds
from tests.fake_cuda.bounds import bound
from tests.fake_cuda.device import CUDA, FakeEvent, fake_cuda, to_fake_cuda
from tests.fake_cuda.launches import Launches
from tests.fake_cuda.test_losses import CALLS, LIKE_ANOTHER, go_on
from tests.training.tiny import LOSSES, OPTIMIZER, parts_of, prepare, tiny_batch, tiny_loss, tiny_model

_TWO_VIEWS = tuple(name for name in METHODS if "views" in options_used_by(name))
# One loss without state, one with a table, one with a network, and one with prototypes.
_SOME = ("openclip", "fastclip-v2", "amorlip", "neuclip")


@dataclass(frozen=True)
class Way:
    """How a step is computed, and with which losses."""

    tower: str = "vit"
    micro_batches: int = 1
    precision: str = "fp32"
    clip: float | None = None
    ema: bool = False
    optimizer: str = "adamw"
    chunked: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    losses: tuple[str, ...] = _SOME


WAYS = {
    "plain": Way(losses=()),  # test_no_step_has_more_launches_than_its_bound runs it
    "amp": Way(precision="amp", clip=1.0, losses=("amorlip",)),
    "amp_bf16-accumulated-ema": Way(precision="amp_bf16", micro_batches=2, ema=True, losses=("neuclip",)),
    "resnet": Way(tower="resnet", losses=("fastclip",)),
    "lamb": Way(optimizer="lamb", losses=("neuclip",)),
    "chunks": Way(chunked=True, losses=("fastclip-v2",)),
    "views": Way(options={"views": 2}, losses=_TWO_VIEWS),
    "solved": Way(options={"temperature_scheme": "solved", "temperature_queue": 12, "rho": 1.0}, losses=("neuclip",)),
    "equal-captions": Way(options={"equal_captions": "mask"}, losses=("openclip", "neuclip")),
}


_MEASURED = [("plain", name) for name in LOSSES if name not in LIKE_ANOTHER] + [
    (way, name) for name, way in bounds.WAYS
]
_CASES = [(way, name) for way in WAYS for name in WAYS[way].losses]


def run_steps(name: str, way: Way, device: torch.device = CUDA) -> list[int]:
    """Take steps, and assert that they do not sync; return the number of kernel launches in each step."""
    model, loss = tiny_model(way.tower, layers=1), tiny_loss(name, **way.options)
    prepare(model, loss)
    pairs = mock.patch.object(similarities, "MAX_PAIRS", 32 if way.chunked else similarities.MAX_PAIRS)
    numbers = []
    with pairs, fake_cuda(), Launches() as launches:
        to_fake_cuda(model, device)
        to_fake_cuda(loss, device)
        settings = replace(OPTIMIZER, name=way.optimizer)
        optimizer = create_optimizer(model, settings, loss.logit_scale_lr, loss.model_head())
        config = StepConfig(way.precision, way.clip)
        ema = ModelEma(model, 0.99) if way.ema else None
        scaler = gradient_scaler(config.precision, device)
        step = TrainStep(model, loss, optimizer, StepSettings.of(config, device), scaler, ema)
        for number in range(CALLS):
            go_on(loss, number)
            batch = _batch(number, loss, 32 if way.tower == "resnet" else 16)
            launches.reset()
            FakeEvent.recorded.clear()
            step(parts_of(batch, way.micro_batches), number)
            assert launches.unknown_waits == {}
            assert all(event.stream is not None and event.stream.device == device for event in FakeEvent.recorded)
            numbers.append(launches.number)
    return numbers


def _batch(number: int, loss: ContrastiveLoss, size: int) -> dict[str, torch.Tensor]:
    like = tiny_batch(number, loss.views, size=size)
    batch = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    if loss.needs_positives:
        batch |= {name: torch.empty(like["index"].shape, dtype=torch.int64) for name in ("caption_hash", "image_hash")}
    return batch


@pytest.mark.parametrize(("way", "name"), [case for case in _CASES if case not in _MEASURED])
def test_no_step_waits_or_mixes_devices(way: str, name: str) -> None:
    run_steps(name, WAYS[way])


@pytest.mark.parametrize(("way", "name"), _MEASURED)
def test_no_step_has_more_launches_than_its_bound(way: str, name: str) -> None:
    assert launches_of(name, way) <= bound("step" if way == "plain" else way, name)


def launches_of(name: str, way: str = "plain") -> int:
    """Return the largest number of kernel launches in any step except the first, which creates state."""
    options = bounds.options(name) | WAYS[way].options
    numbers = run_steps(name, replace(WAYS[way], options=options))
    return max(numbers[1:])


def test_a_step_works_on_a_device_that_is_not_current() -> None:
    run_steps("neuclip", WAYS["plain"], torch.device("cuda", 1))
