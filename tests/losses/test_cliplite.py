"""Compare CLIP-Lite with its naive reference, with parameters that are trained between the calls."""

import pytest
import torch
from torch import nn

from openclip_ext.losses.cliplite import ClipLiteLoss
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import WIDTH, Step, assert_close, copy_tensors, make_steps, run_step
from tests.references import cliplite


def _naive(loss: ClipLiteLoss) -> list[cliplite.NaiveProjection]:
    """Return the reference's image and text projections, with the state of the package's loss."""
    return [cliplite.NaiveProjection(ours) for ours in (loss.projections.image, loss.projections.text)]


@pytest.mark.parametrize("projection_dim", [None, 5])
@pytest.mark.parametrize("batch", [2, 6])
def test_value_gradients_and_statistics_are_the_references(projection_dim: int | None, batch: int) -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH, projection_dim=projection_dim).double()
    for step in make_steps(4, batch=batch):
        naive = _naive(loss)
        images, texts = step.images.clone().requires_grad_(), step.texts.clone().requires_grad_()
        scale = torch.tensor(step.logit_scale, dtype=torch.float64, requires_grad=True)
        expected = cliplite.loss(*naive, images, texts, scale)
        expected.backward()
        value, gradients = run_step(loss, step, more=loss.parameters())
        assert_close(value, expected.detach(), 1e-9)
        for actual, leaf in zip(gradients[:3], (images, texts, scale), strict=True):
            assert_close(actual, leaf.grad, 1e-9)
        ours = {id(parameter): gradient for parameter, gradient in zip(loss.parameters(), gradients[3:], strict=True)}
        for side in naive:
            for parameter, counterpart in side.same_as_ours:
                assert_close(ours[id(counterpart)], parameter.grad, 1e-9)
        for side, own in zip(naive, (loss.projections.image, loss.projections.text), strict=True):
            assert_close(own.running_mean, side.block[1].running_mean, 1e-9)
            assert_close(own.running_var, side.block[1].running_var, 1e-9)
        with torch.no_grad():
            for parameter, gradient in zip(loss.parameters(), gradients[3:], strict=True):
                parameter -= 0.1 * gradient


def test_evaluation_uses_the_running_statistics() -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH, projection_dim=5).double()
    first, second = make_steps(2)
    run_step(loss, first)
    loss.eval()
    naive = [side.eval() for side in _naive(loss)]
    before = copy_tensors(loss)
    value, _ = run_step(loss, second)
    expected = cliplite.loss(*naive, second.images, second.texts, torch.tensor(second.logit_scale))
    assert_close(value, expected.detach(), 1e-9)
    assert_close(loss.projections.text(second.texts).detach(), naive[1](second.texts).detach(), 1e-9)
    assert all(torch.equal(loss.state_dict()[key], tensor) for key, tensor in before.items())
    assert loss.calls == 1


def test_the_sides_differ_and_the_shortcut_is_the_identity_if_it_can() -> None:
    projections = create_loss("cliplite", embed_dim=WIDTH).projections
    assert not torch.equal(projections.image.hidden.weight, projections.text.hidden.weight)
    assert torch.equal(projections.image.shortcut.weight, torch.eye(WIDTH))
    assert create_loss("cliplite", embed_dim=WIDTH, projection_dim=5).projections.image.shortcut.weight.std() > 0.1


def test_one_sample_has_no_negative() -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH).double()
    step = make_steps(1)[0]
    with pytest.raises(ValueError, match="at least 2 samples"):
        loss(step.images[:1], step.texts[:1], torch.tensor(10.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_computed_in_float32(dtype: torch.dtype) -> None:
    half, wide = (create_loss("cliplite", embed_dim=WIDTH) for _ in range(2))
    for step in make_steps(3):
        rounded = Step(step.images.to(dtype).float(), step.texts.to(dtype).float(), 100.0, step.index, step.epoch)
        value, gradients = run_step(half, rounded, dtype)
        expected, expected_gradients = run_step(wide, rounded, torch.float32)
        assert torch.equal(value, expected)
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(gradients[0].float(), expected_gradients[0], rtol=0.01, atol=1e-4)


def test_metrics_are_of_the_projections() -> None:
    loss = create_loss("cliplite", embed_dim=WIDTH).double()
    step = make_steps(1)[0]
    sides = zip(_naive(loss), (step.images, step.texts), strict=True)
    image, text = (nn.functional.normalize(side(features), dim=1) for side, features in sides)
    run_step(loss, step)
    expected = create_loss("openclip")(image, text, torch.tensor(step.logit_scale))
    assert loss.metrics()["infonce"] == pytest.approx(expected.item(), rel=1e-9)
