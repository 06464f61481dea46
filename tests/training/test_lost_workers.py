"""If a data worker hangs or is killed mid-epoch, the run saves its steps and exits. The resumed run is exact.

If SIGTERM arrives while the run waits for a missing batch, the run also saves and exits.
"""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from openclip_ext import distributed
from openclip_ext.training.step import TrainStep
from tests.training.programs import Program, Runs, differing, program
from tests.training.runs import EXIT_AFTER_SIGTERM

# Faults of the last rank's only data worker, with the step after which they happen and the run's --rank-patience. Step 4 is
# the last of an epoch, which is not saved: the run then evaluates.
FAULTS = {
    "hangs": (0, "3"),
    "is killed": (0, "30"),
    "hangs, SIGTERM": (0, "100"),
    "is killed between epochs": (4, "30"),
    "hangs between epochs, SIGTERM": (4, "100"),
}


def disturbed(fault: str, argv: list[str]) -> None:
    def step(self, batches, number=0, take=TrainStep.__call__):
        terms = take(self, batches, number)
        if number == FAULTS[fault][0] and distributed.rank() == distributed.world_size() - 1:
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL if "killed" in fault else signal.SIGSTOP)
            if "SIGTERM" in fault:
                threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return terms

    TrainStep.__call__ = step
    program(argv)


# Three ranks, because only two numbers have the same sum in any order.
@pytest.mark.parametrize(("fault", "ranks"), [*itertools.product(FAULTS, (1, 2)), ("hangs, SIGTERM", 3)])
def test_the_steps_before_are_saved_and_the_run_resumes_bitwise(fault: str, ranks: int, runs: Runs, tmp_path: Path):
    argv = runs.argv(tmp_path, "queueclip", ranks, "--workers", "1")
    # The run has fewer than 100 steps, so only the fault causes a save.
    fails = [*argv, "--save-every-steps", "100", "--save-frequency", "100", "--rank-patience", FAULTS[fault][1]]
    failed = Program(fails, ranks, tmp_path / "failed", target=functools.partial(disturbed, fault))
    statuses = failed.wait()
    expected = EXIT_AFTER_SIGTERM if "SIGTERM" in fault else 1
    # After one rank exits, Program may terminate the other rank with SIGTERM.
    assert expected in statuses and set(statuses) <= {expected, -signal.SIGTERM}, failed.text()[-3000:]
    if "SIGTERM" in fault:
        assert "Stopped by a signal after step" in failed.text()
    else:
        assert ("did not answer for 3 s" if fault == "hangs" else "was killed") in failed.text()
        assert ranks == 1 or "the data workers of another rank failed" in failed.text()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*.pt")
    assert "_step_" in saved.name
    resumed = Program(argv, ranks, tmp_path / "resumed")
    assert not any(resumed.wait()), resumed.text()[-3000:]
    assert not saved.exists()
    assert not differing(tmp_path / "run", runs.uninterrupted("queueclip", ranks, "--workers", "1"))
