"""A batch with a non-finite feature or scale gives NaN, a gradient of 0, and leaves the state as it is."""

from collections.abc import Callable

import pytest
import torch

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import (
    SAMPLES,
    STEERED,
    WIDTH,
    Step,
    add_hard_negatives,
    assert_close,
    copy_tensors,
    create_any,
    kinds,
    make_steps,
    run_step,
)


def _one_feature(step: Step) -> None:
    step.texts[2, 1] = float("inf")


def _all_features(step: Step) -> None:
    step.images[:] = float("nan")


def _scale(value: float) -> Callable[[Step], None]:
    return lambda step: setattr(step, "logit_scale", value)


SPOIL = {
    "one feature": _one_feature,
    "all features": _all_features,
    **{f"scale {value}": _scale(value) for value in (float("nan"), float("inf"), -1.0)},
}


def _head_of(loss: ContrastiveLoss) -> list[torch.Tensor]:
    """Return the parameters of the loss that the model's optimizer trains (projection heads)."""
    head = loss.model_head()
    return [] if head is None else list(head.parameters())


@pytest.mark.parametrize("name", [*kinds(), "cliplite", "queueclip-guided"])
@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_a_bad_batch_does_not_change_the_state(name: str, spoil: Callable[[Step], None]) -> None:
    loss = STEERED[name].create() if name in STEERED else create_any(name)
    steps = make_steps()
    for step in steps[:2]:
        run_step(loss, step)
    before = copy_tensors(loss)
    spoil(steps[2])
    steps[2].epoch = steps[1].epoch
    value, gradients = run_step(loss, steps[2], more=_head_of(loss))
    assert value.isnan()
    assert not any(gradient.any() for gradient in gradients)
    # A call converts the state to the dtype of the features, so the dtype is not compared.
    torch.testing.assert_close(copy_tensors(loss), before, rtol=0, atol=0, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("name", ["fastclip", "queueclip", "openclip-learned"])
def test_a_bad_hard_negative_does_not_change_the_state(name: str) -> None:
    loss, steps = create_any(name), make_steps(2)
    add_hard_negatives(steps)
    run_step(loss, steps[0])
    before = copy_tensors(loss)
    steps[1].hard[2, 1] = float("nan")
    value, gradients = run_step(loss, steps[1])
    assert value.isnan() and not any(gradient.any() for gradient in gradients)
    torch.testing.assert_close(copy_tensors(loss), before, rtol=0, atol=0, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("name", ["openclip", "fastclip", "isogclr", "neuclip", "queueclip", "amorlip"])
def test_a_batch_without_negatives_gives_zero_and_does_not_change_the_state(name: str) -> None:
    options = {"equal_captions": "mask"} | ({} if name == "openclip" else {"temperature_scheme": "constant"})
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options)
    first, second = make_steps(2)
    run_step(loss, first)
    before = copy_tensors(loss)
    second.labels = [7] * len(second.images)
    value, gradients = run_step(loss, second)
    assert value == 0 and not any(gradient.any() for gradient in gradients)
    torch.testing.assert_close(copy_tensors(loss), before, rtol=0, atol=0, equal_nan=True, check_dtype=False)


# These losses have dropout or a schedule by calls, which the host counts. A bad batch counts, too.
_COUNT_CALLS = ("tempnet", "amorlip", "neuclip-mlp")


@pytest.mark.parametrize("name", [name for name in (*kinds(), "cliplite") if not name.startswith(_COUNT_CALLS)])
def test_a_plain_loop_continues_as_without_the_bad_batch(name: str) -> None:
    """Like a loop without the guard, also if the first batch is bad."""
    spoilt, plain = create_any(name).double(), create_any(name).double()
    for number, step in enumerate(make_steps()):
        step.epoch = 0
        if number in (0, 2):
            _one_feature(step)
            run_step(spoilt, step, more=_head_of(spoilt))
        else:
            results = [run_step(loss, step, more=_head_of(loss)) for loss in (spoilt, plain)]
            assert_close(*results)
    assert_close(copy_tensors(spoilt), copy_tensors(plain))
