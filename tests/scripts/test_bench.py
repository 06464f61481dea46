"""The benchmarks run, and their tables and reports have a row for everything; what they measure is not looked at."""

import json
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.eval import datasets

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
CASES = {
    "losses": "--batch-sizes 8 --embed-dim 4 --losses fastclip neuclip",
    "npn": "--batch-size 4 --prototypes 6 --embed-dim 4 --updates 2",
    "step": "--batch-size 4 --steps 1 --losses neuclip --prototypes 8",
    "remote": "--shards 2 --samples 20 --image-bytes 2000 --latency 0.01 --counts 40",
    "evaluation": f"--model {datasets.TINY_MODEL} --scale 3000 --workers 1",
}
ROWS = {
    "losses": {"8": {"ClipLoss", "fastclip", "neuclip"}},
    "npn": {"": {"matrix products", "closed form", "autograd"}},
    "step": {"": {"openclip", "neuclip"}},
    "remote": {
        "reading": {"pipe:curl", "streamed", "into --cache-dir", "from --cache-dir"},
        "counting": {"*_stats.json"},
    },
    "evaluation": {title: {"upstream", "ours"} for title in ("whole", "without loading the model", "seconds")},
}


@pytest.mark.parametrize("name", CASES)
def test_benchmark_prints_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if name == "evaluation":
        datasets.tiny_checkpoint(tmp_path)  # makes the tiny model's configuration known
    monkeypatch.syspath_prepend(str(BENCH))
    options = [*CASES[name].split(), "--rounds", "1", "--device", "cpu", "--output", str(tmp_path / "results.json")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    level = logging.root.level
    runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    logging.root.setLevel(level)  # A benchmark silences the libraries. Only setLevel() clears the loggers' caches.
    report, printed = json.loads((tmp_path / "results.json").read_text()), capsys.readouterr().out
    assert {"settings", "hardware", "versions", "load", "baseline"} <= report.keys()
    tables = report["results"]
    assert {title: set(table) for title, table in tables.items()} == ROWS[name]
    for title, table in tables.items():
        assert title in printed
        for row, numbers in table.items():
            assert row in printed
            assert numbers.get("ratio_min", 0) <= numbers.get("ratio", 1) <= numbers.get("ratio_max", 1)


def test_a_part_of_a_gpu_day_that_fails_stops_no_other(tmp_path: Path) -> None:
    """``npn`` takes no such device, ``step-rn50`` no second at all."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *npn*) exit 3 ;; *step*) sleep 60 ;; *) echo "$@" ;; esac\n')
    python.chmod(0o755)
    command = ["bash", str(BENCH / "gpu.sh"), str(tmp_path / "out"), "npn", "step-rn50", "tests", "losses"]
    environment = {**os.environ, "PYTHON": str(python), "PART_SECONDS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "failed or too slow: npn step-rn50"
    assert "--output" in (tmp_path / "out" / "losses.log").read_text()
    tests = (tmp_path / "out" / "tests.log").read_text()
    assert "-m gpu" in tests and "tests/losses/test_precision.py" in tests and "test_recipes" not in tests
