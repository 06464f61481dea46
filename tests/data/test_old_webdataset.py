"""The loader with webdataset 0.2.86, the oldest version that is supported (OpenCLIP pins it)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.loading import build, indices
from tests.data.shards import write_shards, write_sizes

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.2.86"

# Local and piped shards, and validation data; prints the indices of an epoch.
PROGRAM = """
import sys, webdataset
assert webdataset.__version__ == sys.argv[2], webdataset.__version__
from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import build, indices, preprocess, tokenize
folder = sys.argv[1]
piped = f"pipe:cat {folder}/{{00000..00001}}.tar"
loaders = [build(f"{folder}/*.tar", workers=2), build(piped, workers=2)]
local, remote = (indices(list(loader.iterate(0))) for loader in loaders)
assert local == remote
for data in (f"{folder}/*.tar", piped):
    loader = build_eval_loader(DataSpec(data), preprocess=preprocess, tokenizer=tokenize, batch_size=16)
    assert [len(batch["image"]) for batch in loader] == [16, 9]
print(local)
"""


@pytest.mark.old_webdataset
def test_loader_with_old_webdataset(tmp_path: Path):
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*install, f"webdataset=={VERSION}"], check=True)
    write_shards(tmp_path / "data", [15, 10])
    write_sizes(tmp_path / "data", [15, 10])
    environment = os.environ | {"PYTHONPATH": f"{target}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), VERSION]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = indices(list(build(str(tmp_path / "data" / "*.tar"), workers=2).iterate(0)))
    assert result.stdout.strip() == str(expected)
