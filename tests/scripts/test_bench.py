"""The benchmark scripts run, and their tables and reports have all rows. The measured values are not checked."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest

CASES = {
    "losses": ("--batch-sizes 8 --embed-dim 4 --losses fastclip neuclip", {"8": {"ClipLoss", "fastclip", "neuclip"}}),
    "launches": ("--losses openclip", {"": {"openclip"}}),
    "npn": (
        "--batch-size 4 --prototypes 6 --embed-dim 4 --updates 2",
        {"": {"matrix products", "closed form", "autograd"}},
    ),
    "step": (
        "--batch-size 4 --steps 1 --losses neuclip --prototypes 8 --captions cc3m --script",
        {"": {"open_clip_train", "openclip", "neuclip", "floor"}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_benchmark_prints_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    flags, rows = CASES[name]
    options = [*flags.split(), "--rounds", "1", "--device", "cpu", "--output", str(tmp_path / "results.json")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    level = logging.root.level
    runpy.run_module(f"scripts.bench.{name}", run_name="__main__", alter_sys=True)
    logging.root.setLevel(level)  # benchmarks change the level; setLevel() also clears the loggers' caches
    report, printed = json.loads((tmp_path / "results.json").read_text()), capsys.readouterr().out
    assert {"settings", "hardware", "versions", "load", "baseline"} <= report.keys()
    tables = report["results"]
    assert {title: set(table) for title, table in tables.items()} == rows
    for title, table in tables.items():
        assert title in printed
        for row, numbers in table.items():
            assert row in printed
            assert numbers.get("ratio_min", 0) <= numbers.get("ratio", 1) <= numbers.get("ratio_max", 1)
