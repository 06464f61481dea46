"""Losses composed of parts: an objective accepts only normalizers that estimate the quantity that it declares."""

import runpy
from pathlib import Path

import pytest

from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.temperature import ConstantTemperature
from openclip_ext.losses import registry
from openclip_ext.losses.method import Method
from openclip_ext.losses.registry import create_loss, options_used_by
from tests.losses.cases import SAMPLES, WIDTH

ROOT = Path(__file__).parents[2]
# The example loss `decoupled` of docs/add-your-own-loss.md.
DECOUPLED: Method = runpy.run_path(str(ROOT / "examples/add_a_loss/openclip_ext/losses/decoupled.py"))["METHOD"]


@pytest.fixture
def decoupled(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the example loss for one test; return its name."""
    monkeypatch.setitem(registry.METHODS, DECOUPLED.name, DECOUPLED)
    return DECOUPLED.name


def test_rho_is_no_option_of_an_objective_without_a_regularizer(decoupled: str) -> None:
    assert not {"rho", "rho_end", "rho_switch"} & options_used_by(decoupled).keys()
    with pytest.raises(ValueError, match="rho=: not used by the loss 'decoupled'"):
        create_loss(decoupled, rho=5.0)
    with pytest.raises(ValueError, match=r"decoupled with .*per-sample: the objective has no regularizer"):
        create_loss(decoupled, num_samples=SAMPLES, temperature_scheme="per-sample")


@pytest.mark.parametrize("normalizer", ["prototypes", "queue", "mlp", "moving-average"])
def test_a_normalizer_of_another_quantity_is_refused(decoupled: str, normalizer: str) -> None:
    message = r"needs an estimate of log\(N·g\).*this normalizer estimates log\(ε \+ g\)|log\(\(1"
    with pytest.raises(ValueError, match=message):
        create_loss(decoupled, embed_dim=WIDTH, num_samples=SAMPLES, normalizer=normalizer)


def test_parts_put_together_by_hand_are_checked_too() -> None:
    normalizer = create_loss("fastclip", num_samples=SAMPLES).normalizer
    with pytest.raises(ValueError, match=r"ConstantTemperature: .*needs an estimate of log\(N·g\)"):
        GlobalContrastiveLoss(DECOUPLED.objective(), normalizer, ConstantTemperature(temperature=None), None, None)
