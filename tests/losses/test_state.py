"""The state of a loss: it can be saved, restored and sharded, and evaluation must not change it."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss, list_losses
from openclip_ext.state.sharded_table import group_log_mean, shard_bounds
from tests.losses.cases import CASES, SAMPLES, assert_close, create_any, kinds, make_steps, run_step


def _same_steps(first: ContrastiveLoss, second: ContrastiveLoss, steps: list, dtype: torch.dtype) -> None:
    for step in steps:
        assert_close(run_step(first, step, dtype), run_step(second, step, dtype))


# SigLIP is excluded, because it has no state and needs a bias.
_OTHERS = sorted(set(list_losses()) - {case.loss for case in CASES.values()} - {"siglip"})


@pytest.mark.parametrize(("how", "dtype"), [("torch", torch.float64), ("safe", torch.float32)])
@pytest.mark.parametrize("name", [*kinds(), *_OTHERS])
def test_resumes_bitwise_mid_epoch(name: str, how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The state is saved with torch or as safetensors, the format of Hugging Face's Trainer for a model with a loss."""
    loss = create_any(name)
    for step in make_steps(5):
        run_step(loss, step, dtype)
    # The resumed loss needs no .double() and no first call: it takes the dtype from the saved state.
    resumed = create_any(name)
    if how == "torch":
        torch.save(loss.state_dict(), tmp_path / "loss")
        resumed.load_state_dict(torch.load(tmp_path / "loss", weights_only=True))
    else:
        safetensors.torch.save_model(loss, str(tmp_path / "loss"))
        assert safetensors.torch.load_model(resumed, tmp_path / "loss") == (set(), [])
    assert (resumed.epoch, resumed.calls) == (loss.epoch, loss.calls)
    assert_close(resumed.state_dict(), loss.state_dict())
    _same_steps(loss, resumed, make_steps(8)[5:], dtype)
    assert_close(resumed.state_dict(), loss.state_dict())


@pytest.mark.parametrize("name", kinds())
def test_copies_are_independent(name: str) -> None:
    steps = make_steps(4)
    loss = CASES[name].create()
    run_step(loss, steps[0], torch.float32)
    twin = copy.deepcopy(loss)
    before = copy.deepcopy(loss.state_dict())
    run_step(twin, steps[1], torch.float32)
    assert_close(loss.state_dict(), before)
    run_step(loss, steps[1], torch.float32)
    _same_steps(loss, twin, steps[2:], torch.float32)


@pytest.mark.parametrize("name", kinds())
def test_evaluation_and_log_normalizers_change_nothing(name: str) -> None:
    steps = make_steps(4)
    loss = CASES[name].create().double()
    for trained in range(2):
        before = copy.deepcopy(loss.state_dict())
        step = steps[2 + trained]
        loss.eval()
        value, _ = run_step(loss, steps[trained])
        assert torch.isfinite(value)
        loss.train()
        alpha = loss.log_normalizers(step.images, step.texts, torch.tensor(10.0), index=torch.tensor(step.index))
        assert [tuple(side.shape) for side in alpha] == [(6,), (6,)]
        assert all(torch.isfinite(side).all() for side in alpha)
        before["_extra_state"] = loss.state_dict()["_extra_state"]  # start_epoch changed the counter
        if trained == 0:
            assert_close(loss.state_dict(), before)
        run_step(loss, steps[trained])


@pytest.mark.parametrize("name", kinds())
def test_starting_an_epoch_twice_equals_starting_it_once(name: str) -> None:
    once, twice = CASES[name].create(), CASES[name].create()
    for step in make_steps(6):
        for epoch in (step.epoch, step.epoch):
            twice.start_epoch(epoch)
        _same_steps(twice, once, [step], torch.float32)
    assert_close(twice.state_dict(), once.state_dict())


def test_log_normalizers_of_a_moving_average_are_what_is_stored() -> None:
    loss = create_loss("sogclr", num_samples=SAMPLES, gamma=0.5).double()
    first, second, third = make_steps(3, duplicates=False)
    first.index, second.index, third.index = list(range(6)), list(range(6)), [0, 1, 2, 10, 11, 12]
    run_step(loss, first)
    run_step(loss, second)
    scale = torch.tensor(second.logit_scale)
    stored = loss.log_normalizers(second.images, second.texts, scale, index=torch.tensor(second.index))
    assert torch.equal(stored[0], loss.state_dict()["normalizer.table.shard"][0, :6])
    mixed = loss.log_normalizers(third.images, third.texts, scale, index=torch.tensor(third.index))
    batch = create_loss("sogclr", normalizer="minibatch").double()
    estimate = batch.log_normalizers(third.images, third.texts, scale)
    assert torch.equal(mixed[1][:3], stored[1][:3])
    assert torch.equal(mixed[1][3:], estimate[1][3:])


def test_log_normalizers_of_prototypes_do_not_foresee_a_restart() -> None:
    loss = create_loss("neuclip", embed_dim=8, prototypes=6, restart_every=1, normalizer_updates=0).double()
    first, second = make_steps(2)
    scale = torch.tensor(first.logit_scale)
    fresh = loss.log_normalizers(first.images, first.texts, scale)
    run_step(loss, first)
    for before, after in zip(fresh, loss.log_normalizers(first.images, first.texts, scale), strict=True):
        assert torch.allclose(before, after, rtol=1e-12)
    prototypes = loss.state_dict()["normalizer.prototypes"].clone()
    assert torch.equal(prototypes, torch.stack([first.texts, first.images]))
    of_second = loss.log_normalizers(second.images, second.texts, scale)
    run_step(loss, second)
    assert not torch.allclose(of_second[0], loss.log_normalizers(second.images, second.texts, scale)[0])


def test_more_processes_than_samples() -> None:
    assert [shard_bounds(3, rank, 5) for rank in range(5)] == [(0, 1), (1, 2), (2, 3), (3, 3), (3, 3)]


def test_state_of_another_number_of_samples_is_refused() -> None:
    state = create_loss("fastclip", num_samples=30).state_dict()
    with pytest.raises(ValueError, match=r"\(2, 20\).*\(2, 30\)"):
        create_loss("fastclip", num_samples=20).load_state_dict(state)


def test_log_mean_is_exact_without_duplicates_and_safe_with_large_ones() -> None:
    values, valid = torch.tensor([[-300.0, 250.0, 0.1]]), torch.ones(3, dtype=torch.bool)
    assert torch.equal(group_log_mean(torch.tensor([2, 0, 1]), values, valid), values)
    mean = group_log_mean(torch.tensor([5, 5, 1]), values, valid)
    assert torch.allclose(mean, torch.tensor([[250.0, 250.0, 0.1]]) - torch.tensor([[2.0, 2.0, 1.0]]).log())
