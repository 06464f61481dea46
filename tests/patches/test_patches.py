"""The patches apply to OpenCLIP's source code, and the patched training script works as documented."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openclip_ext import model_configs
from tests.data.shards import image_bytes, write_sizes, write_tar

PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))
PATCHED_VERSION = "3.3.0"
SHARDS, PER_SHARD = 4, 6

# A plugin that registers a loss. The loss records the indices that it receives in a run.
PLUGIN = """
import open_clip
import openclip_ext

seen = {}

def create(args):
    width = open_clip.get_model_config(args.model)["embed_dim"]
    loss = openclip_ext.create_loss("fastclip", embed_dim=width, num_samples=args.num_indices, epochs=args.epochs)
    calls = seen[args.name] = []
    loss.register_forward_pre_hook(lambda _, __, given: calls.append(given["index"].tolist()), with_kwargs=True)
    return loss

open_clip.register_loss("noted", create, needs_index=True)
"""

# A program that runs OpenCLIP's training script with each command line, and records the loss's indices or the error.
DRIVER = """
import json, sys
import open_clip
from open_clip_train.main import main

report = {"open_clip": open_clip.__file__}
for name, argv in json.load(open("commands.json")).items():
    try:
        main(argv)
    except ValueError as error:
        report[name] = str(error)
json.dump(sys.modules["losses_plugin"].seen | report, open("report.json", "w"))
"""

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("open_clip_torch") != PATCHED_VERSION,
    reason=f"the patches are for open_clip_torch {PATCHED_VERSION}",
)


def copy_of_openclip(folder):
    for package in ("open_clip", "open_clip_train"):
        source = Path(importlib.util.find_spec(package).origin).parent
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def apply(patch, tree):
    command = ["patch", "-p1", "--fuzz=0", "--input", patch] if shutil.which("patch") else ["git", "apply", patch]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    tree = copy_of_openclip(tmp_path_factory.mktemp("source"))
    for patch in PATCHES:
        apply(patch, tree)
    shutil.copy(Path(model_configs.__file__).with_name("demo-vit.json"), tree / "open_clip" / "model_configs")
    return tree


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Return a folder with shards, their sizes.json, and a CSV file of the same data. Each caption is the sample's index."""
    folder = tmp_path_factory.mktemp("shards")
    png = image_bytes(0, 16, "PNG")
    (folder / "image.png").write_bytes(png)
    for shard in range(SHARDS):
        members = []
        for position in range(PER_SHARD):
            # As in LAION-400M, the last key of a shard is also the first key of the next shard.
            key = f"{shard * (PER_SHARD - 1) + position:03d}"
            members += [(f"{key}.png", png), (f"{key}.txt", str(shard * PER_SHARD + position).encode())]
        write_tar(folder / f"{shard:05d}.tar", members)
    write_sizes(folder, [PER_SHARD] * SHARDS)
    rows = [f"{folder / 'image.png'}\t{index}" for index in range(SHARDS * PER_SHARD)]
    (folder / "pairs.csv").write_text("\n".join(["filepath\ttitle", *rows]))
    return folder


def test_each_patch_but_the_index_applies_alone(tmp_path):
    for patch in PATCHES:
        if not patch.name.startswith("0003"):
            apply(patch, copy_of_openclip(tmp_path / patch.name))


def test_every_sample_comes_with_its_own_index(patched, dataset):
    data = runpy.run_path(str(patched / "open_clip_train" / "data.py"))
    shards = str(dataset / f"{{00000..{SHARDS - 1:05d}}}.tar")
    settings = {"train_num_samples": None, "train_data_upsampling_factors": None, "seed": 0, "world_size": 1}
    args = argparse.Namespace(train_data=shards, batch_size=PER_SHARD, workers=0, needs_index=True, **settings)
    transforms = {"preprocess_img": lambda image: torch.zeros(3), "tokenizer": lambda text: torch.tensor([[int(text)]])}
    info = data["get_wds_dataset"](args, is_train=True, **transforms)
    assert args.num_indices == SHARDS * PER_SHARD
    for epoch in range(2):
        info.set_epoch(epoch)
        batches = [(text.flatten().tolist(), index.tolist()) for _, text, index in info.dataloader]
        assert all(captions == indices for captions, indices in batches)
        assert sorted(index for _, indices in batches for index in indices) == list(range(SHARDS * PER_SHARD))


@pytest.fixture(scope="module")
def report(patched, dataset, tmp_path_factory):
    """Run OpenCLIP's script with several command lines, one after another in one process; return the results by name."""
    folder = tmp_path_factory.mktemp("runs")
    shards = ["--train-data", str(dataset / f"{{00000..{SHARDS - 1:05d}}}.tar"), "--dataset-type", "webdataset"]
    table = ["--train-data", str(dataset / "pairs.csv"), "--dataset-type", "csv"]
    common = f"--model demo-vit --precision fp32 --device cpu --batch-size {PER_SHARD} --workers 0 --epochs 2 --lr 1e-3"
    ours = ["--loss", "noted", "--loss-plugin", "losses_plugin"]
    commands = {
        "openclip": shards,
        "shards": [*shards, *ours],
        "csv": [*table, *ours],
        "accumulated": [*shards, *ours, "--accum-freq", "2"],
        "unknown": [*shards, "--loss", "notd"],
    }
    run = ["--warmup", "2", "--logs", str(folder), "--name"]
    commands = {name: [*argv, *common.split(), *run, name] for name, argv in commands.items()}
    (folder / "losses_plugin.py").write_text(PLUGIN)
    (folder / "driver.py").write_text(DRIVER)
    (folder / "commands.json").write_text(json.dumps(commands))
    environment = {**os.environ, "PYTHONPATH": f"{patched}:{Path(__file__).parents[2]}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "driver.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((folder / "report.json").read_text())
    assert Path(result["open_clip"]).is_relative_to(patched)
    return {**result, "folder": folder}


@pytest.mark.parametrize("data", ["shards", "csv"])
def test_openclips_script_trains_a_registered_loss_with_the_index(report, data):
    assert len(report[data]) == 2 * SHARDS
    for epoch in (report[data][:SHARDS], report[data][SHARDS:]):
        assert sorted(index for batch in epoch for index in batch) == list(range(SHARDS * PER_SHARD))
    checkpoint = torch.load(report["folder"] / data / "checkpoints" / "epoch_2.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())


def test_without_the_new_flags_openclips_own_loss_trains_and_wrong_ones_are_refused(report):
    assert (report["folder"] / "openclip" / "checkpoints" / "epoch_2.pt").exists()
    assert "keeps state" in report["accumulated"]
    assert report["unknown"] == "Unknown loss 'notd'. Registered: ['noted']. Is --loss-plugin missing?"
