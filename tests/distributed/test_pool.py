"""The pool returns results in rank order. If a rank fails, the pool reports this rank, and the next call works again."""

import os
import time

import pytest
import torch.distributed as dist

from tests.distributed.pool import RankError, two_ranks


def fail(how: str) -> None:
    """Make rank 1 fail, as ``how`` specifies, while rank 0 waits in a collective."""
    print("before the failure")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("rank 1 has had enough")
        if how == "die":
            os._exit(3)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ValueError: rank 1 has had enough"),
        ("die", "rank 1 died"),
        ("hang", "rank 1 did not answer"),
    ],
)
def test_a_failure_tells_the_rank_and_the_reason_and_the_next_job_works(how, message):
    ranks = two_ranks()
    assert ranks.run(dist.get_rank) == [0, 1]
    with pytest.raises(RankError) as failure:
        ranks.run(fail, how, timeout=10)
    assert message in str(failure.value) and "before the failure" in str(failure.value)
    assert ranks.run(dist.get_rank) == [0, 1]
