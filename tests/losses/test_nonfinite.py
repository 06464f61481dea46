"""A non-finite input is left out as if it had not been in the batch, leaves no trace in the state, and is reported."""

from typing import Any

import pytest
import torch

from openclip_ext.contrastive.checks import NonfiniteLog
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import CASES, Step, make_steps, run_step

BAD = 2


def _tensors(loss: ContrastiveLoss) -> dict[str, torch.Tensor]:
    """The state without the counters, which count every call."""
    state = loss.state_dict().items()
    return {key: value.clone() for key, value in state if not key.endswith("_extra_state")}


def _spoil(step: Step, side: str, value: float) -> None:
    getattr(step, side)[BAD, 1] = value


def _without_bad(step: Step) -> Step:
    keep = [i for i in range(len(step.index)) if i != BAD]
    index, labels = ([values[i] for i in keep] for values in (step.index, step.labels))
    return Step(step.images[keep], step.texts[keep], step.logit_scale, index, step.epoch, labels)


def _assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# TempNet's dropout mask has the batch's shape, so that leaving a sample out is another mask.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("tempnet")])
def test_bad_sample_is_as_good_as_absent(name: str) -> None:
    masked, absent = CASES[name].create().double(), CASES[name].create().double()
    for number, step in enumerate(make_steps(duplicates=False)):
        _spoil(step, "images" if number % 2 else "texts", float("nan") if number % 3 else float("inf"))
        value, gradients = run_step(masked, step)
        expected_value, expected = run_step(absent, _without_bad(step))
        _assert_same(value, expected_value)
        for side in (0, 1):
            assert torch.equal(gradients[side][BAD], torch.zeros_like(gradients[side][BAD]))
            _assert_same(torch.cat([gradients[side][:BAD], gradients[side][BAD + 1 :]]), expected[side])
        _assert_same(gradients[2], expected[2])
    for key, value in _tensors(absent).items():
        _assert_same(masked.state_dict()[key], value)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_bad_logit_scale_changes_nothing(name: str, scale: float) -> None:
    loss = CASES[name].create()
    steps = make_steps()
    for step in steps[:2]:
        run_step(loss, step)
    before = _tensors(loss)
    steps[2].logit_scale = scale
    steps[2].epoch = steps[1].epoch
    value, gradients = run_step(loss, steps[2])
    assert value == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    for key, expected in before.items():
        assert torch.equal(loss.state_dict()[key].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), key


@pytest.mark.parametrize("name", CASES)
def test_all_samples_bad_changes_nothing_and_training_goes_on(name: str) -> None:
    loss, undisturbed = CASES[name].create(), CASES[name].create()
    bad, *good = make_steps()
    bad.texts[:] = float("nan")
    for step in (bad, *good):
        step.epoch = 0
    value, gradients = run_step(loss, bad)
    assert value == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    for key, expected in _tensors(undisturbed).items():
        assert torch.equal(loss.state_dict()[key].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), key
    for step in good:
        value, gradients = run_step(loss, step)
        assert torch.isfinite(value)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_reported_with_call_and_index() -> None:
    loss = CASES["fastclip"].create()
    steps = make_steps(4)
    _spoil(steps[1], "images", float("nan"))
    _spoil(steps[3], "texts", float("inf"))
    steps[3].images[0, 0] = float("-inf")
    for step in steps:
        run_step(loss, step)
    assert loss.pop_nonfinite() == [(1, [steps[1].index[BAD]]), (3, [steps[3].index[0], steps[3].index[BAD]])]
    assert loss.pop_nonfinite() == []


def test_logit_scale_reported_without_indices() -> None:
    loss = CASES["neuclip"].create()
    step = make_steps(1)[0]
    for scale in (10.0, 10.0, float("nan")):
        step.logit_scale = scale
        run_step(loss, step)
    assert loss.pop_nonfinite() == [(2, [])]


@pytest.mark.parametrize("name", ["openclip", "siglip", "neuclip"])
def test_positions_are_reported_where_there_is_no_index(name: str) -> None:
    loss = create_loss(name, embed_dim=8, **({"prototypes": 4} if name == "neuclip" else {}))
    step = make_steps(1)[0]
    _spoil(step, "images", float("nan"))
    loss(step.images, step.texts, torch.tensor(10.0), logit_bias=torch.tensor(-10.0))
    assert loss.pop_nonfinite() == [(0, [BAD])]


def test_log_of_many_calls_is_complete() -> None:
    log = NonfiniteLog()
    index = torch.arange(4)
    fine, scale_ok = torch.tensor([True, False, True, True]), torch.tensor(True)
    for step in range(150):
        log.add(step, index, fine, scale_ok)
        index += 1  # the caller's to reuse
    assert log.pop() == [(step, [step + 1]) for step in range(150)]
    assert log.pop() == []


@pytest.mark.parametrize("calls", [1, 64, 65])
def test_last_call_is_forgotten(calls: int) -> None:
    log = NonfiniteLog()
    index, fine, scale_ok = torch.arange(2), torch.tensor([True, False]), torch.tensor(False)
    for step in range(calls):
        log.add(step, index, fine, scale_ok)
    log.forget(calls - 1, unless=torch.tensor(True))
    log.forget(calls)  # was not logged
    log.forget(calls - 1, unless=torch.tensor(False))
    assert log.pop() == [(step, [1]) for step in range(calls - 1)]
    log.add(calls, index, fine, scale_ok)
    log.forget(calls)
    assert log.pop() == []


def test_log_is_bounded() -> None:
    loss = CASES["sogclr"].create()
    step = make_steps(1)[0]
    step.images[:] = float("nan")
    for _ in range(60):
        run_step(loss, step)
    found = loss.pop_nonfinite()
    assert sum(len(indices) for _, indices in found) == 256
    assert found[0] == (0, step.index)
    run_step(loss, step)
    assert loss.pop_nonfinite() == [(60, step.index)]
