"""The benchmarks run, and their tables and reports have a row for everything; what they measure is not looked at."""

import argparse
import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openclip_ext.training import guard
from tests.eval import datasets
from tests.training.tiny import TinyTraining, Way

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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes the configuration of the tiny model known."""
    datasets.tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Iterator[Any]:
    """A function that runs a benchmark and returns its report and what it printed."""
    monkeypatch.syspath_prepend(str(BENCH))
    level = logging.root.level

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
        output = tmp_path / "results.json"
        argv = [f"{name}.py", *arguments, "--rounds", "1", "--device", "cpu", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
        report = json.loads(output.read_text())
        assert {"settings", "hardware", "versions", "load"} <= report.keys()
        return report, capsys.readouterr().out

    yield run
    logging.root.setLevel(level)  # A benchmark silences the libraries. Only setLevel() clears the loggers' caches.


@pytest.mark.parametrize("name", CASES)
def test_benchmark_prints_and_writes_its_rows(name: str, run_benchmark: Any, tiny_model: None) -> None:
    report, printed = run_benchmark(name, *CASES[name].split())
    tables = report["results"]
    assert {title: set(table) for title, table in tables.items()} == ROWS[name]
    assert "baseline" in report
    for title, table in tables.items():
        assert title in printed
        for row, numbers in table.items():
            assert row in printed
            assert numbers.get("ratio_min", 0) <= numbers.get("ratio", 1) <= numbers.get("ratio_max", 1)


def test_both_ways_of_fitting_prototypes_end_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    npn = runpy.run_path(str(BENCH / "npn.py"))
    args = argparse.Namespace(batch_size=6, prototypes=5, embed_dim=4, updates=3, device="cpu")
    # In float64: AdaGrad's first step is the gradient's sign.
    contrast, normalizer = npn["make_contrast"](args, torch.float64), npn["make_normalizer"](args).double()
    normalizer.prototypes.copy_(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)))
    plain = torch.nn.Parameter(normalizer.prototypes.clone())
    normalizer.fit(contrast)
    npn["autograd"](plain, torch.optim.Adagrad([plain], lr=1.0), contrast, args.updates)
    torch.testing.assert_close(normalizer.prototypes, plain.detach(), rtol=1e-8, atol=1e-8)


def test_a_step_is_timed_with_the_guards_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts that nobody looks at pile up, and no step waits for an earlier one as in a training."""
    monkeypatch.syspath_prepend(str(BENCH))
    training = TinyTraining("openclip", Way())
    runpy.run_path(str(BENCH / "step.py"))["run"](training.step, [training.batch(number) for number in range(5)])
    assert len(training.step.guard._pending) <= guard.LAG


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
