"""Samples per second of ``eval.datacomp`` against doing the same upstream's way, in one run on the same data.

Upstream's way is DataComp's harness with clip-benchmark's functions: for every task the model is created and loaded, the
classifier is made class by class (``zero_shot_classifier``), the images are scored (``run_classification``), and grouped
tasks read their metadata in a second pass. Ours loads the model once and encodes texts in batches, without their padding,
and equal classes once.

The data has the proportions of DataComp's: images and classes of each task divided by ``--scale``, with clip-benchmark's
own class names and templates, and photographs. The tasks are ImageNet and its variants, a group that is always reported
together; ``--tasks`` takes any others. The two ways take turns, task by task and ``--repeats`` times, and the fastest time
counts. Both must give the same accuracies, or the comparison is off. Loading the model is not scaled down with the data
and therefore weighs more than in a full evaluation: the ratio without it is printed, too.

    python scripts/bench/evaluation.py --output evaluation.json
"""

import argparse
import io
import json
import logging
import os
import platform
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import open_clip
import torch
from clip_benchmark.datasets.builder import build_dataset
from clip_benchmark.metrics.zeroshot_classification import run_classification, zero_shot_classifier
from PIL import Image
from sklearn.datasets import load_sample_images
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.features import Encoder, resolve_precision
from eval.models import load_model
from eval.runner import evaluate_task
from eval.tasks import GROUPS, TASKS, Task

# Name of the part of the work that loads the model.
MODEL = "model"
VARIANTS = GROUPS["ImageNet & variants (7)"]
# clip-benchmark's name for the classes and templates of the tasks that it does not list under their own.
TEXTS = dict.fromkeys(VARIANTS, "imagenet1k")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="ViT-S-32-alt")
    parser.add_argument("--tasks", nargs="+", default=list(VARIANTS), choices=[*TASKS], metavar="TASK")
    parser.add_argument("--scale", type=int, default=200, help="images and classes are DataComp's divided by this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of both ways; upstream's default")
    parser.add_argument("--workers", type=int, default=4, help="of both ways, at most one a shard; upstream's default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", help="use DataComp's own data instead of making some")
    parser.add_argument("--output", help="JSON file for the result")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint.pt"
        torch.manual_seed(0)
        torch.save({"state_dict": open_clip.create_model(args.model).state_dict()}, checkpoint)
        data_dir = Path(args.data_dir) if args.data_dir else Path(temporary) / "data"
        tasks = [TASKS[key] for key in args.tasks]
        if not args.data_dir:
            for task in tasks:
                make_data(data_dir, task, args.scale)
        result = compare(args, checkpoint, data_dir, tasks)
    print(json.dumps(result, indent=2))
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=2) + "\n")


def compare(args: argparse.Namespace, checkpoint: Path, data_dir: Path, tasks: list[Task]) -> dict:
    """Both ways in turn, so that a machine that gets slower or faster meanwhile does so for both."""
    runs = []
    with tqdm(total=args.repeats * len(tasks), desc="tasks") as bar:
        for _ in range(args.repeats):
            ways = {"upstream": Upstream(args, checkpoint), "ours": Ours(args, checkpoint)}
            for task in tasks:
                # Neither shall read the files into the page cache for the other.
                for shard in (data_dir / task.folder).rglob("*.tar"):
                    shard.read_bytes()
                for way in ways.values():
                    way.evaluate(task, data_dir)
                bar.update()
            runs.append(ways)
    return report(args, {name: fastest([ways[name] for ways in runs]) for name in runs[0]})


def fastest(ways: list["Way"]) -> dict:
    """One way's repetitions as one, every part of every task in its fastest time."""
    parts = ways[0].clock.seconds.keys()
    seconds = {part: min(way.clock.seconds[part] for way in ways) for part in parts}
    return {
        "samples": ways[0].samples,
        "seconds": {f"{task}: {part}": value for (task, part), value in seconds.items()},
        "acc1": ways[0].scores,
    }


class Clock:
    """Seconds by task and part of the work; waits for the device before every reading."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[tuple[str, str], float] = {}

    def time(self, task: str, part: str, work: Callable, *arguments, **options):
        """Runs ``work`` and notes its time."""
        self._wait()
        started = time.perf_counter()
        value = work(*arguments, **options)
        self._wait()
        self.seconds[task, part] = time.perf_counter() - started
        return value

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


class Way:
    """One of the two ways of evaluating: its times, its samples and its accuracies."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path):
        self.args, self.checkpoint = args, checkpoint
        self.clock, self.samples, self.scores = Clock(args.device), 0, {}


class Upstream(Way):
    """DataComp's way of doing it, with what breaks today left out (more workers than shards, `accuracy`)."""

    def evaluate(self, task: Task, data_dir: Path) -> None:
        device, amp = self.args.device, self.args.device.startswith("cuda")
        model, preprocess = self.clock.time(task.key, MODEL, self._load)
        root = data_dir / task.folder
        dataset = build_dataset(f"wds/{task.key}", root=str(root), transform=preprocess)
        texts = (model, open_clip.get_tokenizer(self.args.model), dataset.classes, dataset.templates, device)
        weights = self.clock.time(task.key, "texts", zero_shot_classifier, *texts, amp=amp)
        images = (model, weights, self._loader(dataset, root), device)
        logits, labels = self.clock.time(task.key, "images", run_classification, *images, amp=False)
        if task.metadata:
            dataset = build_dataset(f"wds/{task.key}", root=str(root), transform=lambda image: 0)
            self.clock.time(task.key, "metadata", list, self._loader(dataset, root))
        self.samples += len(labels)
        self.scores[task.key] = (logits.argmax(dim=1) == labels).double().mean().item()

    def _load(self) -> tuple[torch.nn.Module, Callable]:
        model, _, preprocess = open_clip.create_model_and_transforms(self.args.model, pretrained=str(self.checkpoint))
        return model.eval().to(self.args.device), preprocess

    def _loader(self, dataset, root: Path) -> torch.utils.data.DataLoader:
        workers = min(self.args.workers, int((root / "test" / "nshards.txt").read_text()))
        return torch.utils.data.DataLoader(dataset.batched(self.args.batch_size), batch_size=None, num_workers=workers)


class Ours(Way):
    """``eval.datacomp``: the model loaded once, what tasks share encoded once."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path):
        super().__init__(args, checkpoint)
        loaded = self.clock.time("all", MODEL, load_model, args.model, checkpoint, args.device)
        device = torch.device(args.device)
        precision = resolve_precision("datacomp", device)
        parts = (loaded.model, loaded.preprocess, loaded.tokenizer, device, precision)
        self.encoder = Encoder(*parts, args.batch_size, args.workers)

    def evaluate(self, task: Task, data_dir: Path) -> None:
        arguments = (task, data_dir, self.encoder)
        result = self.clock.time(task.key, "texts and images", evaluate_task, *arguments, any_size=True)
        self.samples += result.samples
        self.scores[task.key] = result.metrics["acc1"]


def report(args: argparse.Namespace, runs: dict[str, dict]) -> dict:
    """Speeds, ratios, hardware and versions. Both ways must have scored the same samples alike."""
    for key, expected in runs["upstream"]["acc1"].items():
        found = runs["ours"]["acc1"][key]
        # On CUDA, batches of other shapes round differently, and a sample near a tie may change sides.
        if abs(found - expected) > (1e-6 if args.device == "cpu" else 0.01):
            raise RuntimeError(f"{key}: accuracy {found} here, {expected} upstream: the two ways do not do the same")
    speeds = {}
    for name, run in runs.items():
        total = sum(run["seconds"].values())
        run["samples_per_second"] = run["samples"] / total
        loading = sum(value for part, value in run["seconds"].items() if part.endswith(MODEL))
        speeds[name] = (run["samples_per_second"], run["samples"] / (total - loading))
    return {
        "ratio": speeds["ours"][0] / speeds["upstream"][0],
        "ratio_without_loading_the_model": speeds["ours"][1] / speeds["upstream"][1],
        "runs": runs,
        "arguments": vars(args),
        "hardware": hardware(args.device),
        "versions": {name: version(name) for name in ("torch", "open_clip_torch", "clip-benchmark", "webdataset")},
    }


def hardware(device: str) -> dict[str, object]:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
    processor = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
    }


def make_data(data_dir: Path, task: Task, scale: int) -> None:
    """A task in DataComp's format: photographs of 300 to 500 pixels, two shards, some of its real classes."""
    texts = Path(__import__("clip_benchmark").__file__).parent / "datasets"
    name = TEXTS.get(task.key, task.key)
    known = json.loads((texts / "en_classnames.json").read_text())
    # ObjectNet has ImageNet's templates, but classes of its own.
    own = [f"{task.name} class {number}" for number in range(task.classes)]
    classnames = known.get(name, own) if task.key != "objectnet" else own
    templates = json.loads((texts / "en_zeroshot_classification_templates.json").read_text())
    classnames = classnames[: max(1, round(task.classes / scale))]
    folder = data_dir / task.folder
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text("2\n")
    (folder / "classnames.txt").write_text("\n".join(classnames))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates.get(name, ["a photo of {c}"])))
    generator = np.random.default_rng(0)
    count = max(8, round(task.size / scale))
    for shard in range(2):
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as archive:
            for index in range(shard, count, 2):
                files = {"jpg": photograph(generator), "cls": str(index % len(classnames)).encode()}
                if task.metadata:
                    stream = io.BytesIO()
                    np.save(stream, generator.integers(0, 5, len(task.metadata)))
                    files["npy"] = stream.getvalue()
                for extension, content in files.items():
                    member = tarfile.TarInfo(f"s{index:07d}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def photograph(generator: np.random.Generator) -> bytes:
    """A random part of one of scikit-learn's two photographs as JPEG."""
    image = load_sample_images().images[generator.integers(2)]
    height, width = generator.integers(300, 420), generator.integers(300, 500)
    top, left = generator.integers(0, image.shape[0] - height), generator.integers(0, image.shape[1] - width)
    stream = io.BytesIO()
    Image.fromarray(image[top : top + height, left : left + width]).save(stream, "JPEG", quality=90)
    return stream.getvalue()


if __name__ == "__main__":
    main()
