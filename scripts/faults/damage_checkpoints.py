"""Damage the checkpoints and logs of stopped runs, resume, and look at the end: nothing may be lost without a word.

    python -m scripts.faults.damage_checkpoints --cases 100 --seed 0

Each case copies a run that was stopped in mid-epoch, with three checkpoints (``epoch_1``, ``epoch_latest``,
``epoch_1_step_8``), damages one to three things in it, and resumes it in forks, on 1 or 2 ranks. A case

- *survived* if the run ended as the uninterrupted one, bit for bit, named every checkpoint that it passed over, and kept
  the bytes of each of these; lines of a log that were damaged may lack if the program said so,
- was *refused* if the program ended with a message that names a file, and changed nothing,
- was *lost* if the program crashed or hung,
- was *silent* if anything else happened.

A digit that became another one in a log is beyond what can be noticed, so logs are torn and cut here, but not changed.
"""

import argparse
import hashlib
import io
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    lines_of,
    summary,
)
from tests.training.runs import EXIT_AFTER_SIGTERM, make_shards, run

OUTCOMES = ("survived", "refused", "lost", "silent")
STOP_AFTER = 8
NEWEST = "epoch_1_step_8"
CHECKPOINTS = ("epoch_1", "epoch_latest", NEWEST)
LOGS = ("metrics.jsonl", "checkpoints/results.jsonl")
# What every start writes.
ALWAYS_WRITTEN = {"out.log", ".lock", ".owner"}
MORE = ("--save-most-recent", "--model", SMALL_MODEL)

Damage = Callable[[Path, random.Random], str]


def parts(checkpoints: Path, name: str) -> list[Path]:
    """All files of a checkpoint."""
    return [checkpoints / f"{name}.pt", *sorted((checkpoints / f"{name}.state").glob("*/*"))]


def one_file(run_folder: Path, rng: random.Random) -> Path:
    """A file of a checkpoint; of the newest in two cases of three."""
    name = rng.choice((*CHECKPOINTS, NEWEST, NEWEST, NEWEST))
    files = [path for path in parts(run_folder / "checkpoints", name) if path.is_file()]
    return rng.choice(files) if files else run_folder / "metrics.jsonl"


# --- damages ---------------------------------------------------------------------------------------------------------


def flip(run_folder: Path, rng: random.Random) -> str:
    path = one_file(run_folder, rng)
    content = bytearray(path.read_bytes())
    for position in rng.sample(range(len(content)), min(rng.choice((1, 8, 64)), len(content))):
        content[position] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return path.name


def truncate(run_folder: Path, rng: random.Random) -> str:
    path = one_file(run_folder, rng)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size or 1)])
    return path.name


def empty(run_folder: Path, rng: random.Random) -> str:
    path = one_file(run_folder, rng)
    path.write_bytes(b"")
    return path.name


def zeros(run_folder: Path, rng: random.Random) -> str:
    """A stretch that never reached the disk."""
    path = one_file(run_folder, rng)
    content = bytearray(path.read_bytes())
    begin = rng.randrange(len(content) or 1)
    length = min(rng.choice((64, 4096, len(content))), len(content) - begin)
    content[begin : begin + length] = bytes(length)
    path.write_bytes(content)
    return path.name


def garbage(run_folder: Path, rng: random.Random) -> str:
    path = one_file(run_folder, rng)
    path.write_bytes(rng.randbytes(rng.choice((1, 1000, 100_000))))
    return path.name


def delete(run_folder: Path, rng: random.Random) -> str:
    path = one_file(run_folder, rng)
    path.unlink()
    return path.name


def delete_state(run_folder: Path, rng: random.Random) -> str:
    folder = run_folder / "checkpoints" / f"{rng.choice(CHECKPOINTS)}.state"
    shutil.rmtree(folder, ignore_errors=True)
    return folder.name


FOREIGN = ([1, 2, 3], torch.ones(3), {"state_dict": {}}, {"epoch": 9}, {"epoch": 9, "state_dict": {}}, "text", None)


def foreign_file(run_folder: Path, rng: random.Random) -> str:
    """Something else under a checkpoint's name, a new one or that of an existing checkpoint."""
    name = rng.choice(("epoch_9", "epoch_1_step_9", "epoch_2", *CHECKPOINTS))
    content = io.BytesIO()
    torch.save(rng.choice(FOREIGN), content)
    path = run_folder / "checkpoints" / f"{name}.pt"
    path.write_bytes(rng.choice((content.getvalue(), content.getvalue(), content.getvalue(), b"not a checkpoint")))
    return path.name


def tear_log(run_folder: Path, rng: random.Random) -> str:
    """A last line without its end, half a line more, or bytes that are no text."""
    path = run_folder / rng.choice(LOGS)
    content = path.read_bytes()
    last = content.rstrip(b"\n").rpartition(b"\n")[2]
    torn = (
        content[: -rng.randint(1, len(last))],
        content + last[: rng.randint(1, len(last))],
        content + rng.randbytes(100),
        content + bytes(512),
        content + rng.choice((b"12\n", b"[]\n", b'{"step": null}\n', b'{"step": "x", "epoch": "y"}\n', b"\n")),
    )
    path.write_bytes(rng.choice(torn))
    return path.name


def swap(run_folder: Path, rng: random.Random) -> str:
    """Two files change places: the same ones of two checkpoints, or two of one."""
    first = one_file(run_folder, rng)
    others = [path for name in CHECKPOINTS for path in parts(run_folder / "checkpoints", name) if path.is_file()]
    alike = [path for path in others if path.name == first.name and path != first]
    second = rng.choice(alike if alike and rng.random() < 0.7 else others)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    return f"{first.name}/{second.name}"


def rename(run_folder: Path, rng: random.Random) -> str:
    """A model file, a state or a part of it gets another name."""
    name = rng.choice((*CHECKPOINTS, NEWEST, NEWEST))
    checkpoints = run_folder / "checkpoints"
    candidates = [path for path in (*parts(checkpoints, name), checkpoints / f"{name}.state") if path.exists()]
    if not candidates:
        return "nothing"
    path = rng.choice(candidates)
    other = rng.choice(("epoch_3", "epoch_1_step_9", "epoch_1_step_6", "kept"))
    target = path.with_name(f"{other}{path.suffix}")
    if not target.exists():
        path.rename(target)
    return f"{path.name}>{target.name}"


def copy(run_folder: Path, rng: random.Random) -> str:
    """A whole checkpoint under another name, too."""
    name, other = rng.choice(CHECKPOINTS), rng.choice(("epoch_3", "epoch_1_step_9", "epoch_0"))
    checkpoints = run_folder / "checkpoints"
    for suffix, duplicate in ((".pt", shutil.copy), (".state", shutil.copytree)):
        if (checkpoints / f"{name}{suffix}").exists() and not (checkpoints / f"{other}{suffix}").exists():
            duplicate(checkpoints / f"{name}{suffix}", checkpoints / f"{other}{suffix}")
    return f"{name}>{other}"


def damage_all(run_folder: Path, rng: random.Random) -> str:
    """Every checkpoint."""
    for name in CHECKPOINTS:
        files = [path for path in parts(run_folder / "checkpoints", name) if path.is_file()]
        path = rng.choice(files)
        path.write_bytes(path.read_bytes()[:-1])
    return "a file of each checkpoint"


def damage_settings(run_folder: Path, rng: random.Random) -> str:
    path = run_folder / rng.choice(("config.json", "params.txt", "out.log", ".owner", ".lock"))
    path.write_bytes(rng.randbytes(100))
    return path.name


DAMAGES: tuple[Damage, ...] = (
    flip,
    flip,
    truncate,
    truncate,
    empty,
    zeros,
    garbage,
    delete,
    delete,
    delete_state,
    foreign_file,
    foreign_file,
    tear_log,
    tear_log,
    swap,
    swap,
    rename,
    rename,
    copy,
    damage_all,
    damage_settings,
)


# --- what becomes of them --------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def passed_over(text: str) -> set[str]:
    """The checkpoints that the program said it could not read."""
    lines = [line for line in text.splitlines() if "Passing over a checkpoint" in line]
    return {found for line in lines for found in re.findall(r"checkpoints/(epoch_\w+)\.(?:pt|state)", line)[:1]}


def overwritten(before: dict[str, str], after: dict[str, str], unreadable: set[str]) -> list[str]:
    """Files of checkpoints that could not be read, whose bytes are nowhere any more."""
    left = set(after.values())
    return [
        file
        for file, digest in before.items()
        if (found := re.match(r"checkpoints/(epoch_\w+)\.(?:pt|state)", file))
        and found[1] in unreadable
        and digest not in left
    ]


def judge(program: Program, run_folder: Path, whole: Path, before: dict[str, str]) -> tuple[str, str]:
    """What became of a case, and what there is to say about it."""
    try:
        statuses = program.wait()
    except HangError as error:
        return "lost", str(error)
    text, after = program.text(), contents(run_folder)
    if any(statuses):
        return judge_refusal(program.message(), text, before, after)
    found = compare(run_folder, whole)
    found = [item for item in found if item not in LOGS or not is_said(item, text, run_folder, whole)]
    unreadable = passed_over(text)
    found += [f"{file} is gone" for file in overwritten(before, after, unreadable)]
    resumed = re.search(r"Resuming from .*/(epoch_\w+)\.pt", text)
    if not unreadable and (resumed is None or resumed[1] not in (NEWEST, "epoch_1_step_9", "epoch_3")):
        found.append(f"resumed from {resumed and resumed[1]} without a word on {NEWEST}")
    return ("silent", "; ".join(found[:4])) if found else ("survived", "")


def judge_refusal(message: str | None, text: str, before: dict[str, str], after: dict[str, str]) -> tuple[str, str]:
    if message is None:
        return "lost", text[-2000:]
    changed = [file for file in before if file not in ALWAYS_WRITTEN and after.get(file) != before[file]]
    if changed or "checkpoints" not in message:
        return "silent", f"refused ({message}), but changed {changed}"
    return "refused", message


def is_said(log: str, text: str, run_folder: Path, whole: Path) -> bool:
    """Whether lines lack in a log, the others are right, and the program said that it lost some."""
    lines = lines_of(run_folder / log)
    remaining = iter(lines_of(whole / log))
    return all(line in remaining for line in lines) and any(
        "WARNING" in line and Path(log).name in line for line in text.splitlines()
    )


@dataclass
class Tally:
    """Cases by outcome, in all and for each damage that came alone; and what was wrong, in words."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    by_damage: dict[str, Counter[str]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)


class Stopped:
    """Runs that were stopped in mid-epoch, one for each loss and number of ranks."""

    def __init__(self, shards: str, folder: Path) -> None:
        self._shards, self._folder = shards, folder

    def __call__(self, loss: str, ranks: int) -> Path:
        logs = self._folder / f"{loss}-{ranks}"
        if not logs.exists():
            logs.mkdir(parents=True)
            argv = arguments(self._shards, logs, loss, ranks, *MORE)
            program = Program(argv, ranks, logs / "output", call=_stopped)
            if any(program.wait()):
                raise AssertionError(f"the run without a fault failed:\n{program.text()[-3000:]}")
        return logs / "run"


def _stopped(argv: list[str]) -> int:
    return 0 if run(argv, stop_after=STOP_AFTER) == EXIT_AFTER_SIGTERM else 1


def damage_many(numbers: Sequence[int], losses: Sequence[str], seed: int, folder: Path) -> Tally:
    """Cases ``numbers`` of a seed; each depends on the seed and its number alone.

    Args:
        numbers: which.
        losses: take turns, each on 1 and on 2 ranks.
        seed: of the damages.
        folder: for the runs; those that were lost or silent stay there.
    """
    shards = make_shards(folder / "shards")
    add_small_model(folder / "models")
    uninterrupted, stopped = Uninterrupted(shards, folder / "whole"), Stopped(shards, folder / "stopped")
    tally = Tally()
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        loss, ranks = losses[number // 2 % len(losses)], 1 + number % 2
        whole, base = uninterrupted(loss, ranks, *MORE), stopped(loss, ranks)
        logs = folder / f"{number:03d}-{loss}-{ranks}"
        shutil.copytree(base, logs / "run")
        damages = [rng.choice(DAMAGES) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        what = ", ".join(f"{damage.__name__} {damage(logs / 'run', rng)}" for damage in damages)
        before = contents(logs / "run")
        program = Program(arguments(shards, logs, loss, ranks, *MORE), ranks, logs / "output")
        outcome, words = judge(program, logs / "run", whole, before)
        tally.outcomes[outcome] += 1
        if len(damages) == 1:
            tally.by_damage.setdefault(damages[0].__name__, Counter())[outcome] += 1
        print(f"{logs.name}: {what}: {outcome} {words[:400]}", flush=True)
        if outcome in ("lost", "silent"):
            tally.reports.append(f"{outcome} {logs.name} ({what}; seed {seed}): {words}")
        else:
            shutil.rmtree(logs)
    return tally


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first, to repeat one")
    parser.add_argument("--losses", nargs="+", choices=list_losses(), metavar="LOSS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; those that were lost or silent stay there")
    parser.set_defaults(losses=["fastclip", "neuclip"])
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fork must not inherit the pool of threads
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        numbers = range(args.first, args.first + args.cases)
        tally = damage_many(numbers, args.losses, args.seed, args.folder or Path(temporary))
    for name, outcomes in sorted(tally.by_damage.items()):
        print(f"{name:<16} {dict(outcomes)}")
    for report in tally.reports:
        print(report)
    print(f"{args.cases} cases, seed {args.seed}: {summary(tally.outcomes)}; {time.perf_counter() - begin:.0f} s")
    return 1 if tally.outcomes["lost"] or tally.outcomes["silent"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
