"""The pool of ranks gives results in order, says what went wrong on which rank, and works again afterwards."""

import multiprocessing
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankError, two_ranks


def gathered(value: int) -> dict:
    """What both ranks send."""
    values = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([float(value + dist.get_rank())]))
    return {"rank": dist.get_rank(), "all": torch.cat(values), "process": os.getpid()}


def environment(name: str) -> list:
    """What a program sees: torchrun's variables, one of the test's, the folder, how its children would start."""
    ranks = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
    return [*ranks, os.environ.get(name), os.getcwd(), dist.is_initialized(), multiprocessing.get_start_method()]


def crash(times: int, counter: str) -> int:
    """End rank 1 as a crash in compiled code does, so many times."""
    with open(counter, "a+b", buffering=0) as file:
        if dist.get_rank() == 1 and file.tell() < times:
            file.write(b".")
            os.abort()
    dist.barrier()
    return dist.get_rank()


def fail(how: str) -> None:
    """Fail on rank 1 alone; rank 0 waits for it."""
    print("before the failure")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("rank 1 has had enough")
        if how == "exit":
            sys.exit(4)
        if how == "die":
            os._exit(3)
        time.sleep(60)
    dist.barrier()


def test_results_come_in_the_order_of_ranks_from_the_same_processes():
    first, second = two_ranks().run(gathered, 5), two_ranks().run(gathered, 7)
    assert [result["rank"] for result in first] == [0, 1]
    assert all(torch.equal(result["all"], torch.tensor([7.0, 8.0])) for result in second)
    assert [result["process"] for result in first] == [result["process"] for result in second]
    assert len({os.getpid(), *(result["process"] for result in first)}) == 3


def test_without_a_group_a_rank_is_a_program_that_torchrun_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_TEST", "1")
    monkeypatch.chdir(tmp_path)
    same = ["2", "1", os.getcwd(), False, multiprocessing.get_start_method()]
    assert two_ranks().run(environment, "OF_THE_TEST", group=False) == [["0", *same], ["1", *same]]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ValueError: rank 1 has had enough"),
        ("exit", "SystemExit: 4"),
        ("die", "rank 1 exited with status 3"),
        ("hang", "rank 1 did not answer"),
    ],
)
def test_a_failure_tells_the_rank_and_the_reason_and_the_next_job_works(how, message):
    ranks = two_ranks()
    ranks.run(gathered, 0)
    with pytest.raises(RankError) as failure:
        ranks.run(fail, how, timeout=3)
    assert message in str(failure.value) and "before the failure" in str(failure.value)
    assert ranks.run(gathered, 1)[1]["rank"] == 1


def test_a_crash_in_compiled_code_is_told_and_repeated_once(tmp_path):
    ranks = two_ranks()
    with pytest.warns(
        UserWarning, match=r"crash\(1, .* is repeated: rank 1 exited with status -6(.|\n)*Fatal Python error"
    ):
        assert ranks.run(crash, 1, str(tmp_path / "once")) == [0, 1]
    with pytest.warns(UserWarning), pytest.raises(RankError, match="rank 1 exited with status -6"):
        ranks.run(crash, 2, str(tmp_path / "twice"))
