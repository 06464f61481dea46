"""Properties of the normalizers that the comparisons with references (tests/losses) do not cover."""

import pytest
import torch

from openclip_ext.losses.amorlip import TwoSidedMlp
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import WIDTH, make_steps, run_step


def test_a_destroyed_fit_is_not_used() -> None:
    steps = make_steps(6)
    options = {"prototypes": 12, "restart_every": None, "normalizer_lr": 0.1, "verify_fit": True}
    fitted = create_loss("neuclip", embed_dim=WIDTH, **options)
    for step in steps[:5]:
        run_step(fitted, step)
    with torch.no_grad():
        fitted.normalizer.prototypes.copy_(fitted.normalizer.prototypes[:, :1].expand(-1, 12, -1))
    steps[5].logit_scale = 50.0
    run_step(fitted, steps[5])
    assert fitted.metrics()["uses_fit"] == 0.0


def test_mlp_starts_as_torchs_linear_layers_do() -> None:
    mlp = TwoSidedMlp(64, 0.5)
    mlp.initialize(torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(64, 32)
    for side in (0, 1):
        assert mlp.weights[0][side].abs().max() <= 1 / 8
        assert mlp.weights[0][side].std().item() == pytest.approx(linear.weight.std().item(), rel=0.1)
    assert not torch.equal(mlp.weights[0][0], mlp.weights[0][1])


@pytest.mark.parametrize(
    ("name", "key"), [("amorlip", "normalizer.online.weights.0"), ("cliplite", "projections.image.hidden.weight")]
)
def test_networks_depend_on_the_seed_and_on_nothing_else(name: str, key: str) -> None:
    found = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        found.append(create_loss(name, embed_dim=WIDTH, seed=seed).state_dict()[key])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
