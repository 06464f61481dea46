"""A run that is killed, or that loses a data worker, and is started again ends bitwise equal to an uninterrupted run.

The model, the optimizer, and the loss's state and tables are bitwise equal. Log lines and checkpoint names are also equal.
``test_checkpoint.py`` kills saves at each file operation, and ``test_hostile_hours.py`` kills long runs at random times.
"""

import functools
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from openclip_ext import distributed
from openclip_ext.training.step import TrainStep
from tests.training.programs import Program, Runs, differing, program, send_kill
from tests.training.runs import EXIT_AFTER_SIGTERM, SMALL_MODEL, contents


def assert_resumes(argv: list[str], ranks: int, folder: Path, whole: Path) -> None:
    resumed = Program(argv, ranks, folder / "resumed")
    assert not any(resumed.wait()), resumed.text()[-3000:]
    assert differing(folder / "run", whole) == []


@pytest.mark.parametrize(
    ("loss", "steps", "ranks", "rank", "more"),
    [
        ("fastclip", 1, 1, None, ""),  # the first save happens after the second step
        ("queueclip", 4, 2, 0, ""),
        ("isogclr", 8, 2, 1, ""),
        ("openclip", 3, 3, None, "--ddp-static-graph"),  # three ranks, because sums of two do not depend on the order
    ],
)
def test_a_killed_run_goes_on_at_its_last_save(loss, steps, ranks, rank, more, runs: Runs, tmp_path: Path) -> None:
    """SIGKILL ends one ``rank``, or all processes if it is None, after a number of steps."""
    flags = ["--model", SMALL_MODEL, *more.split()]
    whole = runs.uninterrupted(loss, ranks, *flags)
    argv = runs.argv(tmp_path, loss, ranks, *flags)
    killed = Program(argv, ranks, tmp_path / "killed")
    killed.wait_for_step(tmp_path / "run", steps)
    if rank is None:
        killed.kill()
    else:
        send_kill(killed.trainers()[rank])
    assert any(killed.wait())
    assert_resumes(argv, ranks, tmp_path, whole)
    assert contents(tmp_path / "run" / "checkpoints").keys() == contents(whole / "checkpoints").keys()


def disturbed(fault: str, after: int, argv: list[str]) -> None:
    """Train; after a step, stop or kill the last rank's only data worker, then ask the run to end if ``fault`` says so."""

    def step(self, batches, number=0, take=TrainStep.__call__):
        terms = take(self, batches, number)
        if number == after and distributed.rank() == distributed.world_size() - 1:
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL if fault == "is killed" else signal.SIGSTOP)
            if fault == "hangs, SIGTERM":
                threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return terms

    TrainStep.__call__ = step
    program(argv)


# Step 4 is the last of an epoch, which is not saved: the run then evaluates.
@pytest.mark.parametrize(
    ("fault", "after", "ranks", "patience", "said"),
    [
        ("hangs", 0, 2, "3", "did not answer for 3 s"),
        ("is killed", 0, 1, "30", "was killed"),
        ("hangs, SIGTERM", 0, 3, "100", "Stopped by a signal after step"),  # three ranks, as above
        ("is killed", 4, 2, "30", "was killed"),
        ("hangs, SIGTERM", 4, 1, "100", "Stopped by a signal after step"),
    ],
)
def test_a_run_that_loses_a_worker_saves_its_steps(fault, after, ranks, patience, said, runs: Runs, tmp_path: Path):
    argv = runs.argv(tmp_path, "queueclip", ranks, "--workers", "1")
    # The run has fewer than 100 steps, so only the fault causes a save.
    fails = [*argv, "--save-every-steps", "100", "--save-frequency", "100", "--rank-patience", patience]
    failed = Program(fails, ranks, tmp_path / "failed", target=functools.partial(disturbed, fault, after))
    statuses, expected = failed.wait(), EXIT_AFTER_SIGTERM if fault == "hangs, SIGTERM" else 1
    # After one rank exits, Program may terminate the other rank with SIGTERM.
    assert expected in statuses and set(statuses) <= {expected, -signal.SIGTERM}, failed.text()[-3000:]
    assert said in failed.text()
    assert ranks == 1 or expected != 1 or "the data workers of another rank failed" in failed.text()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*.pt")
    assert "_step_" in saved.name
    assert_resumes(argv, ranks, tmp_path, runs.uninterrupted("queueclip", ranks, "--workers", "1"))
