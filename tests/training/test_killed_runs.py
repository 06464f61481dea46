"""A run that is killed and restarted ends bitwise equal to an uninterrupted run.

The model, the optimizer, and the loss's state and tables are bitwise equal. Log lines and checkpoint names are also equal.
``test_checkpoint.py`` kills saves at each file operation, and ``test_hostile_hours.py`` kills long runs at random times.
"""

from pathlib import Path

import pytest

from tests.training.programs import Program, Runs, differing, send_kill
from tests.training.runs import SMALL_MODEL, contents


@pytest.mark.parametrize(
    ("loss", "steps", "ranks", "rank", "more"),
    [
        ("fastclip", 1, 1, None, ""),  # the first save happens after the second step
        ("fastclip", 7, 1, None, ""),
        ("neuclip", 3, 2, None, ""),
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
    resumed = Program(argv, ranks, tmp_path / "resumed")
    assert not any(resumed.wait()), resumed.text()[-3000:]
    assert differing(tmp_path / "run", whole) == []
    assert contents(tmp_path / "run" / "checkpoints").keys() == contents(whole / "checkpoints").keys()
