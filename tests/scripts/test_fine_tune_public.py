"""The comparison of released models runs with random weights of a small architecture, and does not repeat finished runs."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_ext.model_configs import add_model_configs
from tests.data.test_tables import picture

datasets = pytest.importorskip("datasets")
SCRIPT = Path(__file__).parents[2] / "scripts" / "experiments" / "fine_tune_public.sh"


def write_pairs(path: Path, first: int, pairs: int) -> None:
    path.parent.mkdir(exist_ok=True)
    numbers = range(first, first + pairs)
    rows = {"image": [picture(number) for number in numbers], "caption": [f"sample {number}" for number in numbers]}
    datasets.Dataset.from_dict(rows).to_parquet(path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_comparison_runs_with_random_weights(tmp_path):
    add_model_configs()
    torch.save(open_clip.create_model("demo-vit").state_dict(), tmp_path / "weights.pt")
    for name, first, pairs in (("own/train", 0, 24), ("own/val", 40, 12), ("general", 60, 240), ("kept", 400, 12)):
        write_pairs(tmp_path / f"{name}.parquet", first, pairs)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "openclip-ext"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m openclip_ext "$@" --device cpu\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "MODELS": "demo-vit:weights.pt",
        "SETS": "own",
        "LOSSES": "default",
        "RATES": "1e-4",
        "SEEDS": "0",
        "KEPT": "--tasks kept.parquet",
        "FLAGS": "--epochs 1 --batch-size 8 --workers 0 --precision fp32",
    }
    command = ["bash", str(SCRIPT)]
    first, second = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    (curve,) = (tmp_path / "curves").iterdir()
    rows = [line.split()[0] for line in curve.read_text().splitlines() if line[:1].isdigit()]
    assert rows == ["0", "0.25", "0.5", "0.75", "1"] and "kept" in curve.read_text()
    assert "<- chosen" in first.stdout + first.stderr
    assert second.returncode == 0 and "<- chosen" not in second.stdout + second.stderr
