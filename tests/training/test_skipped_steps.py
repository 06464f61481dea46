"""A non-finite step is skipped: parameters, optimizer, loss state and running statistics stay bitwise unchanged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.objectives import NEGATIVES_MEAN
from openclip_ext.losses import registry
from openclip_ext.losses.method import NormalizerPart, Scaled
from openclip_ext.losses.options import Constant
from openclip_ext.training.step import Batch
from tests.devices import CAN_SHARD
from tests.distributed.pool import two_ranks
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    differences,
    metrics_of,
    run,
    small_command,
    spoil_samples,
)
from tests.training.tiny import FLOAT16, LOSSES, TinyTraining, Way, tiny_batch

WAYS = {
    "plain": Way(),
    "accumulated": Way(micro_batches=2),
    "accumulated-scaled-clipped": Way(tower="resnet", micro_batches=4, scale=2.0**4, clip=0.1),
    "on-device": Way(on_device=True),
    "on-device-scaled": Way(tower="resnet", on_device=True, scale=2.0**4, clip=0.1, micro_batches=2),
}
# Suffix of counters on the host. If the device decides whether to skip, these counters also count skipped steps.
HOST_COUNTERS = "_extra_state"
# Every loss runs with the decision on the host ("accumulated") and on the device, as on a GPU. The other ways run with a loss
# with prototypes.
CASES = [(name, way) for name in LOSSES for way in ("accumulated", "on-device")]
CASES += [("neuclip", way) for way in WAYS if ("neuclip", way) not in CASES]


def nan_pixel(batch: Batch) -> None:
    """Set one pixel of the batch's last sample to NaN; with several ranks, the last rank has this sample."""
    batch["image"].view(-1)[-1] = float("nan")


def all_nan(batch: Batch) -> None:
    batch["image"].fill_(float("nan"))


def changed(name: str, way: Way, spoil: Callable[[Batch], None] = nan_pixel) -> dict[str, Any]:
    """Take two good steps, a bad step and a good step, and compare the result with a run without the bad step.

    Returns:
        Names of state entries: ``by_bad_step`` (changed by the bad step), ``moved`` (changed by the bad or the last step) and
        ``later`` (different between the two runs at the end). ``skipped``: the guard's skipped steps as (step, samples,
        whether the samples are bad). ``samples``: samples of the bad step.
    """
    run, without = TinyTraining(name, way), TinyTraining(name, way)
    for number in range(2):
        run.take(number)
        without.take(number)
    before = run.state()
    run.take(2, spoil)
    by_bad_step = differences(before, run.state())
    run.take(3)
    without.take(3)
    return {
        "by_bad_step": by_bad_step,
        "later": differences(without.state(), run.state()),
        "skipped": [(step.number, step.samples, step.are_bad) for step in run.step.guard.poll_outcomes(wait=True)],
        "moved": differences(before, run.state()),
        "samples": run.batch(2)["index"].tolist(),
    }


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_bad_sample_changes_nothing(name, way):
    result = changed(name, WAYS[way])
    on_device = WAYS[way].on_device
    assert [item for item in result["by_bad_step"] if not (on_device and item.endswith(HOST_COUNTERS))] == []
    if not on_device:
        assert result["later"] == []  # the final state equals the state of a run without the bad batch
    assert result["skipped"] == [(2, result["samples"][-1:], True)]
    assert any("model" in item for item in result["moved"])


class Replaced(MinibatchNormalizer):
    """An own normalizer that assigns a new tensor to its buffer."""

    estimates = (NEGATIVES_MEAN,)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def step(self, stats):
        self.mean = self.mean + stats.batch.mean(stats.log_estimate)
        return self.predict(stats)


@pytest.mark.parametrize("way", ["plain", "on-device"])
def test_a_buffer_that_a_loss_replaces_is_restored(monkeypatch, way):
    class Part(NormalizerPart):
        name = "replaced"
        module = Replaced

    monkeypatch.setitem(registry.METHODS, "replaced", Scaled("replaced", Part(), Constant()))
    monkeypatch.setitem(LOSSES, "replaced", {})
    monkeypatch.setitem(registry.OPTIONS, "normalizer", replace(registry.OPTIONS["normalizer"], choices=None))
    result = changed("replaced", WAYS[way])
    assert [item for item in result["by_bad_step"] if not item.endswith(HOST_COUNTERS)] == []
    assert any("mean" in item for item in result["moved"])


@pytest.mark.parametrize(
    ("name", "way"), [("openclip", "plain"), ("fastclip", "plain"), ("cliplite", "plain"), ("neuclip", "on-device")]
)
def test_a_batch_without_a_valid_sample_changes_nothing(name, way):
    result = changed(name, WAYS[way], all_nan)
    assert [item for item in result["by_bad_step"] if not item.endswith(HOST_COUNTERS)] == []
    assert result["skipped"] == [(2, result["samples"], True)]


def test_gradients_that_overflow_are_skipped_and_the_scale_falls():
    """The loss scale causes the overflow, not a sample. The guard reports the full batch, and the scaler halves the scale."""
    run = TinyTraining("neuclip", Way(scale=2.0**40, autocast=FLOAT16))
    before = run.state()
    run.take(0)
    assert differences(before, run.state()) == []
    assert run.step.scaler.get_scale() == 2.0**39
    (step,) = run.step.guard.poll_outcomes()
    assert (step.samples, step.are_bad) == (tiny_batch(0)["index"].tolist(), False)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_single_gradient_whose_square_overflows_is_skipped(on_device):
    """Adam's average of squares would become infinite, and the parameter would never change again."""
    run = TinyTraining("openclip", Way(on_device=on_device))
    run.take(0)
    before = run.state()
    run.model.logit_scale.register_hook(lambda gradient: torch.full_like(gradient, 3e19))
    run.take(1)
    assert [item for item in differences(before, run.state()) if not item.endswith(HOST_COUNTERS)] == []
    assert [step.number for step in run.step.guard.poll_outcomes(wait=True)] == [1]


def test_the_guard_changes_nothing_in_good_steps():
    """Good steps with the decision on the device are bitwise equal to good steps with the decision on the host."""
    runs = [TinyTraining("neuclip", Way(tower="resnet", on_device=on_device)) for on_device in (False, True)]
    for item in runs:
        for number in range(3):
            item.take(number)
    assert differences(runs[0].state(), runs[1].state()) == []
    assert all(item.step.guard.poll_outcomes(wait=True) == [] for item in runs)


TWO_RANKS = {
    "replicated-accumulated-scaled-clipped": Way(tower="resnet", micro_batches=2, scale=2.0**4, clip=0.1),
    "sharded-accumulated-clipped": Way(sharded=True, micro_batches=2, clip=0.1),
    "sharded-scaled": Way(sharded=True, scale=2.0**4),
    "on-device": Way(on_device=True),
    "on-device-sharded": Way(on_device=True, sharded=True),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("neuclip", way) for way in TWO_RANKS), ("fastclip-v2", "replicated-accumulated-scaled-clipped")],
)
def test_a_bad_sample_on_one_rank_changes_nothing_on_any(name, way):
    if TWO_RANKS[way].sharded and not CAN_SHARD:
        pytest.skip("this torch shards parameters only on a GPU")
    results = two_ranks().run(changed, name, TWO_RANKS[way])
    for rank, result in enumerate(results):
        assert [item for item in result["by_bad_step"] if not item.endswith(HOST_COUNTERS)] == [], rank
        if not TWO_RANKS[way].on_device:
            assert result["later"] == [], rank
        assert [number for number, *_ in result["skipped"]] == [2]
    assert results[1]["skipped"][0][1:] == (results[1]["samples"][-1:], True)


# --- full runs --------------------------------------------------------------------------------------------------------


def test_a_run_survives_a_bad_sample_and_says_so(shards, tmp_path, monkeypatch, caplog):
    """Only consecutive skipped steps count for --max-skipped-steps. Here, six are skipped, but at most two in a row."""
    bad = [1, 2, 4, 5, 7, 8]
    spoil_samples(monkeypatch, bad, None)
    assert run(small_command(shards, tmp_path, "run", "neuclip", "--max-skipped-steps", "3")) == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines if line["loss"] is None] == bad
    assert all((line["infonce"] is None) == (line["loss"] is None) == ("weight_mean" not in line) for line in lines)
    assert len({line["chance"] for line in lines}) == 1
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert "Step 2 skipped: non-finite samples [" in caplog.text
    state = torch.load(tmp_path / "run" / "checkpoints" / "epoch_2.pt", weights_only=True)["state_dict"]
    assert all(torch.isfinite(value).all() for value in state.values())


def test_a_resumed_run_goes_on_counting(shards, tmp_path, monkeypatch):
    """The counts of skipped steps and samples continue from the checkpoint. After epoch 1, the batch size is 8, not 16."""
    spoil_samples(monkeypatch, {1, 3})
    argv = small_command(shards, tmp_path, "run", "openclip", "--resume", "latest")
    assert run(argv, stop_after=4) == EXIT_AFTER_SIGTERM
    assert run([*argv, "--epochs", "1"]) == 0
    assert run([*argv, "--batch-size", "8"]) == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1] + [2] * 12
    assert [line["samples"] for line in lines] == [*range(16, 81, 16), *range(88, 161, 8)]
