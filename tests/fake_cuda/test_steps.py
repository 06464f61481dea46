"""Whole optimizer steps of the trainer on fake CUDA tensors, in the ways that a command line can ask for."""

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import open_clip
import pytest
import torch

from openclip_ext.contrastive import similarities
from openclip_ext.contrastive.checks import CHECKED_CALLS
from openclip_ext.losses import registry
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepConfig, TrainStep
from tests.fake_cuda import bounds
from tests.fake_cuda.bounds import bound
from tests.fake_cuda.device import CUDA, FakeEvent, fake_cuda, to_fake_cuda
from tests.fake_cuda.launches import Launches
from tests.fake_cuda.test_losses import SOLVES_FROM
from tests.training.tiny import LOSSES, OPTIMIZER, SAMPLES, WIDTH, parts_of, prepare, tiny_batch, tiny_model

STEPS = CHECKED_CALLS + 2
# Losses that a way other than the plain one is tried with: one without state, a table, a network, prototypes.
_SOME = ("openclip", "fastclip", "fastclip-v2", "amorlip", "neuclip")


@dataclass(frozen=True)
class Way:
    """How a step computes. Only losses that take the options are tried."""

    tower: str = "vit"
    micro_batches: int = 1
    precision: str = "fp32"
    clip: float | None = None
    ema: bool = False
    optimizer: str = "adamw"
    chunked: bool = False
    options: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "plain": Way(),
    "accumulated": Way(micro_batches=2),
    "clipped": Way(clip=1.0),
    "amp": Way(precision="amp", clip=1.0),
    "amp_bf16-accumulated-ema": Way(precision="amp_bf16", micro_batches=2, ema=True),
    "resnet": Way(tower="resnet"),
    "lamb": Way(optimizer="lamb"),
    "chunks": Way(chunked=True),
    "host-table": Way(options={"state_device": "cpu"}),
    "host-table-accumulated": Way(options={"state_device": "cpu"}, micro_batches=2),
    "views": Way(options={"views": 2}),
    "host-table-views": Way(options={"state_device": "cpu", "views": 2}),
    "solved": Way(options={"temperature_scheme": "solved", "temperature_queue": 12, "rho": 1.0}),
    "equal-captions": Way(options={"equal_captions": "mask"}),
}


def _takes(name: str, options: dict[str, Any]) -> bool:
    try:
        registry.create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **(LOSSES[name] | options))
    except ValueError:
        return False
    return True


_CASES = [
    (way, name)
    for way in WAYS
    for name in (LOSSES if way in ("plain", "views", "host-table-views") else _SOME)
    if _takes(name, WAYS[way].options)
]


def run_steps(name: str, way: Way, device: torch.device = CUDA) -> list[Launches]:
    """Take some steps; what each launched."""
    with mock.patch.object(similarities, "MAX_PAIRS", 16 if way.chunked else similarities.MAX_PAIRS):
        return _run_steps(name, way, device)


def _run_steps(name: str, way: Way, device: torch.device) -> list[Launches]:
    model = tiny_model(way.tower)
    loss = registry.create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **(LOSSES[name] | way.options))
    prepare(model, loss)
    seen = []
    with fake_cuda(), Launches() as launches:
        to_fake_cuda(model, device)
        to_fake_cuda(loss, device)
        optimizer = create_optimizer(
            model, replace(OPTIMIZER, name=way.optimizer), loss.logit_scale_lr, loss.model_head()
        )
        config = StepConfig(way.precision, way.clip)
        ema = ModelEma(model, 0.99) if way.ema else None
        step = TrainStep(model, loss, optimizer, config.settings(device), config.scaler(device), ema)
        model.train()
        loss.train()
        for number in range(STEPS):
            loss.start_epoch(number // 3)
            loss.calls += number == 2 and SOLVES_FROM
            batch = _batch(number, loss, 32 if way.tower == "resnet" else 16)
            launches.reset()
            FakeEvent.recorded.clear()
            step(parts_of(batch, way.micro_batches), number)
            assert launches.races == {}
            assert all(event.stream is not None and event.stream.device == device for event in FakeEvent.recorded)
            seen.append(_copy(launches))
    return seen


def _batch(number: int, loss: Any, size: int) -> dict[str, torch.Tensor]:
    like = tiny_batch(number, loss.views, size=size)
    batch = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    if loss.needs_positives:
        batch["caption_hash"] = torch.empty(like["index"].shape, dtype=torch.int64)
    return batch


def _copy(launches: Launches) -> Launches:
    copy = Launches()
    copy.number, copy.operations, copy.waits = launches.number, launches.operations.copy(), launches.waits.copy()
    return copy


@pytest.mark.parametrize(("way", "name"), _CASES)
def test_no_step_waits_or_mixes_devices(way: str, name: str) -> None:
    assert {wait for launches in run_steps(name, WAYS[way]) for wait in launches.unknown_waits} == set()


@pytest.mark.parametrize("name", LOSSES)
def test_no_step_has_more_launches_than_its_bound(name: str) -> None:
    assert launches_of(name) <= bound("step", name)


@pytest.mark.parametrize(("name", "way"), bounds.WAYS)
def test_what_takes_more_launches_has_a_bound_of_its_own(name: str, way: str) -> None:
    assert launches_of(name, way) <= bound(way, name)


def launches_of(name: str, way: str = "plain") -> int:
    """Launches of the most expensive of some steps, after those that make the optimizer's state and check the loop."""
    options = bounds.options(name) | WAYS[way].options
    steps = run_steps(name, replace(WAYS[way], options=options))
    return max(launches.number for launches in steps[CHECKED_CALLS:])


@pytest.mark.parametrize("name", ["isogclr", "amorlip", "neuclip"])
def test_the_guard_is_a_fiftieth_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = registry.create_loss(name, embed_dim=512, num_samples=100_000)
    of_guard = 0
    with fake_cuda(), Launches() as launches:

        def counted(part: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal of_guard
                before, result = launches.number, part(*args, **options)
                of_guard += launches.number - before
                return result

            return call

        model = open_clip.CLIP(**open_clip.get_model_config("ViT-B-32"), output_dict=True)
        to_fake_cuda(model), to_fake_cuda(loss)
        model.logit_scale.requires_grad_(loss.learns_logit_scale)
        optimizer = create_optimizer(model, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
        step = TrainStep(model, loss, optimizer, StepConfig("amp_bf16").settings(CUDA))
        for part in ("before_forward", "before_loss", "judge", "finish"):
            monkeypatch.setattr(step.guard, part, counted(getattr(step.guard, part)))
        batch = {
            "image": torch.empty(8, 3, 224, 224),
            "text": torch.empty(8, 77, dtype=torch.int64),
            "index": torch.empty(8, dtype=torch.int64),
        }
        loss.start_epoch(0)
        launches.reset()
        step([batch])
    assert 0 < of_guard <= launches.number / 50


@pytest.mark.parametrize("name", ["openclip", "fastclip", "neuclip"])
def test_a_step_works_on_a_device_that_is_not_current(name: str) -> None:
    run_steps(name, WAYS["plain"], torch.device("cuda", 1))
