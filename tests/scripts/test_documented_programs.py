"""Each program of scripts/, examples/ and eval/ that a page names starts from a clone's root, without PYTHONPATH."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)]
PROGRAM = re.compile(r"python (-m (?:scripts|eval)\.[\w.]*\w|(?:scripts|examples)/[\w/]+\.py)")
PROGRAMS = sorted({program for page in PAGES for program in PROGRAM.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_documented_program_starts(program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *program.split(), "--help"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "usage:" in ran.stdout
