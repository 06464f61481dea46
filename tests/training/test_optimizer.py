"""The learning rates: of the temperature, where none was given, and at the end; and the optimizer's state at a resume."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from openclip_ext.training.optimizer import SCALE, ScheduleConfig, create_schedule, logit_scale_lr, schedule_rate
from openclip_ext.training.resume import _load_optimizer
from tests.training.runs import command, metrics_of, run


def test_a_short_run_takes_a_larger_rate() -> None:
    assert logit_scale_lr(1.25e-4, 100_000) == 1.25e-4
    assert logit_scale_lr(1.25e-4, 6_700) > 1.25e-4
    assert logit_scale_lr(1.25e-4, 2_750) == pytest.approx(3.08e-4, rel=1e-3)
    assert logit_scale_lr(1.25e-4, 200) == 5e-4
    assert logit_scale_lr(1e-2, 2_750) == 1e-2
    assert logit_scale_lr(1.25e-4, 99) == 1.25e-4
    assert logit_scale_lr(None, 2_750) is None


def _distance_of_tau(shards: str, folder: Path, *more: str) -> float:
    """How far one epoch of six steps moves the temperature, when a hundred epochs are planned."""
    argv = command(shards, folder, "run", "neuclip", "--prototypes", "24", *more)
    argv[argv.index("--epochs") + 1] = "100"
    run(argv, stop_after=6)
    lines = metrics_of(folder / "run")
    return abs(lines[-1]["temperature_median"] - lines[0]["temperature_median"])


def test_a_given_rate_stays(shards: str, tmp_path: Path) -> None:
    given = _distance_of_tau(shards, tmp_path / "given", "--lr-tau", "1.25e-4")
    chosen = _distance_of_tau(shards, tmp_path / "chosen")
    assert 4 * given == pytest.approx(chosen, rel=0.2)


def test_the_schedules_rate_is_not_a_towers() -> None:
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-6, SCALE: 1e-3}
    assert schedule_rate(torch.optim.SGD([group])) == pytest.approx(1e-3)


@pytest.mark.parametrize(("warmup", "is_told"), [(10_000, True), (60, True), (59, False)])
def test_a_warmup_as_long_as_the_run_is_told(caplog, warmup, is_told) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    create_schedule(
        ScheduleConfig(epochs=2, warmup=warmup, lr=1e-3), optimizer, steps_per_epoch=30, logit_scale_lr=None
    )
    assert ("as long as the run, 60 steps" in caplog.text) == is_told


def test_the_cosine_ends_at_its_floor() -> None:
    """A cosine from lr to lr_min, after the same warm-up; the rate of a tower is its share of both."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], SCALE: 0.5}], lr=1e-3)
    config = ScheduleConfig(epochs=2, warmup=10, lr=1e-3, lr_min=4e-5)
    schedule = create_schedule(config, optimizer, steps_per_epoch=30, logit_scale_lr=None)
    for step in (0, 4, 9, 10, 35, 59, 60):
        schedule(step)
        cosine = 4e-5 + 0.5 * (1e-3 - 4e-5) * (1 + math.cos(math.pi * (step - 10) / 50))
        expected = 1e-3 * (step + 1) / 10 if step < 10 else cosine
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected, expected / 2], rel=1e-12)
    assert expected == 4e-5


def test_a_resume_keeps_the_implementation_that_this_device_needs(tmp_path: Path) -> None:
    """OpenCLIP's checkpoints say ``fused=None``, with which a GPU's optimizer cannot skip a step by itself."""
    model = nn.Linear(3, 2)
    stock = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    stock.step()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _load_optimizer(model, optimizer, stock.state_dict(), tmp_path / "epoch_1.pt")
    assert optimizer.param_groups[0]["fused"] is True
    before = model.weight.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert torch.equal(model.weight, before)
