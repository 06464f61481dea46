"""scripts/faults: a few of the kills and damages that are run by the hundred by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def last_line(module: str, *arguments: str) -> str:
    """What the program says in the end; it forks, and does so from a process without pytest's threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", f"scripts.faults.{module}", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_killed_runs_survive():
    line = last_line("kill_runs", "--kills", "4", "--under-torchrun", "0", "--per-run", "2", "--losses", "fastclip")
    assert line.startswith("4 kills, seed 0: 4 survived, 0 refused, 0 lost, 0 silent;")


def test_damaged_runs_survive_or_are_refused():
    line = last_line("damage_checkpoints", "--cases", "4", "--losses", "fastclip", "--seed", "1")
    survived, refused = re.match(r"4 cases, seed 1: (\d) survived, (\d) refused, 0 lost, 0 silent;", line).groups()
    assert int(survived) + int(refused) == 4
