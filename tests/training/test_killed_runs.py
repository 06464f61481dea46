"""Runs that are killed at random times and restarted end bitwise equal to uninterrupted runs.

The model, the optimizer, and the loss's state and tables are bitwise equal. Log lines and checkpoint names are also equal. Up
to three times, SIGKILL ends all processes of a run, or one rank. About half of the kills happen during a save.
If a restarted program exits with an error, it is started again. The seed fixes the targets and the times of the kills, but the
program's activity at these times also depends on the machine.
"""

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from openclip_ext.losses.registry import list_losses
from tests.soak import SoakCase
from tests.training.programs import Program, Runs, differing, send_kill
from tests.training.runs import SMALL_MODEL, contents

RESTARTS = 4


@dataclass(frozen=True)
class Kill:
    """The time and the target of one kill.

    Attributes:
        after: event to wait for: the ``start`` of the program, a logged ``step``, or the start of a ``save``.
        count: number of such events to wait for.
        delay: seconds between the last of these events and the kill.
        target: ``all`` processes, or one ``rank``.
        rank: the rank to kill if the target is ``rank``, modulo the number of trainers.
    """

    after: str
    count: int
    delay: float
    target: str
    rank: int


def drawn(rng: random.Random, ranks: int) -> Kill:
    after = rng.choices(("start", "step", "save"), (0.15, 0.3, 0.55))[0]
    longest = {"start": 2.0, "step": 0.3, "save": 0.08}[after]
    target = rng.choice(["all", "rank"][:ranks])
    return Kill(after, rng.choice((1, 1, 2, 3)), rng.uniform(0, longest), target, rng.randrange(ranks))


def unfinished_saves(run: Path) -> set[tuple[str, int]]:
    """Return paths and modification times of temporary files that unfinished saves left; the next launch removes them."""
    found = set()
    for pattern in ("checkpoints/*.pt.tmp", "checkpoints/*.state/tmp_step_*"):
        with contextlib.suppress(FileNotFoundError):  # a save renamed or removed the file after glob() listed it
            found |= {(str(path.relative_to(run)), path.stat().st_mtime_ns) for path in run.glob(pattern)}
    return found


class Victim:
    """The run ``logs/run``, which is killed and restarted."""

    def __init__(self, argv: list[str], ranks: int, logs: Path) -> None:
        self._argv, self._ranks, self._logs = argv, ranks, logs

    def go_on(self, kills: Sequence[Kill]) -> None:
        """Start the run repeatedly, and kill it once per entry of ``kills``, until it is complete."""
        left, refusals, starts = list(kills), [], 0
        while len(refusals) < RESTARTS:
            starts += 1
            program = Program(self._argv, self._ranks, self._logs / f"output_{starts}")
            if left and self._killed(program, left[0]):
                left.pop(0)
                continue
            statuses = program.wait()
            if not any(statuses):
                return
            refusals.append(program.message() or f"status {statuses}, no message:\n{program.text()[-3000:]}")
        pytest.fail(f"{RESTARTS} restarts failed, the last one: {refusals[-1]}")

    def _killed(self, program: Program, kill: Kill) -> bool:
        """Wait for the event of ``kill``, then kill its target; return False if the program exited first."""
        if not self._came(program, kill):
            return False
        time.sleep(kill.delay)
        if program.has_ended():
            return False
        trainers = program.trainers()
        if kill.target == "rank" and trainers:
            send_kill(trainers[kill.rank % len(trainers)])
            program.wait()
        else:
            program.kill()
        return True

    def _came(self, program: Program, kill: Kill) -> bool:
        before = unfinished_saves(self._logs / "run")
        saves: set[str] = set()
        deadline = time.monotonic() + 300
        while kill.after != "start":
            if program.has_ended():
                return False
            if time.monotonic() > deadline:
                program.kill()
                pytest.fail(f"expected {kill.count} x {kill.after} in 300 s")
            if kill.after == "save":
                new = unfinished_saves(self._logs / "run") - before
                saves |= {name for name, _ in new if "tmp_step_" in name}
            done = len(saves) if kill.after == "save" else program.text().count(" | loss ")
            if done >= kill.count:
                break
            time.sleep(0.002)
        return True


def check(runs: Runs, logs: Path, loss: str, ranks: int, kills: Sequence[Kill]) -> None:
    more = ("--model", SMALL_MODEL)
    whole = runs.uninterrupted(loss, ranks, *more)
    Victim(runs.argv(logs, loss, ranks, *more), ranks, logs).go_on(kills)
    assert differing(logs / "run", whole) == [], kills
    assert contents(logs / "run" / "checkpoints").keys() == contents(whole / "checkpoints").keys(), kills


@pytest.mark.parametrize("steps", [1, 7])  # the first save happens after the second step
def test_a_run_killed_after_a_step_goes_on_at_its_last_save(steps: int, runs: Runs, tmp_path: Path) -> None:
    check(runs, tmp_path, "fastclip", 1, [Kill("step", steps, 0.0, "all", 0)])


@pytest.mark.soak(2)
def test_killed_runs_end_as_uninterrupted_ones(soak_case: SoakCase, runs: Runs, tmp_path: Path) -> None:
    """Consecutive case numbers cycle through all losses, on one and on two ranks."""
    rng, losses, number = soak_case.random(), list_losses(), soak_case.number
    loss, ranks = losses[number % len(losses)], 1 + (number + number // len(losses)) % 2
    check(runs, tmp_path, loss, ranks, [drawn(rng, ranks) for _ in range(3)])
