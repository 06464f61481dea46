"""For every loss, float64 training on two processes or with accumulation equals one process with the full batch."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openclip_ext.losses import registry
from openclip_ext.training.config import ScheduleConfig
from openclip_ext.training.optimizer import create_optimizer, create_schedule
from openclip_ext.training.step import StepSettings, TrainStep
from tests.distributed.pool import two_ranks
from tests.training import tiny

TOLERANCE = 1e-9
STEPS = 5
HARDER = "-hard-negatives"
SCHEDULE = ScheduleConfig(name="cosine", lr=tiny.OPTIMIZER.lr, warmup=2, epochs=1)


# Losses that compare only the samples of their process. Two processes equal the mean over two blocks in one process.
LOCAL = {"cliplite"}
BLOCK_CASES = {
    **{loss: (loss, tiny.LOSSES[loss]) for loss in LOCAL},
    "cliplite-wide": ("cliplite", {"projection_dim": 24}),
}
CASES = {
    **{loss: (loss, options) for loss, options in tiny.LOSSES.items() if loss not in LOCAL},
    # The prototypes restart every third step, and there are more prototypes than samples in a batch.
    "neuclip-many": ("neuclip", {"prototypes": 20, "normalizer_updates": 3, "restart_every": 3}),
    "neuclip-no-alpha-gradient": ("neuclip", {"prototypes": 8, "alpha_gradient": False}),
    "sogclr-views": ("sogclr", {"views": 2, "gamma": 0.5}),
    f"openclip{HARDER}": ("openclip", {"local_loss": True, "gather_with_grad": True}),
}


def run(name: str, micro_batches: int = 1) -> dict[str, Tensor]:
    """Take a few float64 steps on this rank's part of fixed batches; return the parameters and the loss state."""
    together = torch.distributed.is_initialized()
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
    model, loss = _start(name)
    wrapped = nn.parallel.DistributedDataParallel(model) if together else model
    optimizer = create_optimizer(wrapped, tiny.OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, loss.logit_scale_lr)
    step = TrainStep(wrapped, loss, optimizer, StepSettings(tiny.CPU, input_dtype=torch.float64))
    loss.start_epoch(0)
    for number in range(STEPS):
        schedule(number)
        batch = tiny.tiny_batch(number, loss.views, torch.float64)
        if name.endswith(HARDER):
            batch["hard_negative"] = batch["text"].roll(1, dims=1)
        own = tiny.parts_of(batch, world_size)[rank]
        step(tiny.parts_of(own, micro_batches))
    return _result(model, loss)


one_process = functools.cache(run)


@functools.cache
def run_in_blocks(name: str, blocks: int) -> dict[str, Tensor]:
    """Train in one process. In each step, average the loss and its floating-point state over ``blocks`` parts of a batch."""
    model, loss = _start(name)
    optimizer = create_optimizer(model, tiny.OPTIMIZER, None, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, None)
    for number in range(STEPS):
        schedule(number)
        optimizer.zero_grad()
        before = copy.deepcopy(loss.state_dict())
        after = []
        for block in tiny.parts_of(tiny.tiny_batch(number, dtype=torch.float64), blocks):
            loss.load_state_dict(before)
            outputs = model(block["image"], block["text"])
            (loss(**outputs) / blocks).backward()
            after.append(copy.deepcopy(loss.state_dict()))
        averaged = [key for key, value in before.items() if isinstance(value, Tensor) and value.is_floating_point()]
        mean = {key: sum(state[key] for state in after) / blocks for key in averaged}
        loss.load_state_dict({**after[0], **mean})
        optimizer.step()
        with torch.no_grad():
            loss.finish_logit_scale_step(model.logit_scale)
    return _result(model, loss)


def _start(name: str) -> tuple[Any, Any]:
    model = tiny.tiny_model().double()
    kind, options = (CASES | BLOCK_CASES)[name]
    loss = registry.create_loss(kind, embed_dim=tiny.WIDTH, num_samples=tiny.SAMPLES, **options).double()
    tiny.prepare(model, loss)
    return model, loss


def _result(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point tensors of the model and of the loss state."""
    state = tiny.tensors({"loss": loss.state_dict(), "model": dict(model.named_parameters())})
    return {name: value for name, value in state.items() if value.is_floating_point()}


def assert_equal_runs(found: dict[str, Tensor], expected: dict[str, Tensor], sharded: bool) -> None:
    assert found.keys() == expected.keys()
    if sharded:  # skip shards of per-sample state, which tests/distributed/test_losses.py compares
        whole = [name for name, value in expected.items() if found[name].shape == value.shape]
        found, expected = ({name: state[name] for name in whole} for state in (found, expected))
    tiny.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_processes_train_as_one(name, micro_batches):
    for result in two_ranks().run(run, name, micro_batches):
        assert_equal_runs(result, one_process(name), sharded=True)


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_processes_are_the_mean_of_two_blocks(name, micro_batches):
    for result in two_ranks().run(run, name, micro_batches):
        assert_equal_runs(result, run_in_blocks(name, blocks=2), sharded=False)


@pytest.mark.parametrize("name", [*CASES, *BLOCK_CASES])
def test_accumulation_is_the_large_batch(name):
    assert_equal_runs(run(name, micro_batches=4), one_process(name), sharded=False)
