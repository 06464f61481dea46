"""A model with a loss in it can be saved by safetensors, as Hugging Face's Trainer does, and comes back bitwise."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss, list_losses
from tests.losses.cases import CASES, SAMPLES, WIDTH, make_steps, run_step

_OTHERS = sorted(set(list_losses()) - {case.loss for case in CASES.values()})


class _ModelWithLoss(nn.Module):
    def __init__(self, loss: ContrastiveLoss) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.loss = loss


def _create(name: str, **more: str) -> _ModelWithLoss:
    torch.manual_seed(0)
    if name in CASES:
        return _ModelWithLoss(CASES[name].create(**more))
    return _ModelWithLoss(create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES))


def _trained(name: str, **more: str) -> _ModelWithLoss:
    model = _create(name, **more)
    for step in make_steps(5) if name != "siglip" else ():  # its loss keeps nothing, and needs a bias
        run_step(model.loss, step, torch.float32)
    return model


def _assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    states = actual.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name].nan_to_num(nan=7.0), value.nan_to_num(nan=7.0)), name


def _assert_goes_on_alike(first: ContrastiveLoss, second: ContrastiveLoss) -> None:
    for step in make_steps(8)[5:]:
        (value, gradients), (expected, others) = (run_step(loss, step, torch.float32) for loss in (first, second))
        assert torch.equal(value, expected)
        assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


@pytest.mark.parametrize("name", [*CASES, *_OTHERS])
def test_saved_and_loaded_by_safetensors(name: str, tmp_path: Path) -> None:
    model = _trained(name)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    restored = _create(name)
    restored.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    _assert_same_state(restored, model)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    again = _create(name)
    assert safetensors.torch.load_model(again, tmp_path / "model.safetensors") == (set(), [])
    _assert_same_state(again, model)
    assert (again.loss.epoch, again.loss.calls) == (model.loss.epoch, model.loss.calls)
    if name != "siglip":
        _assert_goes_on_alike(again.loss, model.loss)


@pytest.mark.parametrize("name", ["fastclip", "fastclip-v2"])
def test_tables_on_the_host(name: str, tmp_path: Path) -> None:
    model = _trained(name, state_device="cpu")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    restored = _create(name)
    restored.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    _assert_same_state(restored, model)
