"""The pool of ranks gives results in order, says what went wrong on which rank, and works again afterwards."""

import os
import sys
import time

import pytest
import torch.distributed as dist

from tests.distributed.pool import RankError, two_ranks


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
    assert ranks.run(dist.get_rank) == [0, 1]
    with pytest.raises(RankError) as failure:
        ranks.run(fail, how, timeout=3)
    assert message in str(failure.value) and "before the failure" in str(failure.value)
    assert ranks.run(dist.get_rank) == [0, 1]


def test_a_crash_in_compiled_code_is_told_and_repeated_once(tmp_path):
    ranks = two_ranks()
    with pytest.warns(
        UserWarning, match=r"crash\(1, .* is repeated: rank 1 exited with status -6(.|\n)*Fatal Python error"
    ):
        assert ranks.run(crash, 1, str(tmp_path / "once")) == [0, 1]
    with pytest.warns(UserWarning), pytest.raises(RankError, match="rank 1 exited with status -6"):
        ranks.run(crash, 2, str(tmp_path / "twice"))
