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
    packages, arguments, shown = RUNS[name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, str(EXAMPLES / name), *arguments, "--output", str(tmp_path / "output")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout
