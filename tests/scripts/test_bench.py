"""The benchmark scripts run, and their tables and reports have all rows. The measured values are not checked."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest

from scripts.bench import growth
from tests.evaluation import datasets

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
    "remote": (
        "--shards 2 --samples 20 --image-bytes 2000 --latency 0.01 --counts 40",
        {
            "reading": {"pipe:curl", "streamed", "into --cache-dir", "from --cache-dir"},
            "counting": {"*_stats.json"},
        },
    ),
    "evaluation": (
        f"--model {datasets.TINY_MODEL} --scale 3000 --workers 1",
        {title: {"upstream", "ours"} for title in ("whole", "without loading the model", "seconds")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_benchmark_prints_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if name == "evaluation":
        datasets.tiny_checkpoint(tmp_path)  # also registers the tiny model
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


def test_growth_is_drawn_relative_to_the_first_size_with_a_cost(tmp_path: Path) -> None:
    table = {
        size: {"launches": 3, "MiB_sent": sent}
        for size, sent in (("1", 0.0), ("8", 2.0), ("64", 16.0), ("1,024", 256.0))
    }
    growth.draw({"ranks": {**table, "slope": {"launches": 0.0, "MiB_sent": 1.0}}}, tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text(encoding="utf-8")
    assert all(label in drawn for label in ("ranks", "launches, 0.0", "MiB sent, 1.0", "linear, 1.0"))
