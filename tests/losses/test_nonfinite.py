"""A non-finite sample is masked and reported. The result and the state equal those of a batch without the sample."""

import pytest
import torch

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.nonfinite import NonfiniteLog
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import CASES, Step, assert_close, copy_tensors, create_any, kinds, make_steps, run_step

BAD = 2


def _of_the_head(loss: ContrastiveLoss) -> list[torch.Tensor]:
    """Return the parameters of the loss that the model's optimizer trains (projection heads)."""
    head = loss.model_head()
    return [] if head is None else list(head.parameters())


def _without_bad(step: Step) -> Step:
    keep = [i for i in range(len(step.index)) if i != BAD]
    index, labels = ([values[i] for i in keep] for values in (step.index, step.labels))
    return Step(step.images[keep], step.texts[keep], step.logit_scale, index, step.epoch, labels)


def _assert_nothing_happened(
    loss: ContrastiveLoss, before: dict[str, torch.Tensor], value: torch.Tensor, gradients: list[torch.Tensor]
) -> None:
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)
    # A call converts the state to the dtype of the features, so the dtype is not compared.
    torch.testing.assert_close(copy_tensors(loss), before, rtol=0, atol=0, equal_nan=True, check_dtype=False)


# TempNet is skipped: its dropout mask has the shape of the batch, so it differs in a batch without the sample.
@pytest.mark.parametrize("name", [*(name for name in kinds() if not name.startswith("tempnet")), "cliplite"])
def test_a_bad_sample_equals_a_missing_sample(name: str) -> None:
    masked, absent = create_any(name).double(), create_any(name).double()
    for number, step in enumerate(make_steps(duplicates=False)):
        (step.images if number % 2 else step.texts)[BAD, 1] = float("nan") if number % 3 else float("inf")
        value, gradients = run_step(masked, step, more=_of_the_head(masked))
        expected_value, expected = run_step(absent, _without_bad(step), more=_of_the_head(absent))
        assert_close(value, expected_value, 1e-9)
        for side in (0, 1):
            assert not gradients[side][BAD].any()
            assert_close(torch.cat([gradients[side][:BAD], gradients[side][BAD + 1 :]]), expected[side], 1e-9)
        assert_close(gradients[2:], expected[2:], 1e-9)
    assert_close(copy_tensors(masked), copy_tensors(absent), 1e-9)


@pytest.mark.parametrize("name", [*kinds(), "cliplite"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_bad_logit_scale_changes_nothing(name: str, scale: float) -> None:
    loss = create_any(name)
    steps = make_steps()
    for step in steps[:2]:
        run_step(loss, step)
    before = copy_tensors(loss)
    steps[2].logit_scale = scale
    steps[2].epoch = steps[1].epoch
    value, gradients = run_step(loss, steps[2])
    _assert_nothing_happened(loss, before, value, gradients)


@pytest.mark.parametrize("name", [*kinds(), "cliplite"])
def test_all_samples_bad_changes_nothing_and_training_continues(name: str) -> None:
    loss = create_any(name)
    before = copy_tensors(loss)
    bad, *good = make_steps()
    bad.texts[:] = float("nan")
    for step in (bad, *good):
        step.epoch = 0
    value, gradients = run_step(loss, bad)
    _assert_nothing_happened(loss, before, value, gradients)
    for step in good:
        value, gradients = run_step(loss, step)
        assert torch.isfinite(value)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_reported_with_call_and_index() -> None:
    loss = CASES["fastclip"].create()
    steps = make_steps(5)
    steps[1].images[BAD, 1] = float("nan")
    steps[3].texts[BAD, 1] = float("inf")
    steps[3].images[0, 0] = float("-inf")
    steps[4].logit_scale = float("nan")
    for step in steps:
        run_step(loss, step)
    of_steps = [(1, [steps[1].index[BAD]]), (3, [steps[3].index[0], steps[3].index[BAD]])]
    assert loss.pop_nonfinite() == [*of_steps, (4, [])]
    assert loss.pop_nonfinite() == []


@pytest.mark.parametrize("name", ["openclip", "siglip", "neuclip"])
def test_positions_are_reported_where_there_is_no_index(name: str) -> None:
    loss = create_loss(name, embed_dim=8, **({"prototypes": 4} if name == "neuclip" else {}))
    step = make_steps(1)[0]
    step.images[BAD, 1] = float("nan")
    loss(step.images, step.texts, torch.tensor(10.0), logit_bias=torch.tensor(-10.0))
    assert loss.pop_nonfinite() == [(0, [BAD])]


@pytest.mark.parametrize("calls", [1, 65, 100])
def test_the_log_is_complete_without_a_forgotten_call(calls: int) -> None:
    log = NonfiniteLog()
    index, fine, scale_ok = torch.arange(2), torch.tensor([True, False]), torch.tensor(False)
    for step in range(calls):
        log.add(step, index, fine, scale_ok)
        index += 1  # the log must have its own copy
    log.forget(calls - 1, skip_if=torch.tensor(True))
    log.forget(calls)  # this step was never logged
    log.forget(calls - 1, skip_if=torch.tensor(False))
    assert log.pop() == [(step, [step + 1]) for step in range(calls - 1)]
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
