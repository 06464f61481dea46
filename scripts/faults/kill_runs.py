"""Kill trainings at random moments, start them again, and compare their end with that of uninterrupted ones.

    python -m scripts.faults.kill_runs --kills 200 --under-torchrun 200 --per-run 4 --seed 0

All losses take turns, on 1 and on 2 ranks. A run is killed (SIGKILL) several times: all its processes at once, one rank,
or torchrun alone; in about half of the kills while a checkpoint is being written. ``--under-torchrun`` says how many of the
kills hit programs that torchrun started; the others are forks, which start fast. A kill is

- *survived* if the run, started again, ended as the uninterrupted one: the same model, optimizer, loss state and tables
  bit for bit, the same logs line by line, and the same files,
- *refused* if that holds, too, but a restart ended with a message first and was repeated,
- *lost* if the run could not be continued to its end,
- *silent* if it ended in another way, without a word.

The seed decides what is killed and when; what the program is doing at that time depends on the machine, too. All kills of
a run have the run's outcome.
"""

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from openclip_ext.losses.registry import list_losses
from scripts.faults.programs import (
    SMALL_MODEL,
    HangError,
    Program,
    Uninterrupted,
    add_small_model,
    arguments,
    compare,
    files_of,
    send_kill,
    summary,
)
from tests.training.runs import make_shards

OUTCOMES = ("survived", "refused", "lost", "silent")
RESTARTS = 4


@dataclass(frozen=True)
class Kill:
    """When to kill whom.

    Attributes:
        after: what to wait for: the ``start`` of the program, a logged ``step``, the beginning of a ``save``.
        count: how many of these.
        delay: seconds from there.
        target: ``all`` processes, one ``rank``, ``torchrun`` alone.
        rank: which rank.
    """

    after: str
    count: int
    delay: float
    target: str
    rank: int

    @staticmethod
    def drawn(rng: random.Random, ranks: int, torchrun: bool) -> "Kill":
        after = rng.choices(("start", "step", "save"), (0.15, 0.3, 0.55))[0]
        longest = {"start": 12.0 if torchrun else 2.0, "step": 0.3, "save": 0.15 if torchrun else 0.08}[after]
        targets = ["all", "rank", "torchrun"] if torchrun else ["all", "rank"] if ranks > 1 else ["all"]
        return Kill(after, rng.choice((1, 1, 2, 3)), rng.uniform(0, longest), rng.choice(targets), rng.randrange(ranks))


@dataclass
class Tally:
    """Of all kills: by outcome, by what was going on and whom they hit; and what was wrong, in words."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    targets: Counter[str] = field(default_factory=Counter)
    in_a_save: int = 0
    reports: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.outcomes.values())


def unfinished_saves(run: Path) -> set[tuple[str, int]]:
    """What a save leaves when it is killed, until the next start cleans up."""
    found = set()
    for pattern in ("checkpoints/*.pt.tmp", "checkpoints/*.state/tmp_step_*"):
        with contextlib.suppress(FileNotFoundError):  # finished or removed meanwhile
            found |= {(str(path.relative_to(run)), path.stat().st_mtime_ns) for path in run.glob(pattern)}
    return found


class Victim:
    """A run that is killed and started again.

    Args:
        argv: of the run ``logs/run``.
        ranks: number of trainers.
        torchrun: whether torchrun starts it.
        logs: folder for the run and for what its programs print.
    """

    def __init__(self, argv: list[str], ranks: int, torchrun: bool, logs: Path) -> None:
        self.argv, self.ranks, self.torchrun, self.logs = argv, ranks, torchrun, logs
        self.run = logs / "run"
        self.refusals: list[str] = []
        self.hits: list[tuple[Kill, bool]] = []
        self._orphans: list[int] = []

    def start(self) -> Program:
        return Program(
            self.argv, self.ranks, self.logs / f"output_{len(self.hits)}_{len(self.refusals)}", self.torchrun
        )

    def go_on(self, kills: Sequence[Kill]) -> str | None:
        """Start and kill until all kills hit or the run is complete; returns what hinders the run from its end."""
        left = list(kills)
        try:
            while len(self.refusals) < RESTARTS:
                program = self.start()
                if left and self._killed(program, left[0]):
                    left.pop(0)
                    continue
                statuses = program.wait()
                if not any(statuses):
                    return None
                self.refusals.append(program.message() or f"status {statuses}, no message:\n{program.text()[-3000:]}")
            return f"{RESTARTS} restarts failed, the last one: {self.refusals[-1]}"
        except HangError as error:
            return str(error)
        finally:
            for pid in self._orphans:
                send_kill(pid)

    def _killed(self, program: Program, kill: Kill) -> bool:
        """Wait for the moment and kill; False if the program ended before."""
        before = unfinished_saves(self.run)
        if not self._wait_for(program, kill, before):
            return False
        time.sleep(kill.delay)
        if program.has_ended():
            return False
        trainers = program.trainers()
        if kill.target == "rank" and trainers:
            send_kill(trainers[kill.rank % len(trainers)])
            program.wait()
        elif kill.target == "torchrun" and program.launcher is not None:
            # The trainers save and end by themselves, while the restart begins.
            send_kill(program.launcher)
            program.wait()
            self._orphans += trainers
        else:
            program.kill()
        self.hits.append((kill, bool(unfinished_saves(self.run) - before)))
        return True

    def _wait_for(self, program: Program, kill: Kill, before: set[tuple[str, int]]) -> bool:
        saves: set[str] = set()
        deadline = time.monotonic() + 300
        while kill.after != "start":
            if program.has_ended():
                return False
            if time.monotonic() > deadline:
                program.kill()
                raise HangError("no step and no save in 300 s")
            if kill.after == "save":
                saves |= {name for name, _ in unfinished_saves(self.run) - before if "tmp_step_" in name}
            done = len(saves) if kill.after == "save" else program.text().count(" | loss ")
            if done >= kill.count:
                break
            time.sleep(0.002)
        return True


def outcome_of(victim: Victim, kills: Sequence[Kill], whole: Path) -> tuple[str, str]:
    """What became of a run, and what there is to say about it."""
    hindered = victim.go_on(kills)
    if hindered is not None:
        return "lost", hindered
    found = compare(victim.run, whole)
    checkpoints = files_of(victim.run / "checkpoints")
    if checkpoints != files_of(whole / "checkpoints"):
        found.append(f"files in checkpoints: {checkpoints}")
    if found:
        return "silent", f"differs in {found[:5]}"
    return ("refused", "; ".join(victim.refusals)) if victim.refusals else ("survived", "")


def kill_many(kills: int, under_torchrun: int, per_run: int, losses: Sequence[str], seed: int, folder: Path) -> Tally:
    """Kill runs until so many kills have hit.

    Args:
        kills: in all.
        under_torchrun: how many of them on programs that torchrun started; they come first.
        per_run: how many a run gets, at most.
        losses: take turns, each on 1 and on 2 ranks.
        seed: of the kills.
        folder: for the runs; one that did not survive stays there.
    """
    shards = make_shards(folder / "shards")
    add_small_model(folder / "models")
    uninterrupted, tally = Uninterrupted(shards, folder / "whole"), Tally()
    cases = [(loss, 1 + (number + turn) % 2) for turn in (0, 1) for number, loss in enumerate(losses)]
    number = 0
    while tally.kills < kills:
        rng = random.Random(f"{seed} {number}")
        torchrun = tally.kills < under_torchrun
        loss, ranks = cases[number % len(cases)]
        number += 1
        more = () if torchrun else ("--model", SMALL_MODEL)
        whole = uninterrupted(loss, ranks, *more)
        left = (under_torchrun if torchrun else kills) - tally.kills
        planned = [Kill.drawn(rng, ranks, torchrun) for _ in range(min(left, per_run))]
        logs = folder / f"{number:03d}-{loss}-{ranks}"
        logs.mkdir()
        victim = Victim(arguments(shards, logs, loss, ranks, *more), ranks, torchrun, logs)
        begin = time.perf_counter()
        outcome, words = outcome_of(victim, planned, whole)
        hits = len(victim.hits)
        tally.outcomes[outcome] += hits
        tally.in_a_save += sum(in_a_save for _, in_a_save in victim.hits)
        for kill, _ in victim.hits:
            tally.targets[f"{kill.target} of {'torchrun' if torchrun else 'forks'}, {ranks} ranks"] += 1
        if words:
            tally.reports.append(f"{outcome} {logs.name} (seed {seed}, run {number}): {words}")
        print(
            f"{tally.kills:4d} {logs.name}{' torchrun' if torchrun else ''}: {hits} kills "
            f"{outcome} {words[:300]} [{time.perf_counter() - begin:.0f} s]",
            flush=True,
        )
        if outcome in ("survived", "refused"):
            shutil.rmtree(logs)
    return tally


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--under-torchrun", type=int, default=30, help="so many of them on torchrun's programs")
    parser.add_argument("--per-run", type=int, default=6, help="kills of a run, at most")
    parser.add_argument("--losses", nargs="+", choices=list_losses(), default=list_losses(), metavar="LOSS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; those that were lost or silent stay there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fork must not inherit the pool of threads
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        tally = kill_many(args.kills, args.under_torchrun, args.per_run, args.losses, args.seed, folder)
    for name, count in sorted(tally.targets.items()):
        print(f"{count:4d} {name}")
    for report in tally.reports:
        print(report)
    print(
        f"{tally.kills} kills, seed {args.seed}: {summary(tally.outcomes)}; {tally.in_a_save} while a checkpoint was being "
        f"written; {time.perf_counter() - begin:.0f} s"
    )
    return 1 if tally.outcomes["lost"] or tally.outcomes["silent"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
