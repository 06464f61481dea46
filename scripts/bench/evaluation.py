"""Samples per second of ``eval.datacomp`` over those of DataComp's own way, in one run on the same data.

    python scripts/bench/evaluation.py --output evaluation.json

Upstream's way is DataComp's harness with clip-benchmark's functions: it creates and loads the model for every task, makes
the classifier class by class (``zero_shot_classifier``), scores the images (``run_classification``), and reads the
metadata of grouped tasks in a second pass. Ours loads the model once, encodes texts in batches without their padding, and
encodes equal classes once. Both use the same image tower in the same precision. The script stops if the two ways give
different accuracies.

The data has the proportions of DataComp's: ``--scale`` divides the images **and** the classes of each task (with all
classes, texts would weigh too much). Class names and templates are clip-benchmark's, images are as large as photographs. A
task keeps at least one class and eight images. The default tasks are ImageNet and its variants, which are always reported
together.

The two ways alternate task by task, ``--repeats`` times; a ratio is that of a repetition's totals. Loading the model does not
scale with the data and weighs more here than in a full evaluation, so there is also the ratio without it.
"""

import argparse
import io
import json
import logging
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clip_benchmark
import harness
import numpy as np
import open_clip
import torch
from clip_benchmark.datasets.builder import build_dataset
from clip_benchmark.metrics.zeroshot_classification import run_classification, zero_shot_classifier

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.data import read_classes
from eval.features import Encoder, resolve_precision
from eval.models import load_model
from eval.runner import evaluate_task
from eval.tasks import GROUPS, TASKS, Task

# Names of the parts of the work.
MODEL, PROMPTS, IMAGES, METADATA = "model", "texts", "images", "metadata"
VARIANTS = GROUPS["ImageNet & variants (7)"]


class Way:
    """One of the two ways of evaluating: its samples, seconds and accuracies."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        self.args, self.checkpoint = args, checkpoint
        self.seconds: Counter[str] = Counter()
        self.samples = 0
        self.accuracies: dict[str, float] = {}

    def timed(self, part: str, work: Callable, *arguments: Any, **options: Any) -> Any:
        """Do a part of the work and add its time to that of the part."""
        found: list[Any] = []
        self.seconds[part] += harness.seconds(lambda: found.append(work(*arguments, **options)), self.args)
        return found[0]

    def speed(self, without: str = "") -> float:
        """Return samples per second."""
        return self.samples / sum(taken for part, taken in self.seconds.items() if part != without)


class Upstream(Way):
    """DataComp's way, without the parts that fail today (more workers than shards, `accuracy`)."""

    def evaluate(self, task: Task, data_dir: Path) -> None:
        device, root = self.args.device, data_dir / task.folder
        model, preprocess, tokenizer = self.timed(MODEL, self._load)
        dataset = build_dataset(f"wds/{task.key}", root=str(root), transform=preprocess)
        prompting = (model, tokenizer, dataset.classes, dataset.templates, device)
        weights = self.timed(PROMPTS, zero_shot_classifier, *prompting, amp=device.startswith("cuda"))
        images = (model, weights, self._loader(dataset, root), device)
        logits, labels = self.timed(IMAGES, run_classification, *images, amp=False)
        if task.metadata:
            metadata = build_dataset(f"wds/{task.key}", root=str(root), transform=lambda image: 0)
            self.timed(METADATA, list, self._loader(metadata, root))
        self.samples += len(labels)
        self.accuracies[task.key] = (logits.argmax(dim=1) == labels).double().mean().item()

    def _load(self) -> tuple[torch.nn.Module, Callable, Callable]:
        model, _, preprocess = open_clip.create_model_and_transforms(self.args.model, pretrained=str(self.checkpoint))
        return model.eval().to(self.args.device), preprocess, open_clip.get_tokenizer(self.args.model)

    def _loader(self, dataset: Any, root: Path) -> torch.utils.data.DataLoader:
        workers = min(self.args.workers, int((root / "test" / "nshards.txt").read_text()))
        batches = dataset.batched(self.args.batch_size)
        return torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)


class Ours(Way):
    """``eval.datacomp``: loads the model once and encodes shared classes once."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        super().__init__(args, checkpoint)
        loaded = self.timed(MODEL, load_model, args.model, checkpoint, args.device)
        device = torch.device(args.device)
        parts = (loaded.model, loaded.preprocess, loaded.tokenizer, device, resolve_precision("datacomp", device))
        self.encoder = Encoder(*parts, args.batch_size, args.workers)

    def evaluate(self, task: Task, data_dir: Path) -> None:
        classnames, templates = read_classes(data_dir / task.folder, task, any_size=True)
        self.timed(PROMPTS, self.encoder.class_embeddings, classnames, templates)
        # The classes are known now: this is reading and encoding the images, scoring, and the check of the data.
        result = self.timed(IMAGES, evaluate_task, task, data_dir, self.encoder, any_size=True)
        self.samples += result.samples
        self.accuracies[task.key] = result.metrics["acc1"]


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    logging.getLogger().setLevel(logging.ERROR)
    tasks, runs = [TASKS[key] for key in args.tasks], []
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint.pt"
        torch.manual_seed(0)
        torch.save({"state_dict": open_clip.create_model(args.model).state_dict()}, checkpoint)
        data_dir = args.data_dir or Path(temporary) / "data"
        if args.data_dir is None:
            for task in tasks:
                make_data(data_dir, task, args.scale, args.shards)
        for repeat in range(args.repeats):
            ways = {"upstream": Upstream(args, checkpoint), "ours": Ours(args, checkpoint)}
            for task in tasks:
                # Fill the page cache, so that neither way does it for the other.
                for shard in (data_dir / task.folder).rglob("*.tar"):
                    shard.read_bytes()
                for way in ways.values():
                    way.evaluate(task, data_dir)
            print(f"{repeat}: {', '.join(f'{name} {way.speed():.1f} samples/s' for name, way in ways.items())}")
            check_accuracies(ways, 1e-6 if args.device == "cpu" else 0.01)
            runs.append(ways)
    return tables(runs)


def check_accuracies(ways: dict[str, Way], tolerance: float) -> None:
    """On CUDA, batches of other shapes round differently, and a sample near a tie may change sides."""
    for key, expected in ways["upstream"].accuracies.items():
        found = ways["ours"].accuracies[key]
        if abs(found - expected) > tolerance:
            raise RuntimeError(f"{key}: accuracy {found} here, {expected} upstream: the two ways do not do the same")


def tables(runs: Sequence[dict[str, Way]]) -> dict[str, harness.Table]:
    """Return speeds over upstream's, whole and without loading the model, and what the parts of the work took."""
    found = {}
    for title, without in (("whole", ""), ("without loading the model", MODEL)):
        speeds = [{name: way.speed(without) for name, way in ways.items()} for ways in runs]
        ratios = harness.compared(speeds, "upstream")
        found[title] = {
            name: {"samples_per_second": statistics.median(speed[name] for speed in speeds), **ratios[name]}
            for name in ratios
        }
    found["seconds"] = {
        name: {
            "samples": way.samples,
            **{part: statistics.median(ways[name].seconds[part] for ways in runs) for part in way.seconds},
        }
        for name, way in runs[0].items()
    }
    return found


# --- data ------------------------------------------------------------------------------------------------------------


def texts(task: Task) -> tuple[list[str], list[str]]:
    """Return clip-benchmark's class names and templates; the right number of stand-ins if it has none."""
    folder = Path(clip_benchmark.__file__).parent / "datasets"
    classnames = json.loads((folder / "en_classnames.json").read_text())
    templates = json.loads((folder / "en_zeroshot_classification_templates.json").read_text())
    name = "imagenet1k" if task.key in VARIANTS else task.key.removeprefix("vtab/")
    found = classnames.get(name, [])[: task.classes]
    if len(found) != task.classes or task.key == "objectnet":  # ObjectNet: ImageNet's templates, its own classes
        found = [f"{task.name} class {number}" for number in range(task.classes)]
    return found, templates.get(name, ["a photo of {c}"])


def make_data(data_dir: Path, task: Task, scale: int, shards: int) -> None:
    """Write a task in DataComp's format, with some of its real classes."""
    classnames, templates = texts(task)
    classnames = classnames[: max(1, round(len(classnames) / scale))]
    folder = data_dir / task.folder
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    (folder / "classnames.txt").write_text("\n".join(classnames))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    generator = np.random.default_rng(0)
    count = max(8, round(task.size / scale))
    for shard in range(shards):
        samples = {}
        for index in range(shard, count, shards):
            image = harness.photograph(generator, *generator.integers(300, 500, 2))
            samples[f"s{index:07d}"] = {"jpg": image, "cls": str(index % len(classnames)).encode()}
            if task.metadata:
                stream = io.BytesIO()
                np.save(stream, generator.integers(0, 5, len(task.metadata)))
                samples[f"s{index:07d}"]["npy"] = stream.getvalue()
        harness.write_shard(folder / "test" / f"{shard}.tar", samples)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="ViT-B-32", help="default: that of DataComp's scales small and medium")
    parser.add_argument("--tasks", nargs="+", default=list(VARIANTS), choices=[*TASKS], metavar="TASK")
    parser.add_argument("--scale", type=int, default=200, help="divides DataComp's numbers of images and of classes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of both ways; upstream's default")
    parser.add_argument(
        "--workers", type=int, default=4, help="of both ways, at most one per shard; upstream's default"
    )
    parser.add_argument("--shards", type=int, default=2, help="of each task")
    parser.add_argument("--data-dir", type=Path, help="use DataComp's own data instead of making some")


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline="upstream")
