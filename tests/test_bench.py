"""The benchmarks run, and their tables and reports have a row for everything; what they measure is not looked at."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
CASES = {
    "losses": ["--batch-sizes", "8", "--embed-dim", "4", "--rounds", "1", "--losses", "fastclip", "neuclip"],
    "npn": ["--batch-size", "4", "--prototypes", "6", "--embed-dim", "4", "--updates", "2", "--rounds", "1"],
    "step": ["--batch-size", "4", "--steps", "1", "--rounds", "1", "--losses", "neuclip", "--prototypes", "8"],
    "state_table": [
        "--batch-size",
        "8",
        "--batches",
        "1",
        "--rounds",
        "1",
        "--dense",
        "1000",
        "--checkpoint-rounds",
        "1",
    ],
}
ROWS = {
    "losses": {"8": {"ClipLoss", "fastclip", "neuclip"}},
    "npn": {"matrix products", "closed form", "autograd"},
    "step": {"openclip", "neuclip"},
    "state_table": {"lookups": {"1e+04", "1e+06", "1e+08"}, "checkpoints": {"write", "restore"}},
}
# Operations of a step at most, on a CPU and on other devices; what docs/performance.md says, and some more.
MOST_OPERATIONS = {
    "fastclip": (135, 149),
    "sogclr": (110, 130),
    "isogclr": (160, 195),
    "tempnet": (235, 255),
    "amorlip": (150, 150),
    "queueclip": (190, 190),
    "neuclip": (450, 475),
}


@pytest.mark.parametrize("name", CASES)
def test_benchmark_prints_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "results.json"
    monkeypatch.syspath_prepend(str(BENCH))
    more = ["--folder", str(tmp_path)] if name == "state_table" else ["--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *CASES[name], *more, "--output", str(output)])
    runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    report = json.loads(output.read_text())
    printed = capsys.readouterr().out
    assert {"baseline", "settings", "hardware", "versions", "load"} <= report.keys()
    tables = {"": report["results"]} if isinstance(ROWS[name], set) else report["results"]
    expected = {"": ROWS[name]} if isinstance(ROWS[name], set) else ROWS[name]
    assert {key: set(table) for key, table in tables.items()} == expected
    for table in tables.values():
        for row, numbers in table.items():
            assert row in printed
            assert numbers["ratio_min"] <= numbers["ratio"] <= numbers["ratio_max"]


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


def test_a_step_consists_of_few_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "results.json"
    monkeypatch.syspath_prepend(str(BENCH))
    argv = ["kernels.py", "--losses", *MOST_OPERATIONS, "--prototypes", "128", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(BENCH / "kernels.py"), run_name="__main__")
    report, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert {"settings", "hardware", "versions"} <= report.keys()
    for name, most in MOST_OPERATIONS.items():
        found = report["results"][name]
        assert name in printed
        assert (found["cpu"] <= most[0], found["meta"] <= most[1]) == (True, True), (name, found)
