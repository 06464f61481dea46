"""Temperature schemes: their effect on the model's logit scale, their bounds and their schedules."""

import math
import statistics

import pytest
import torch
from torch import nn

from openclip_ext.losses.registry import create_loss
from tests.losses.cases import CASES, SAMPLES, WIDTH, make_steps, run_step


def _parameter(tau: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(-math.log(tau)))


@pytest.mark.parametrize(
    ("names", "before", "after", "options", "expected"),
    [
        # If τ is below 0.03 before the step, a third of the learning rate is used, else the full learning rate.
        ("fastclip scent amorlip", 0.05, 0.04, {}, 0.04),
        ("fastclip scent amorlip", 0.02, 0.025, {}, 0.02 ** (2 / 3) * 0.025 ** (1 / 3)),
        ("fastclip scent amorlip", 0.031, 0.02, {}, 0.02),
        ("neuclip-paper fastclip-v0", 0.02, 0.025, {}, 0.025),
        # The temperature is clamped to its bounds.
        ("fastclip fastclip-v0 scent amorlip neuclip-paper", 0.05, 0.001, {}, 0.01),
        ("fastclip fastclip-v0 amorlip neuclip-paper", 0.9, 7.0, {}, 1.0),
        ("fastclip fastclip-v0 amorlip neuclip-paper", 0.05, 0.001, {"temperature_min": 0.04}, 0.04),
        # These losses do not use the model's parameter, so it is not clamped.
        ("sogclr fastclip-v1 fastclip-v2 tempnet", 0.05, 0.004, {}, 0.004),
    ],
)
def test_the_models_parameter_after_a_step(
    names: str, before: float, after: float, options: dict[str, float], expected: float
) -> None:
    for name in names.split():
        loss = create_loss(name, num_samples=SAMPLES, embed_dim=WIDTH, **options)
        parameter = _parameter(after)
        loss.finish_logit_scale_step(parameter, _parameter(before).detach())
        assert math.exp(-parameter.item()) == pytest.approx(expected), name
        assert loss.learns_logit_scale == (expected != 0.004)
        assert loss.learns_logit_scale or loss.logit_scale_lr is None


def test_start_and_learning_rate() -> None:
    loss = create_loss("neuclip-paper", embed_dim=WIDTH, temperature=0.05, lr_tau=1e-3)
    assert loss.initial_logit_scale == pytest.approx(math.log(20))
    assert loss.logit_scale_lr == 1e-3
    assert create_loss("fastclip-v0", num_samples=4).logit_scale_lr is None
    assert create_loss("fastclip-v1", num_samples=4, temperature=0.03).initial_logit_scale == pytest.approx(
        -math.log(0.03)
    )
    assert create_loss("fastclip", num_samples=4).initial_logit_scale is None


def test_rho_changes_for_the_last_part_of_the_run() -> None:
    loss = create_loss("amorlip", embed_dim=WIDTH, epochs=8, rho=6.5, rho_end=-8.0, rho_switch=0.75)
    assert [loss.temperature.rho(epoch) for epoch in (0, 5, 6, 7)] == [6.5, 6.5, -8.0, -8.0]
    step = make_steps(1)[0]
    terms = []
    for epoch in (5, 6):
        loss.start_epoch(epoch)
        term = loss(step.images, step.texts, torch.tensor(10.0), output_dict=True)["temperature_loss"]
        terms.append(term.item())
        assert loss.metrics()["rho"] == (6.5 if epoch == 5 else -8.0)
    assert terms == pytest.approx([0.5 * 6.5 / 10, -0.5 * 8.0 / 10])
    long = create_loss("amorlip", embed_dim=WIDTH, epochs=100, rho=6.5, rho_end=-8.0, rho_switch=0.55)
    assert [long.temperature.rho(epoch) for epoch in (54, 55)] == [6.5, -8.0]


def test_gamma_falls_over_half_of_the_run_by_default() -> None:
    loss = create_loss("fastclip", num_samples=SAMPLES, epochs=8, gamma=0.2)
    gammas = [loss.normalizer.gamma(epoch) for epoch in range(6)]
    assert gammas == pytest.approx([1.0, 0.8 * 0.853553 + 0.2, 0.6, 0.8 * 0.146447 + 0.2, 0.2, 0.2], abs=1e-5)
    constant = create_loss("sogclr", num_samples=SAMPLES, gamma=0.3)
    assert constant.normalizer.gamma(0) == constant.normalizer.gamma(9) == 0.3


@pytest.mark.parametrize(("rho", "bound"), [(20.0, 0.045), (-20.0, 0.055)])
def test_per_sample_temperatures_stay_within_their_bounds(rho: float, bound: float) -> None:
    bounds = {"temperature_min": 0.045, "temperature_max": 0.055}
    loss = create_loss("isogclr", num_samples=SAMPLES, temperature=0.05, lr_tau=0.1, rho=rho, **bounds)
    for step in make_steps(4):
        run_step(loss, step)
    seen = loss.state_dict()["temperature.table.shard"][:2]
    seen = seen[~seen.isnan()]
    assert seen.tolist() == pytest.approx([bound] * len(seen))
    metrics = loss.metrics()
    assert 0.045 <= metrics["temperature_min"] <= metrics["temperature_median"] <= metrics["temperature_max"] <= 0.0551


def test_the_median_is_between_two_middle_values() -> None:
    loss, step = CASES["tempnet"].create(), make_steps(1)[0]
    arguments = step.images, step.texts, torch.tensor(10.0), torch.tensor(step.index)
    loss.eval()(*arguments[:3], index=arguments[3])
    found = loss.anchor_temperatures(*arguments)
    assert loss.metrics()["temperature_median"] == pytest.approx(statistics.median(found.flatten().tolist()), rel=1e-6)


def test_dropout_is_for_learning_only() -> None:
    loss = CASES["tempnet"].create()
    step = make_steps(1)[0]
    arguments = (step.images, step.texts, torch.tensor(10.0))
    index = torch.tensor(step.index)
    loss.eval()
    assert loss(*arguments, index=index) == loss(*arguments, index=index)
    evaluated = loss.metrics()["temperature_median"]
    twin = CASES["tempnet"].create()
    twin(*arguments, index=index)
    assert twin.metrics()["temperature_median"] != evaluated


def test_random_numbers_of_the_training_do_not_change() -> None:
    state = torch.get_rng_state()
    for name in ("tempnet", "amorlip"):
        loss = CASES[name].create()
        for step in make_steps(4):
            run_step(loss, step)
    assert torch.equal(torch.get_rng_state(), state)


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
