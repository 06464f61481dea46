"""CLIP-Lite against its naive reference, and everything a loss promises, with parameters that are trained in between."""

import argparse
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import openclip_ext
from openclip_ext.integrations import openclip_script
from openclip_ext.losses.cliplite import ClipLiteLoss
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import WIDTH, Step, make_steps
from tests.references import cliplite

BAD = 2
DIMS = [None, 5]


def _run(loss: ClipLiteLoss, step: Step, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """A call, and its gradients in the images, the texts, the logit scale and all parameters."""
    images, texts = (features.to(dtype, copy=True).requires_grad_() for features in (step.images, step.texts))
    wide = torch.promote_types(dtype, torch.float32)
    logit_scale = torch.tensor(step.logit_scale, dtype=wide, requires_grad=True)
    value = loss(images, texts, logit_scale)
    return value.detach(), list(torch.autograd.grad(value, (images, texts, logit_scale, *loss.parameters())))


def _descend(loss: ClipLiteLoss, gradients: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(loss.parameters(), gradients[3:], strict=True):
            parameter -= 0.1 * gradient


def _assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def _state(loss: ClipLiteLoss) -> dict[str, Tensor]:
    state = loss.state_dict().items()
    return {key: value.clone() for key, value in state if not key.endswith("_extra_state")}


@pytest.mark.parametrize("projection_dim", DIMS)
@pytest.mark.parametrize("batch", [2, 6])
def test_value_gradients_and_statistics_are_the_references(projection_dim: int | None, batch: int) -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH, projection_dim=projection_dim).double()
    for step in make_steps(4, batch=batch):
        sides = [loss.projections.image, loss.projections.text]
        naive = [cliplite.NaiveProjection(side) for side in sides]
        for side, ours in zip(naive, sides, strict=True):
            side.block[1].running_mean.copy_(ours.running_mean)
            side.block[1].running_var.copy_(ours.running_var)
        images, texts = step.images.clone().requires_grad_(), step.texts.clone().requires_grad_()
        scale = torch.tensor(step.logit_scale, dtype=torch.float64, requires_grad=True)
        expected = cliplite.loss(*naive, images, texts, scale)
        expected.backward()
        value, gradients = _run(loss, step)
        _assert_same(value, expected.detach())
        for actual, leaf in zip(gradients[:3], (images, texts, scale), strict=True):
            _assert_same(actual, leaf.grad)
        ours = {id(parameter): gradient for parameter, gradient in zip(loss.parameters(), gradients[3:], strict=True)}
        for side in naive:
            for parameter, counterpart in side.same_as_ours:
                _assert_same(ours[id(counterpart)], parameter.grad)
        for side, own in zip(naive, sides, strict=True):
            _assert_same(own.running_mean, side.block[1].running_mean)
            _assert_same(own.running_var, side.block[1].running_var)
        _descend(loss, gradients)


@pytest.mark.parametrize("projection_dim", DIMS)
def test_evaluation_uses_the_running_statistics(projection_dim: int | None) -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH, projection_dim=projection_dim).double()
    first, second = make_steps(2)
    _run(loss, first)
    loss.eval()
    naive = []
    for side in (loss.projections.image, loss.projections.text):
        naive.append(cliplite.NaiveProjection(side).eval())
        naive[-1].block[1].running_mean.copy_(side.running_mean)
        naive[-1].block[1].running_var.copy_(side.running_var)
    before = _state(loss)
    value, _ = _run(loss, second)
    expected = cliplite.loss(*naive, second.images, second.texts, torch.tensor(second.logit_scale))
    _assert_same(value, expected.detach())
    _assert_same(loss.projections.text(second.texts).detach(), naive[1](second.texts).detach())
    assert all(torch.equal(loss.state_dict()[key], tensor) for key, tensor in before.items())
    assert loss.calls == 1


def test_the_shortcut_starts_as_the_identity_where_the_widths_agree() -> None:
    equal = create_loss("cliplite", embed_dim=WIDTH).projections.image.shortcut.weight
    assert torch.equal(equal, torch.eye(WIDTH))
    other = create_loss("cliplite", embed_dim=WIDTH, projection_dim=5).projections.image.shortcut.weight
    assert other.shape == (5, WIDTH)
    assert other.std() > 0.1


def test_start_values_depend_on_the_seed_alone() -> None:
    generators = torch.get_rng_state()
    first = _state(create_loss("cliplite", embed_dim=WIDTH, seed=3))
    assert torch.equal(torch.get_rng_state(), generators)
    torch.rand(5)
    again, other = (_state(create_loss("cliplite", embed_dim=WIDTH, seed=seed)) for seed in (3, 4))
    assert all(torch.equal(first[key], value) for key, value in again.items())
    weights = "projections.{}.hidden.weight".format
    assert not torch.equal(first[weights("image")], other[weights("image")])
    assert not torch.equal(first[weights("image")], first[weights("text")])


def test_bad_sample_is_as_good_as_absent() -> None:
    masked, absent = (create_loss("cliplite", embed_dim=WIDTH).double() for _ in range(2))
    keep = [0, 1, 3, 4, 5]
    for number, step in enumerate(make_steps()):
        (step.images if number % 2 else step.texts)[BAD, 1] = float("nan") if number % 3 else float("inf")
        value, gradients = _run(masked, step)
        without = Step(step.images[keep], step.texts[keep], step.logit_scale, [0] * 5, 0)
        expected_value, expected = _run(absent, without)
        _assert_same(value, expected_value)
        for side in (0, 1):
            assert not gradients[side][BAD].any()
            _assert_same(gradients[side][keep], expected[side])
        for actual, wanted in zip(gradients[2:], expected[2:], strict=True):
            _assert_same(actual, wanted)
        assert masked.metrics()["infonce"] == pytest.approx(absent.metrics()["infonce"], rel=1e-9)
        _descend(masked, gradients)
        _descend(absent, expected)
    for key, value in _state(absent).items():
        _assert_same(masked.state_dict()[key], value)
    assert masked.pop_nonfinite() == [(number, [BAD]) for number in range(5)]


@pytest.mark.parametrize("what", ["nan scale", "inf scale", "no scale", "all samples", "all but one"])
def test_bad_input_changes_nothing(what: str) -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH).double()
    *first, second = make_steps(3)
    for step in first:
        _run(loss, step)
    before = _state(loss)
    if what.endswith("scale"):
        second.logit_scale = {"nan": float("nan"), "inf": float("inf"), "no": 0.0}[what.split()[0]]
    else:
        second.texts[(0 if what == "all samples" else 1) :] = float("nan")
    value, gradients = _run(loss, second)
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)
    assert all(torch.equal(loss.state_dict()[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_computed_in_float32(dtype: torch.dtype) -> None:
    half, wide, cast = (create_loss("cliplite", embed_dim=WIDTH) for _ in range(3))
    for step in make_steps(3):
        rounded = Step(step.images.to(dtype).float(), step.texts.to(dtype).float(), 100.0, step.index, step.epoch)
        value, gradients = _run(half, rounded, dtype)
        expected, expected_gradients = _run(wide, rounded, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(_run(cast, rounded, torch.float32)[0], expected)
        assert torch.equal(value, expected)
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(gradients[0].float(), expected_gradients[0], rtol=0.01, atol=1e-4)


def test_metrics_are_of_the_projections() -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH).double()
    assert loss.metrics() == {}
    step = make_steps(1)[0]
    _run(loss, step)
    sides = [cliplite.NaiveProjection(side) for side in (loss.projections.image, loss.projections.text)]
    image, text = (
        nn.functional.normalize(side(features), dim=1)
        for side, features in zip(sides, (step.images, step.texts), strict=True)
    )
    expected = create_loss("openclip")(image, text, torch.tensor(step.logit_scale))
    metrics = loss.metrics()
    assert metrics["infonce"] == pytest.approx(expected.item(), rel=1e-9)
    assert metrics["chance"] == pytest.approx(math.log(6))
    assert metrics["temperature_median"] == pytest.approx(1 / step.logit_scale)


def test_contract() -> None:
    loss = openclip_ext.create_loss("cliplite", embed_dim=WIDTH)
    assert loss.initial_logit_scale == pytest.approx(math.log(1 / 0.07))
    assert loss.model_head() is loss.projections
    step = make_steps(1)[0]
    terms = loss(step.images, step.texts, torch.ones(1), index=torch.tensor(step.index), output_dict=True, tokens=None)
    assert terms.keys() == {"contrastive_loss"}
    scale = torch.tensor(10.0)
    with pytest.raises(NotImplementedError, match="ClipLiteLoss estimates no normalizer"):
        loss.log_normalizers(step.images, step.texts, scale)
    with pytest.raises(ValueError, match="at least 2 samples"):
        loss(step.images[:1], step.texts[:1], scale)


def test_openclips_loop_is_refused() -> None:
    """Its optimizer would leave the projections as they are."""
    create = openclip_script._extended_create_loss(lambda args: None)
    with pytest.raises(ValueError, match="trains modules of its own with the model"):
        create(argparse.Namespace(loss="cliplite", model="ViT-B-32"))
