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
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from _report import hardware
from PIL import Image
from tqdm import tqdm

OLD_WEBDATASET = "0.2.86"
BASELINE = "openclip"
SIDES = (BASELINE, "pil", "torchvision")
# Width and height of the images in pixels, the size of the model's input, and how many times the samples of the largest.
SETS = {"500x375": (500, 375, 224, 2), "1024x768": (1024, 768, 224, 1), "32x32": (32, 32, 32, 12)}
PHOTOS = ("500x375", "1024x768")
# Different images of a set, which recur: making one takes longer than reading it.
IMAGES = 40
WORDS = (
    "a photo of the old red house near river with two dogs and small boat under blue sky vintage poster black white "
    "woman holding coffee cup street market city night lights mountain view stock image wooden table"
)


def make_image(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG as large as a photograph of its size: coarse structure with some noise."""
    coarse = rng.integers(0, 256, (max(height // 16, 2), max(width // 16, 2), 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shards(folder: Path, name: str, shards: int, samples: int) -> str:
    """Write shards as img2dataset does (jpg, json, txt); returns their brace notation."""
    width, height, _, _ = SETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(width)
    images = [make_image(rng, width, height) for _ in range(IMAGES)]
    for shard in tqdm(range(shards), desc=f"writing {name}", disable=None):
        path = folder / f"{shard:05d}.tar"
        if path.exists():
            continue
        with tarfile.open(path.with_suffix(".part"), "w") as archive:
            for number in range(samples):
                caption = " ".join(rng.choice(WORDS.split(), 12))
                meta = json.dumps({"caption": caption, "url": "https://example.org/" + "x" * 60, "status": "success"})
                for field, data in (
                    ("jpg", images[number % IMAGES]),
                    ("json", meta.encode()),
                    ("txt", caption.encode()),
                ):
                    info = tarfile.TarInfo(f"{shard:05d}{number:04d}.{field}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        path.with_suffix(".part").rename(path)
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


def measure(args: argparse.Namespace) -> None:
    """Print the samples per second of one side (in a subprocess of its own)."""
    import open_clip
    import webdataset

    preprocess = open_clip.image_transform(SETS[args.set][2], is_train=True)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    if args.side == BASELINE:
        from open_clip_train.data import get_wds_dataset

        assert webdataset.__version__ == OLD_WEBDATASET, webdataset.__version__
        settings = argparse.Namespace(
            train_data=args.shards,
            batch_size=args.batch_size,
            workers=args.workers,
            seed=0,
            world_size=1,
            train_num_samples=args.num_samples,
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

        config = TrainLoaderConfig(batch_size=args.batch_size, workers=args.workers)
        images = image_pipeline(preprocess, args.side)
        loader = build_train_loader(
            DataSpec(args.shards), config, preprocess=images.transform, tokenizer=tokenizer, decoder=images.decode
        )
        epochs, key = [loader.iterate(0), loader.iterate(1)], "image"
    clock = time.process_time if args.cpu_time else time.perf_counter
    rates = [time_epoch(epoch, key, clock) for epoch in epochs]
    print(rates[-1])


def run_side(args: argparse.Namespace, side: str, name: str, shards: str, num_samples: int, old: Path) -> float:
    """Measure one side in a new process."""
    root = str(Path(__file__).resolve().parents[2])
    path = [str(old), root] if side == BASELINE else [root]
    command = [sys.executable, __file__, "--side", side, "--set", name, "--shards", shards]
    command += ["--num-samples", str(num_samples), "--batch-size", str(args.batch_size)]
    command += ["--workers", str(args.workers), *(["--cpu-time"] if args.cpu_time else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def compare(args: argparse.Namespace, name: str, folder: Path, old: Path) -> dict:
    """Measure all sides in turn on one set."""
    samples = args.samples_per_shard * SETS[name][3]
    shards = write_shards(folder / name, name, args.num_shards, samples)
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(args.repeats):
        for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
            rates[side].append(run_side(args, side, name, shards, samples * args.num_shards, old))
            print(f"{name}, repeat {repeat}, {side}: {rates[side][-1]:.1f} samples/s", flush=True)
    result: dict = {"num_samples": samples * args.num_shards, "samples_per_second": rates}
    for side in SIDES[1:]:
        ratios = [ours / theirs for ours, theirs in zip(rates[side], rates[BASELINE], strict=True)]
        result[side] = {"ratio": statistics.median(ratios), "ratios": ratios}
        listed = ", ".join(f"{value:.2f}" for value in ratios)
        print(f"{name}: {side} / {BASELINE} = {result[side]['ratio']:.2f} (rounds: {listed})", flush=True)
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=PHOTOS)
    parser.add_argument("--num-shards", type=int, default=4)
    parser.add_argument("--samples-per-shard", type=int, default=200, help="of the largest photos; more of smaller")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="per second of processor time; needs --workers 0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keeps shards and the old webdataset (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--set", choices=SETS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", help=argparse.SUPPRESS)
    parser.add_argument("--num-samples", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_time and args.workers:
        parser.error(f"--cpu-time counts the time of one process: expected --workers 0, got {args.workers}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.side:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        old = install_webdataset(folder)
        load_before = os.getloadavg()[0]
        results = {name: compare(args, name, folder, old) for name in args.sets}
    packages = ("torch", "torchvision", "open_clip_torch", "webdataset", "pillow", "numpy")
    report = {
        "results": results,
        "settings": {name: getattr(args, name) for name in ("batch_size", "workers", "cpu_time", "repeats")},
        "hardware": hardware(),
        "load_before": load_before,
        "versions": {name: version(name) for name in packages} | {"webdataset of openclip": OLD_WEBDATASET},
        "python": platform.python_version(),
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
