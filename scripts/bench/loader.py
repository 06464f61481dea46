"""Compare the samples per second of this training loader and OpenCLIP's, on the same shards in one run.

    python -m scripts.bench.loader [--output results.json]

OpenCLIP 3.3's loader needs webdataset below 0.2.96. The script installs 0.2.86 into a temporary folder
(``pip install --target``), which is only on the path of OpenCLIP's subprocesses. All loaders have the same transform,
tokenizer, batch size and workers. Our loader runs with each image backend and yields uint8 images, which training normalizes
on the device. ``reference`` is our loader with torchvision and ``--reference``, which adds two embeddings of dimension 512 per
sample. Each measurement is a new process, which reads one epoch to warm up and times the next one. The loaders alternate. A
ratio is the median over the rounds.

A second table contains the samples per CPU second of the worker processes, because other programs affect CPU time less. Its
baseline ``bare`` only decodes, crops and resizes images with torchvision, in the measuring process, before and after the
epoch. ``one worker`` is our loader with torchvision and one worker. Two more rows measure ``one worker`` with Hugging Face's
tokenizer for CLIP's vocabulary, and without a tokenizer.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import resized_crop

from openclip_ext.data import reference as embeddings
from openclip_ext.data.images import image_pipeline
from openclip_ext.data.loader.build import build_train_loader
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec
from scripts.bench import harness

OLD_WEBDATASET = "0.2.86"
BASELINE = "openclip"
REFERENCE = "reference"
LOADERS = (BASELINE, "pil", "torchvision", REFERENCE)
BARE = "bare"
HUGGING_FACE = "one worker, Hugging Face"
NO_TOKENIZER = "one worker, no tokenizer"
SIDES = (*LOADERS, "one worker", HUGGING_FACE, NO_TOKENIZER)
# Width and height of the photos in pixels, and a factor for --samples-per-shard.
PHOTOS = {"500x375": (500, 375, 2), "1024x768": (1024, 768, 1)}
# Number of distinct images in a data set. Images repeat, because creating an image takes longer than reading it.
DISTINCT_IMAGES = 40
WORDS = (
    "a photo of the old red house near river with two dogs and small boat under blue sky vintage poster black white "
    "woman holding coffee cup street market city night lights mountain view stock image wooden table"
)


def write_shards(folder: Path, width: int, height: int, shards: int, samples: int) -> str:
    """Write shards in img2dataset's format (jpg, json, txt); return their brace notation."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(width)
    images = [harness.photograph(rng, width, height) for _ in range(DISTINCT_IMAGES)]
    for shard in range(shards):
        content = {}
        for number in range(samples):
            caption = " ".join(rng.choice(WORDS.split(), 12))
            meta = {"caption": caption, "url": "https://example.org/" + "x" * 60, "status": "success"}
            content[f"{shard:05d}{number:04d}"] = {
                "jpg": images[number % DISTINCT_IMAGES],
                "json": meta,
                "txt": caption,
            }
        harness.write_shard(folder / f"{shard:05d}.tar", content)
    return str(folder / f"{{00000..{shards - 1:05d}}}.tar")


def write_reference(folder: Path, samples: int, width: int = 512) -> None:
    """Write random embeddings in the format of ``openclip-ext embed``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (embeddings.IMAGES, embeddings.TEXTS):
        np.save(
            folder / name, np.random.default_rng(0).standard_normal((samples, width), np.float32).astype(np.float16)
        )
    about = {"samples": samples, "width": width, "data": None, "logit_scale": 100.0}
    (folder / embeddings.ABOUT).write_text(json.dumps(about))


def bare_work(shard: Path, num_samples: int, crop: Any) -> Callable[[], int]:
    """Return a function that decodes, crops and resizes images, with files in memory and crop boxes sampled in advance."""
    with tarfile.open(shard) as tar:
        members = itertools.islice((member for member in tar if member.name.endswith("jpg")), DISTINCT_IMAGES)
        files = [torch.frombuffer(bytearray(tar.extractfile(member).read()), dtype=torch.uint8) for member in members]
    image = decode_jpeg(files[0], ImageReadMode.RGB)
    boxes = [crop.get_params(image, crop.scale, crop.ratio) for _ in range(num_samples)]

    def work() -> int:
        for file, box in zip(itertools.cycle(files), boxes, strict=False):
            image = decode_jpeg(file, ImageReadMode.RGB)
            resized_crop(image, *box, size=crop.size, interpolation=crop.interpolation, antialias=True)
        return num_samples

    return work


def rates(work: Callable[[], int], clocks: Sequence[int]) -> list[float]:
    """Return samples per elapsed second, and samples per CPU second (the sum of the CPU clocks ``clocks``)."""

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), sum(map(time.clock_gettime, clocks))])

    start = now()
    samples = work()
    return (samples / (now() - start)).tolist()


def choose_tokenizer(side: str, folder: Path) -> Any:
    if side == NO_TOKENIZER:
        return lambda texts: torch.zeros(len(texts), 77, dtype=torch.int64)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    if side == HUGGING_FACE:
        from transformers import CLIPTokenizer

        names = {"bos_token": "<start_of_text>"} | dict.fromkeys(("eos_token", "unk_token"), "<end_of_text>")
        merges = list(tokenizer.bpe_ranks)
        CLIPTokenizer(vocab=tokenizer.encoder, merges=merges, **names).save_pretrained(folder)
        return open_clip.tokenizer.HFTokenizer(str(folder))
    return tokenizer


def measure_side(side: str, shards: str, num_samples: int, batch_size: int, workers: int) -> None:
    """Print the rates of one loader. A subprocess calls this function."""
    preprocess = open_clip.image_transform(224, is_train=True)
    folder = Path(shards).parent
    tokenizer = choose_tokenizer(side, folder / "tokenizer")
    epochs: list[Any]
    key: str | int
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
        config = TrainLoaderConfig(batch_size=batch_size, workers=workers if side in LOADERS else 1)
        images = image_pipeline(preprocess, "pil" if side == "pil" else "torchvision")
        spec = DataSpec(shards, reference=str(folder / REFERENCE) if side == REFERENCE else None)
        loader = build_train_loader(
            spec, config, preprocess=images.transform, tokenizer=tokenizer, decoder=images.decode
        )
        epochs, key = [loader.iterate(0), loader.iterate(1)], "image"
    first, second = (lambda epoch=epoch: sum(len(batch[key]) for batch in epoch) for epoch in epochs)
    first()
    bare = bare_work(folder / "00000.tar", num_samples // 2, preprocess.transforms[0])
    bare()
    around = [rates(bare, [time.CLOCK_PROCESS_CPUTIME_ID])]
    # These numbers are the CPU clocks of the worker processes (see clock_getcpuclockid(3)).
    found = rates(second, [~worker.pid << 3 | 2 for worker in multiprocessing.active_children()])
    around.append(rates(bare, [time.CLOCK_PROCESS_CPUTIME_ID]))
    print(json.dumps({"per_second": found[0], "per_cpu_second": found[1], BARE: statistics.mean(r[1] for r in around)}))


def run_side(side: str, old: Path, **job: Any) -> dict[str, float]:
    """Return the rates of one loader, measured in a new process."""
    root = str(Path(__file__).resolve().parents[2])
    path = [str(old), root] if side == BASELINE else [root]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "measure-side", json.dumps({"side": side, **job})]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    tables = {}
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary) / "webdataset"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(old)]
        subprocess.run([*command, f"webdataset=={OLD_WEBDATASET}"], check=True)
        for name, (width, height, times) in PHOTOS.items():
            samples = args.samples_per_shard * times
            shards = write_shards(Path(temporary) / name, width, height, args.num_shards, samples)
            write_reference(Path(temporary) / name / REFERENCE, samples * args.num_shards)
            job = {"shards": shards, "num_samples": samples * args.num_shards}
            job |= {"batch_size": args.batch_size, "workers": args.workers}
            rounds = [{side: run_side(side, old, **job) for side in args.sides} for _ in range(args.repeats)]
            if BASELINE in args.sides:
                loaders = [side for side in args.sides if side in LOADERS]
                tables[name] = harness.compare(
                    [{side: one[side]["per_second"] for side in loaders} for one in rounds], BASELINE
                )
            cpu_time = tables[f"{name}, CPU time of the workers"] = {}
            for side in args.sides:
                pairs = [{side: one[side]["per_cpu_second"], BARE: one[side][BARE]} for one in rounds]
                cpu_time |= harness.compare(pairs, BARE, "samples_per_cpu_second")
    return tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-shards", type=int, default=4)
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=200,
        help="samples per shard of large photos; small photos: twice as many",
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="number of rounds")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES, metavar="SIDE", help=", ".join(SIDES))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure-side"]:
        measure_side(**json.loads(sys.argv[2]))
    else:
        harness.main(__doc__, add_arguments, measure, baseline=f"open_clip_train with webdataset {OLD_WEBDATASET}")
