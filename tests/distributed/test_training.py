"""Two processes, and accumulation, train as one process with the whole batch: float64, several steps, every loss."""

import subprocess
import sys

import pytest
import torch

from openclip_ext.model_configs import add_model_configs
from tests.distributed.training_cases import BLOCK_CASES, CASES, run, run_in_blocks

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def one_process():
    add_model_configs()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {case.name: run(case) for case in [*CASES, *BLOCK_CASES]}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    command = [sys.executable, "-m", "tests.distributed.training_cases"]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder / "rendezvous"), str(folder / "results")])
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"results.{rank}", weights_only=True) for rank in range(2)]


def assert_equal_runs(found: dict, expected: dict, sharded: bool) -> None:
    for name, value in expected.items():
        if sharded and found[name].shape != value.shape:
            continue  # a rank's slice of per-sample state; tests/distributed/test_losses.py compares those
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=TOLERANCE, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_processes_train_as_one(one_process, two_processes, case, micro_batches):
    for results in two_processes:
        assert_equal_runs(results[case.name, micro_batches], one_process[case.name], sharded=True)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda case: case.name)
def test_two_processes_are_the_mean_of_two_blocks(two_processes, case):
    expected = run_in_blocks(case, blocks=2)
    for micro_batches in (1, 2):
        for results in two_processes:
            assert_equal_runs(results[case.name, micro_batches], expected, sharded=False)


@pytest.mark.parametrize("case", [*CASES, *BLOCK_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_is_the_large_batch(one_process, case, micro_batches):
    assert_equal_runs(run(case, micro_batches=micro_batches), one_process[case.name], sharded=False)


def test_the_comparison_sees_a_difference(one_process):
    """Parameters move by far more than the tolerance, so equality means something."""
    initial = run(CASES[0], micro_batches=1)
    different = one_process[CASES[2].name]
    assert max(float((initial[name] - different[name]).abs().max()) for name in initial) > 1000 * TOLERANCE
