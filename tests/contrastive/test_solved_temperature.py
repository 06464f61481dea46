"""The solved temperature: convergence, bounds, and the model's parameter. tests/losses compares it with a naive reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openclip_ext.losses.registry import create_loss
from openclip_ext.training.model import loss_options
from tests.losses.cases import WIDTH, unit
from tests.training.commands import plan_of


def _loss(**options: object) -> Any:
    parts = {"normalizer": "minibatch", "temperature_scheme": "solved", "temperature_queue": 64, "rho": 1.5}
    return create_loss("neuclip", embed_dim=WIDTH, **(parts | options))


def _steps(loss: Any, number: int, batch: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(0)
    for _ in range(number):
        images, texts = (unit(torch.randn(batch, WIDTH, generator=random)) for _ in range(2))
        loss(images, texts, torch.tensor(10.0))
    return loss.anchor_temperatures(images, texts, torch.tensor(10.0))


def test_the_divergence_becomes_rho() -> None:
    loss = _loss()
    _steps(loss, 99)
    bad = torch.full((16, WIDTH), torch.nan)
    loss(bad, bad, torch.tensor(10.0))  # this call is not a step
    _steps(loss, 1)
    assert loss.temperature.log_tau.exp().item() == pytest.approx(0.1)
    assert "divergence" not in loss.metrics()
    tau = _steps(loss, 500)
    assert loss.metrics()["divergence"] == pytest.approx(1.5, abs=0.1)
    assert tau.unique().numel() == 1
    images = unit(torch.randn(48, WIDTH))
    images[:32] = torch.nan  # all samples that are anchors
    before = loss.temperature.log_tau.clone()
    loss(images, unit(torch.randn(48, WIDTH)), torch.tensor(10.0))
    assert loss.temperature.log_tau == before and "divergence" not in loss.metrics()


def test_bounds_hold_and_a_rho_without_solution_warns() -> None:
    with pytest.warns(UserWarning, match="the divergence over 8 embeddings is at most 2.08"):
        loss = _loss(temperature_queue=8, rho=3.0, temperature_min=0.05)
    _steps(loss, 500)
    assert 0.05 <= math.exp(loss.temperature.log_tau.item()) <= 0.0515


def test_the_models_parameter_follows() -> None:
    loss = _loss(temperature=0.1)
    assert loss.initial_logit_scale == pytest.approx(math.log(10)) and not loss.uses_logit_scale
    loss = _loss(temperature=None)
    assert loss.initial_logit_scale is None and loss.uses_logit_scale
    parameter = nn.Parameter(torch.tensor(2.0))
    loss.finish_logit_scale_step(parameter)
    assert parameter.item() == 2.0
    _steps(loss, 200)
    loss.finish_logit_scale_step(parameter)
    assert parameter.item() == -loss.temperature.log_tau.item()
    assert not loss.learns_logit_scale


def test_hard_share_sets_rho() -> None:
    loss = create_loss("neuclip", embed_dim=WIDTH, temperature_scheme="solved", hard_share=0.01)
    assert loss.temperature.target == pytest.approx(-math.log(0.01))
    for loss in (["neuclip"], ["neuclip-paper", "--recipe", "cc3m"]):  # --hard-share also overrides the recipe's rho
        config = plan_of("--loss", *loss, "--hard-share", "0.01")
        assert config.loss.options["rho"] == pytest.approx(-math.log(0.01))


@pytest.mark.parametrize(
    ("more", "steps", "start"),
    [
        ([], 699, 0.1),
        ([], 700, 0.07),
        (["--temperature", "0.1"], 700, 0.1),
        (["--temperature-scheme", "global"], 700, None),
    ],
)
def test_the_initial_temperature_depends_on_the_length_of_the_run(
    more: list[str], steps: int, start: float | None
) -> None:
    config = plan_of("--loss", "queueclip", *more).loss
    assert loss_options(config, steps, pretrained=False)["temperature"] == start
