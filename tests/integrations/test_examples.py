"""The examples run as their page says."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--samples", "200", "--epochs", "1"]
PAIRS = "unseen pairs: image to text 0."
# The command with which each trainer starts two processes, before and after the script.
LAUNCHERS = {
    "transformers_trainer.py": (["-m", "torch.distributed.run", "--nproc-per-node", "2"], []),
    "accelerate_loop.py": (["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"], []),
    "lightning_module.py": ([], ["--devices", "2"]),
}
# Script -> what it imports, arguments, and what it prints at the end.
RUNS = {
    "transformers_trainer.py": (["transformers", "accelerate"], SMALL, PAIRS),
    "lightning_module.py": (["lightning"], SMALL, PAIRS),
    "accelerate_loop.py": (["accelerate"], SMALL, PAIRS),
    "sentence_transformers_docstrings.py": (
        ["sentence_transformers", "datasets"],
        ["--packages", "PIL", "--epochs", "1", "--batch", "32"],
        '"split": "test"',
    ),
}


def test_every_example_is_run():
    programs = {path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert programs == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    _import_packages(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *RUNS[name][1], "--output", "output"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert RUNS[name][2] in capsys.readouterr().out


@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_example_runs_in_two_processes(name, tmp_path):
    _import_packages(name)
    launcher, arguments = LAUNCHERS[name]
    command = [sys.executable, *launcher, str(EXAMPLES / name), *SMALL, *arguments, "--output", "output"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(PAIRS) == 1, result.stdout  # by the first process


def _import_packages(name):
    for package in RUNS[name][0]:
        pytest.importorskip(package)
