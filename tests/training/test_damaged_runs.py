"""Resume runs with damaged checkpoints and logs: every loss of data must be reported.

Each case copies a run that was stopped mid-epoch and has three checkpoints (``epoch_1``, ``epoch_latest``,
``epoch_1_step_8``). It damages the copy in one to three ways and resumes it. Two results are correct:

- The finished run equals the uninterrupted run bit for bit. Skipped checkpoints are reported and kept. A damaged log may lack
  lines, but only if the program reports this.
- The program exits with a message that names the checkpoints, and leaves the files of the run unchanged.

A changed digit in a log cannot be detected. The cases therefore only truncate a log's last line or append to it.
"""

import io
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.soak import SoakCase
from tests.training.programs import LOGS, Program, Runs, differing, lines_of
from tests.training.runs import SMALL_MODEL, contents

NEWEST = "epoch_1_step_8"
CHECKPOINTS = ("epoch_1", "epoch_latest", NEWEST)
LOSSES = ("fastclip", "neuclip")
# Every launch writes these files, even if it then rejects the run.
ALWAYS_WRITTEN = {"out.log", ".lock", ".owner"}
FOREIGN = ([1, 2, 3], torch.ones(3), {"state_dict": {}}, {"epoch": 9}, {"epoch": 9, "state_dict": {}}, "text", None)

Damage = Callable[[Path, random.Random], object]


def parts(run_folder: Path, name: str) -> list[Path]:
    """Return all existing files of a checkpoint: its model file and its state files."""
    checkpoints = run_folder / "checkpoints"
    candidates = [checkpoints / f"{name}.pt", *sorted((checkpoints / f"{name}.state").glob("*/*"))]
    return [path for path in candidates if path.is_file()]


def one_file(run_folder: Path, rng: random.Random) -> Path:
    """Return a random file of a random checkpoint, with probability 2/3 of the newest checkpoint."""
    files = parts(run_folder, rng.choice((*CHECKPOINTS, NEWEST, NEWEST, NEWEST)))
    return rng.choice(files) if files else run_folder / "metrics.jsonl"


# --- kinds of damage --------------------------------------------------------------------------------------------------


def flip(content: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(content)
    for position in rng.sample(range(len(flipped)), min(rng.choice((1, 8, 64)), len(flipped))):
        flipped[position] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def zeros(content: bytes, rng: random.Random) -> bytes:
    """Replace a range by zeros, like blocks that never reached the disk before a crash."""
    begin = rng.randrange(len(content) or 1)
    length = min(rng.choice((64, 4096, len(content))), len(content) - begin)
    return content[:begin] + bytes(length) + content[begin + length :]


REWRITES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    flip,
    lambda content, rng: content[: rng.randrange(len(content) or 1)],
    lambda content, rng: content[: rng.randrange(len(content) or 1)],
    lambda content, rng: b"",
    zeros,
    lambda content, rng: rng.randbytes(rng.choice((1, 1000, 100_000))),
)


def rewrite(run_folder: Path, rng: random.Random) -> None:
    path = one_file(run_folder, rng)
    path.write_bytes(rng.choice(REWRITES)(path.read_bytes(), rng))


def delete(run_folder: Path, rng: random.Random) -> None:
    one_file(run_folder, rng).unlink()


def delete_state(run_folder: Path, rng: random.Random) -> None:
    shutil.rmtree(run_folder / "checkpoints" / f"{rng.choice(CHECKPOINTS)}.state", ignore_errors=True)


def foreign_file(run_folder: Path, rng: random.Random) -> None:
    """Save content that is not a checkpoint of this run, under a new or an existing checkpoint name."""
    name = rng.choice(("epoch_9", "epoch_1_step_9", "epoch_2", *CHECKPOINTS))
    content = io.BytesIO()
    torch.save(rng.choice(FOREIGN), content)
    found = rng.choice((content.getvalue(), content.getvalue(), content.getvalue(), b"not a checkpoint"))
    (run_folder / "checkpoints" / f"{name}.pt").write_bytes(found)


def tear_log(run_folder: Path, rng: random.Random) -> None:
    """Truncate the last line of a log, or append half a line, bytes that are not text, or an invalid record."""
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


def swap(run_folder: Path, rng: random.Random) -> None:
    """Swap the contents of two checkpoint files, usually files with the same name from different checkpoints."""
    first = one_file(run_folder, rng)
    others = [path for name in CHECKPOINTS for path in parts(run_folder, name)]
    alike = [path for path in others if path.name == first.name and path != first]
    second = rng.choice(alike if alike and rng.random() < 0.7 else others)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def rename(run_folder: Path, rng: random.Random) -> None:
    """Rename a model file, a state folder or a file of a state folder."""
    name = rng.choice((*CHECKPOINTS, NEWEST, NEWEST))
    state = run_folder / "checkpoints" / f"{name}.state"
    candidates = parts(run_folder, name) + ([state] if state.exists() else [])
    if candidates:
        path = rng.choice(candidates)
        target = path.with_name(f"{rng.choice(('epoch_3', 'epoch_1_step_9', 'epoch_1_step_6', 'kept'))}{path.suffix}")
        if not target.exists():
            path.rename(target)


def copy(run_folder: Path, rng: random.Random) -> None:
    """Copy the model file and the state folder of a checkpoint to another checkpoint name."""
    name, other = rng.choice(CHECKPOINTS), rng.choice(("epoch_3", "epoch_1_step_9", "epoch_0"))
    checkpoints = run_folder / "checkpoints"
    for suffix, duplicate in ((".pt", shutil.copy), (".state", shutil.copytree)):
        if (checkpoints / f"{name}{suffix}").exists() and not (checkpoints / f"{other}{suffix}").exists():
            duplicate(checkpoints / f"{name}{suffix}", checkpoints / f"{other}{suffix}")


def damage_all(run_folder: Path, rng: random.Random) -> None:
    """Remove the last byte of one file of every checkpoint."""
    for name in CHECKPOINTS:
        path = rng.choice(parts(run_folder, name))
        path.write_bytes(path.read_bytes()[:-1])


def damage_settings(run_folder: Path, rng: random.Random) -> None:
    name = rng.choice(("config.json", "params.txt", "out.log", ".owner", ".lock"))
    (run_folder / name).write_bytes(rng.randbytes(100))


# Each case draws its kinds of damage from this list. The repetitions make some kinds more frequent.
DAMAGES: tuple[Damage, ...] = (
    *7 * (rewrite,),
    *2 * (delete,),
    delete_state,
    *2 * (foreign_file,),
    *2 * (tear_log,),
    *2 * (swap,),
    *2 * (rename,),
    copy,
    damage_all,
    damage_settings,
)


# --- results ----------------------------------------------------------------------------------------------------------


def check_refusal(message: str | None, text: str, before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert message is not None, text[-2000:]
    assert "checkpoints" in message
    changed = [file for file in before if file not in ALWAYS_WRITTEN and after.get(file) != before[file]]
    assert changed == [], message


def check_end(run_folder: Path, whole: Path, text: str, before: dict[str, bytes], after: dict[str, bytes]) -> None:
    differs = differing(run_folder, whole)
    assert [item for item in differs if item not in LOGS or not is_said(item, text, run_folder, whole)] == []
    passed_over = re.findall(r"Checkpoint skipped: .*?checkpoints/(epoch_\w+)\.(?:pt|state)", text)
    if not passed_over and f"checkpoints/{NEWEST}.pt" in before:
        resumed = re.search(r"Resuming from .*/(epoch_\w+)\.pt", text)
        assert resumed is not None and resumed[1] in (NEWEST, "epoch_1_step_9", "epoch_3"), f"no report on {NEWEST}"
    unreadable = re.compile(rf"checkpoints/({'|'.join(passed_over) or '-'})\.(pt|state)(/|$)")
    gone = [file for file, content in before.items() if unreadable.match(file) and content not in after.values()]
    assert gone == [], f"{passed_over} were skipped, and then overwritten"


def is_said(log: str, text: str, run_folder: Path, whole: Path) -> bool:
    """Return whether the remaining lines of a log are correct, and a warning contains the log's name."""
    remaining = iter(lines_of(whole / log))
    others_are_right = all(line in remaining for line in lines_of(run_folder / log))
    return others_are_right and any("WARNING" in line and Path(log).name in line for line in text.splitlines())


@pytest.mark.soak(4)
def test_damaged_runs_go_on_or_are_refused(soak_case: SoakCase, runs: Runs, tmp_path: Path) -> None:
    rng = soak_case.random()
    loss, ranks = LOSSES[soak_case.number // 4 % len(LOSSES)], 1 + soak_case.number % 2
    more = ("--save-most-recent", "--model", SMALL_MODEL)
    whole, run_folder = runs.uninterrupted(loss, ranks, *more), tmp_path / "run"
    shutil.copytree(runs.stopped(loss, ranks, *more), run_folder)
    damages = [rng.choice(DAMAGES) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for damage in damages:
        damage(run_folder, rng)
    print([damage.__name__ for damage in damages])
    before = contents(run_folder)
    program = Program(runs.argv(tmp_path, loss, ranks, *more), ranks, tmp_path / "output")
    if any(program.wait()):
        check_refusal(program.message(), program.text(), before, contents(run_folder))
    else:
        check_end(run_folder, whole, program.text(), before, contents(run_folder))
