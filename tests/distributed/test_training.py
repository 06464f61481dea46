"""Two processes, and accumulation, train as one process with the whole batch: float64, several steps, every loss."""

import functools

import pytest
from torch import Tensor

from tests.distributed import training_cases
from tests.distributed.pool import two_ranks
from tests.distributed.training_cases import BLOCK_CASES, CASES, run_in_blocks
from tests.training.tiny import assert_close

TOLERANCE = 1e-9

one_process = functools.cache(training_cases.run)


def assert_equal_runs(found: dict[str, Tensor], expected: dict[str, Tensor], sharded: bool) -> None:
    assert found.keys() == expected.keys()
    if sharded:  # a rank's slice of per-sample state; tests/distributed/test_losses.py compares those
        whole = [name for name, value in expected.items() if found[name].shape == value.shape]
        found, expected = ({name: state[name] for name in whole} for state in (found, expected))
    assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_processes_train_as_one(name, micro_batches):
    for result in two_ranks().run(training_cases.run, name, micro_batches):
        assert_equal_runs(result, one_process(name), sharded=True)


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_processes_are_the_mean_of_two_blocks(name, micro_batches):
    expected = run_in_blocks(name, blocks=2)
    for result in two_ranks().run(training_cases.run, name, micro_batches):
        assert_equal_runs(result, expected, sharded=False)


@pytest.mark.parametrize("name", [*CASES, *BLOCK_CASES])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_is_the_large_batch(name, micro_batches):
    assert_equal_runs(training_cases.run(name, micro_batches), one_process(name), sharded=False)


@pytest.mark.parametrize("other", ["openclip", "neuclip"])
def test_the_comparison_sees_a_difference(other):
    """Parameters move by far more than the tolerance, so equality means something."""
    first, second = one_process("fastclip"), one_process(other)
    names = [name for name in first if name.startswith(".model")]
    assert max(float((first[name] - second[name]).abs().max()) for name in names) > 1000 * TOLERANCE
