"""For every loss, float64 training on two processes or with accumulation equals one process with the full batch."""

import copy
import functools

import pytest
import torch
from torch import Tensor

from openclip_ext.training.step import Batch
from tests.distributed.pool import two_ranks
from tests.training import tiny

TOLERANCE = 1e-9
STEPS = 5
HARDER = "-hard-negatives"


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


# Of each kind of state a loss that also accumulates on two processes.
ACCUMULATED = ("openclip", "fastclip-v2", "amorlip", "neuclip", "tempnet")


def start(name: str, micro_batches: int = 1) -> tiny.TinyTraining:
    """Return a float64 training run of a case."""
    loss, options = (CASES | BLOCK_CASES)[name]
    return tiny.TinyTraining(loss, tiny.Way(dtype=torch.float64, micro_batches=micro_batches, options=options))


def run(name: str, micro_batches: int = 1) -> dict[str, Tensor]:
    """Take a few steps on this rank's part of fixed batches; return the state."""

    def add_hard_negatives(batch: Batch) -> None:
        batch["hard_negative"] = batch["text"].roll(1, dims=1)

    training = start(name, micro_batches)
    for number in range(STEPS):
        training.take(number, add_hard_negatives if name.endswith(HARDER) else None)
    return floating(training.state())


one_process = functools.cache(run)


@functools.cache
def run_in_blocks(name: str, blocks: int) -> dict[str, Tensor]:
    """Train in one process. In each step, average the loss and its floating-point state over ``blocks`` parts of a batch."""
    training = start(name)
    model, loss = training.model, training.loss
    for number in range(STEPS):
        training.optimizer.zero_grad()
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
        training.optimizer.step()
        with torch.no_grad():
            loss.finish_logit_scale_step(model.logit_scale)
    return floating(training.state())


def floating(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def assert_equal_runs(found: dict[str, Tensor], expected: dict[str, Tensor], sharded: bool) -> None:
    assert found.keys() == expected.keys()
    if sharded:  # skip shards of per-sample state, which tests/distributed/test_losses.py compares
        whole = [name for name, value in expected.items() if found[name].shape == value.shape]
        found, expected = ({name: state[name] for name in whole} for state in (found, expected))
    tiny.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "micro_batches"), [*((name, 1) for name in CASES), *((name, 2) for name in ACCUMULATED)]
)
def test_two_processes_train_as_one(name, micro_batches):
    for result in two_ranks().run(run, name, micro_batches):
        assert_equal_runs(result, one_process(name), sharded=True)


@pytest.mark.parametrize(("name", "micro_batches"), [("cliplite", 1), ("cliplite-wide", 2)])
def test_two_processes_are_the_mean_of_two_blocks(name, micro_batches):
    for result in two_ranks().run(run, name, micro_batches):
        assert_equal_runs(result, run_in_blocks(name, blocks=2), sharded=False)


@pytest.mark.parametrize("name", [*CASES, *BLOCK_CASES])
def test_accumulation_is_the_large_batch(name):
    assert_equal_runs(run(name, micro_batches=4), one_process(name), sharded=False)
