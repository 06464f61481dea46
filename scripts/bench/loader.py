"""Samples per second of our training loader over those of OpenCLIP's, on the same shards in one run.

    python scripts/bench/loader.py [--output results.json]

OpenCLIP 3.3's loader runs with webdataset 0.2.86, the last version it works with, which is installed next to the
environment (``pip install --target``) and put on the path of the subprocesses that measure it. It and ours, with either
image backend, get the same transform, tokenizer, batch size and workers. Ours gives uint8, which the training normalizes on
its device. Each measurement is a new process that reads an epoch to warm up and times the next one; the loaders take turns,
and the ratio is the median over the rounds. On a busy machine, ``--workers 0 --cpu-time`` compares samples per second of
processor time instead, which other work hardly disturbs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import harness
import numpy as np

OLD_WEBDATASET = "0.2.86"
BASELINE = "openclip"
SIDES = (BASELINE, "pil", "torchvision")
# Width and height of the images in pixels, the size of the model's input, and how many times the samples of the largest.
SETS = {"500x375": (500, 375, 224, 2), "1024x768": (1024, 768, 224, 1), "32x32": (32, 32, 32, 12)}
PHOTOS = ("500x375", "1024x768")
# The first argument of the subprocesses.
_MEASURE = "measure-side"
# Different images of a set, which recur: making one takes longer than reading it.
IMAGES = 40
WORDS = (
    "a photo of the old red house near river with two dogs and small boat under blue sky vintage poster black white "
    "woman holding coffee cup street market city night lights mountain view stock image wooden table"
)


def write_shards(folder: Path, name: str, shards: int, samples: int) -> str:
    """Write shards as img2dataset does (jpg, json, txt); return their brace notation."""
    width, height, _, _ = SETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(width)
    images = [harness.photograph(rng, width, height) for _ in range(IMAGES)]
    for shard in range(shards):
        content = {}
        for number in range(samples):
            caption = " ".join(rng.choice(WORDS.split(), 12))
            meta = json.dumps({"caption": caption, "url": "https://example.org/" + "x" * 60, "status": "success"})
            fields = {"jpg": images[number % IMAGES], "json": meta.encode(), "txt": caption.encode()}
            content[f"{shard:05d}{number:04d}"] = fields
        harness.write_shard(folder / f"{shard:05d}.tar", content)
    return str(folder / f"{{00000..{shards - 1:05d}}}.tar")


def install_webdataset(folder: Path) -> Path:
    """Install the old webdataset next to the environment."""
    target = folder / f"webdataset-{OLD_WEBDATASET}"
    if not (target / "webdataset").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*command, f"webdataset=={OLD_WEBDATASET}"], check=True)
    return target


def time_epoch(batches: Iterable, key: str | int, clock: Callable[[], float]) -> float:
    """Samples per second of one pass."""
    start, samples = clock(), 0
    for batch in batches:
        samples += len(batch[key])
    return samples / (clock() - start)


def measure_side(
    side: str, size: int, shards: str, num_samples: int, batch_size: int, workers: int, cpu_time: bool
) -> None:
    """Print the samples per second of one side (in a subprocess of its own)."""
    import open_clip
    import webdataset

    preprocess = open_clip.image_transform(size, is_train=True)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    if side == BASELINE:
        from open_clip_train.data import get_wds_dataset

        assert webdataset.__version__ == OLD_WEBDATASET, webdataset.__version__
        settings = argparse.Namespace(
            train_data=shards,
            batch_size=batch_size,
            workers=workers,
            seed=0,
            world_size=1,
            train_num_samples=num_samples,
            train_data_upsampling_factors=None,
            dataset_resampled=False,
        )
        data = get_wds_dataset(settings, preprocess, is_train=True, tokenizer=tokenizer)
        epochs, key = [data.dataloader, data.dataloader], 0
    else:
        from openclip_ext.data.build import build_train_loader
        from openclip_ext.data.images import image_pipeline
        from openclip_ext.data.spec import DataSpec
        from openclip_ext.data.train_loader import TrainLoaderConfig

        config = TrainLoaderConfig(batch_size=batch_size, workers=workers)
        images = image_pipeline(preprocess, side)
        loader = build_train_loader(
            DataSpec(shards), config, preprocess=images.transform, tokenizer=tokenizer, decoder=images.decode
        )
        epochs, key = [loader.iterate(0), loader.iterate(1)], "image"
    clock = time.process_time if cpu_time else time.perf_counter
    rates = [time_epoch(epoch, key, clock) for epoch in epochs]
    print(rates[-1])


def run_side(args: argparse.Namespace, side: str, name: str, shards: str, num_samples: int, old: Path) -> float:
    """Return the samples per second of one side, measured in a new process."""
    root = str(Path(__file__).resolve().parents[2])
    path = [str(old), root] if side == BASELINE else [root]
    job = {"side": side, "size": SETS[name][2], "shards": shards, "num_samples": num_samples}
    job |= {"batch_size": args.batch_size, "workers": args.workers, "cpu_time": args.cpu_time}
    command = [sys.executable, __file__, _MEASURE, json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def compare(args: argparse.Namespace, name: str, folder: Path, old: Path) -> harness.Table:
    """Measure all sides in turn on one set."""
    samples = args.samples_per_shard * SETS[name][3]
    shards = write_shards(folder / name, name, args.num_shards, samples)
    rounds = []
    for _ in range(args.repeats):
        rates = {side: run_side(args, side, name, shards, samples * args.num_shards, old) for side in SIDES}
        print(name, ", ".join(f"{side} {rate:.1f} samples/s" for side, rate in rates.items()), flush=True)
        rounds.append(rates)
    ratios = harness.compared(rounds, BASELINE)
    return {
        side: {"samples_per_second": statistics.median(rates[side] for rates in rounds), **ratios[side]}
        for side in SIDES
    }


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    if args.cpu_time and args.workers:
        raise SystemExit(f"--cpu-time counts the time of one process: expected --workers 0, got {args.workers}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        old = install_webdataset(folder)
        return {name: compare(args, name, folder, old) for name in args.sets}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=SETS, default=PHOTOS)
    parser.add_argument("--num-shards", type=int, default=4)
    parser.add_argument("--samples-per-shard", type=int, default=200, help="of the largest photos; more of smaller")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--folder", type=Path, help="keeps shards and the old webdataset (default: a temporary folder)")


if __name__ == "__main__":
    if sys.argv[1:2] == [_MEASURE]:
        measure_side(**json.loads(sys.argv[2]))
    else:
        harness.main(__doc__, add_arguments, measure, baseline=f"open_clip_train with webdataset {OLD_WEBDATASET}")
