"""The examples run as their page says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--samples", "200", "--epochs", "1"]
PAIRS = "unseen pairs: image to text 0."
# The command with which each trainer starts two processes, before and after the script.
LAUNCHERS = {
    "transformers_trainer.py": (["torch.distributed.run", "--nproc-per-node", "2"], []),
    "accelerate_loop.py": (["accelerate.commands.launch", "--cpu", "--num_processes", "2"], []),
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
def test_an_example_runs(name, tmp_path):
    assert RUNS[name][2] in _output_of(name, [], [], tmp_path)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_example_runs_in_two_processes(name, tmp_path):
    launcher, arguments = LAUNCHERS[name]
    output = _output_of(name, ["-m", *launcher] if launcher else [], arguments, tmp_path)
    assert output.count(RUNS[name][2]) == 1, output  # by the first process


def _output_of(name, before, after, folder):
    packages, arguments, _ = RUNS[name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, *before, str(EXAMPLES / name), *arguments, *after, "--output", str(folder / "output")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
