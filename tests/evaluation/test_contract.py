"""What users rely on, through the commands: a killed evaluation continues, readers write nothing, every command starts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.evaluation import datasets

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "beyond",
    "datacomp",
    "download",
    "report",
    "shapes",
    "cliplite.editing",
    "cliplite.grounding",
    "cliplite.probes",
)


def start(module: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PROGRAM = """
import contextlib, runpy, sys
for name in sys.argv[1:]:
    sys.argv = ["", *(["eval"] if name == "beyond" else []), "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(f"eval.{name}", run_name="__main__")
"""


def test_every_command_of_a_clone_starts():
    shown = subprocess.run([sys.executable, "-c", PROGRAM, *COMMANDS], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("usage:") == len(COMMANDS)


def test_a_killed_evaluation_continues_and_the_report_writes_nothing_there(tiny_folder, tmp_path):
    for key in ("mnist", "cifar10", "sun397"):
        datasets.make_task(tmp_path / "data", key, count=1500 if key == "sun397" else 12)
    results = tmp_path / "out" / "eval_results.jsonl"
    model = ["--model", datasets.TINY_MODEL, "--checkpoint", str(tiny_folder / "epoch_1.pt")]
    model += ["--model-config", str(tiny_folder / f"{datasets.TINY_MODEL}.json"), "--device", "cpu", "--workers", "0"]
    data = ["--data-dir", str(tmp_path / "data"), "--tasks", "mnist", "cifar10", "sun397", "--allow-size-mismatch"]
    arguments = [*model, *data, "--output-dir", str(results.parent)]
    killed = start("eval.datacomp", *arguments, "--batch-size", "2")  # the last task takes seconds
    while not results.is_file() or results.read_text().count("\n") < 2:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    before = {line["key"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert before.keys() == {"mnist", "cifar10"}
    process = start("openclip_ext", "evaluate", *arguments)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "2 of 3 tasks already have results" in errors
    after = {line["key"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert after.keys() == {*before, "sun397"} and {key: after[key] for key in before} == before
    stored = contents(results.parent)
    process = start("openclip_ext", "report", str(results.parent), "--output", str(tmp_path / "report"))
    assert process.wait() == 0 and "MNIST" in (tmp_path / "report" / "report.md").read_text()
    assert contents(results.parent) == stored
