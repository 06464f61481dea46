"""Compare the samples per second of ``eval.datacomp`` and DataComp's harness, in one run on the same data.

    python -m scripts.bench.evaluation --output evaluation.json

DataComp's harness ("upstream") uses clip-benchmark's functions. For every task, it creates and loads the model, computes the
classifier class by class (``zero_shot_classifier``), and scores the images (``run_classification``). ``eval.datacomp``
("ours") loads the model once, encodes texts in batches without padding, and encodes equal classes once. Both implementations
use the same image tower in the same precision. The script stops with an error if their accuracies differ.

The data sets have the sizes of ImageNet and its variants, divided by ``--scale``. The number of classes is also divided,
because encoding the texts would otherwise take too much of the time. Class names and templates come from clip-benchmark.
Images are as large as photographs. The two implementations alternate task by task, ``--rounds`` times. A ratio compares the
totals of a round. A second ratio excludes the time for loading the model, which is a larger share than in a full evaluation.
"""

import argparse
import json
import logging
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clip_benchmark
import numpy as np
import open_clip
import torch
from clip_benchmark.datasets.builder import build_dataset
from clip_benchmark.metrics.zeroshot_classification import run_classification, zero_shot_classifier

from openclip_ext.evaluation.encoder import resolve_precision
from openclip_ext.evaluation.models import open_model
from openclip_ext.evaluation.open_tasks import datacomp_task
from openclip_ext.evaluation.samples import read_classes
from openclip_ext.evaluation.tasks import GROUPS, TASKS, Entry
from scripts.bench import harness
from tests.evaluation.datasets import write_dataset

# Names of the parts that are timed.
MODEL, PROMPTS, IMAGES = "model", "texts", "images"
VARIANTS = [TASKS[key] for key in GROUPS["ImageNet & variants (7)"]]


class Evaluation:
    """Number of samples, seconds and accuracies of one implementation."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        self.args, self.checkpoint = args, checkpoint
        self.seconds: Counter[str] = Counter()
        self.samples = 0
        self.accuracies: list[float] = []

    def timed(self, part: str, work: Callable, *arguments: Any, **options: Any) -> Any:
        """Call ``work``, add its duration to the total of ``part``, and return its result."""
        found: list[Any] = []
        self.seconds[part] += harness.seconds(lambda: found.append(work(*arguments, **options)), self.args.device)
        return found[0]

    def speed(self, without: str = "") -> float:
        """Return samples per second; the time of the part ``without`` is excluded."""
        return self.samples / sum(taken for part, taken in self.seconds.items() if part != without)


class Upstream(Evaluation):
    """DataComp's harness, without the parts that fail with current packages (more workers than shards, `accuracy`)."""

    def evaluate(self, task: Entry, folder: Path) -> None:
        device = self.args.device
        model, preprocess, tokenizer = self.timed(MODEL, self._load)
        dataset = build_dataset(f"wds/{task.key}", root=str(folder), transform=preprocess)
        batches = dataset.batched(self.args.batch_size)
        loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=self.args.workers)
        prompting = (model, tokenizer, dataset.classes, dataset.templates, device)
        weights = self.timed(PROMPTS, zero_shot_classifier, *prompting, amp=device.startswith("cuda"))
        logits, labels = self.timed(IMAGES, run_classification, model, weights, loader, device, amp=False)
        self.samples += len(labels)
        self.accuracies.append((logits.argmax(dim=1) == labels).double().mean().item())

    def _load(self) -> tuple[torch.nn.Module, Callable, Callable]:
        model, _, preprocess = open_clip.create_model_and_transforms(self.args.model, pretrained=str(self.checkpoint))
        return model.eval().to(self.args.device), preprocess, open_clip.get_tokenizer(self.args.model)


class Ours(Evaluation):
    """``eval.datacomp``, which loads the model once and encodes equal classes once."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        super().__init__(args, checkpoint)
        opened = self.timed(MODEL, open_model, checkpoint, args.model)
        options = {"batch_size": args.batch_size, "workers": args.workers}
        self.encoder = opened.encoder(args.device, autocast=resolve_precision("datacomp", args.device), **options)

    def evaluate(self, task: Entry, folder: Path) -> None:
        self.timed(PROMPTS, self.encoder.class_embeddings, *read_classes(folder))
        # The encoder has cached the classes, so this call only reads, encodes and scores the images, and checks the data.
        result = self.timed(IMAGES, datacomp_task(task, folder.parent, any_size=True).score, self.encoder)
        self.samples += result.samples
        self.accuracies.append(result.metrics["acc1"])


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    logging.getLogger().setLevel(logging.ERROR)
    runs: list[dict[str, Upstream | Ours]] = []
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint.pt"
        torch.manual_seed(0)
        torch.save({"state_dict": open_clip.create_model(args.model).state_dict()}, checkpoint)
        folders = {task: make_data(Path(temporary), task, args) for task in VARIANTS}
        for _ in range(args.rounds):
            ways: dict[str, Upstream | Ours] = {"upstream": Upstream(args, checkpoint), "ours": Ours(args, checkpoint)}
            for task, folder in folders.items():
                for way in ways.values():
                    way.evaluate(task, folder)
            # On CUDA, rounding depends on the batch shape. This may change the class of a sample whose scores are close.
            accuracies, tolerance = [way.accuracies for way in ways.values()], 1e-6 if args.device == "cpu" else 0.01
            if not np.allclose(*accuracies, rtol=0, atol=tolerance):
                raise RuntimeError(f"expected equal accuracies, found (upstream, ours): {accuracies}")
            runs.append(ways)
    titles = {"whole": "", "without loading the model": MODEL}
    tables = {
        title: harness.compare([{name: way.speed(part) for name, way in ways.items()} for ways in runs], "upstream")
        for title, part in titles.items()
    }
    tables["seconds"] = {
        name: {
            "samples": way.samples,
            **{part: statistics.median(ways[name].seconds[part] for ways in runs) for part in way.seconds},
        }
        for name, way in runs[0].items()
    }
    return tables


def make_data(data_dir: Path, task: Entry, args: argparse.Namespace) -> Path:
    """Write random images for a task in DataComp's format; return the folder. Class names of ObjectNet are made up."""
    texts = Path(clip_benchmark.__file__).parent / "datasets"
    classnames = json.loads((texts / "en_classnames.json").read_text())["imagenet1k"]
    templates = json.loads((texts / "en_zeroshot_classification_templates.json").read_text())["imagenet1k"]
    if task.key == "objectnet":
        classnames = [f"{task.name} class {number}" for number in range(task.classes)]
    classnames = classnames[: max(1, round(task.classes / args.scale))]
    generator = np.random.default_rng(0)
    samples = []
    for index in range(max(8, round(task.size / args.scale))):
        image = harness.photograph(generator, *generator.integers(300, 500, 2))
        samples.append((f"s{index:07d}", {"jpg": image, "cls": str(index % len(classnames)).encode()}))
    lines = {"classnames": classnames, "zeroshot_classification_templates": templates}
    return write_dataset(data_dir / task.folder, samples, args.workers, **lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", default="ViT-B-32", help="default: the model of DataComp's scales small and medium")
    parser.add_argument("--scale", type=int, default=200, help="divisor of DataComp's numbers of images and classes")
    parser.add_argument("--batch-size", type=int, default=64, help="default: the batch size of DataComp's harness")
    parser.add_argument(
        "--workers", type=int, default=2, help="number of data workers of both implementations, and of shards"
    )


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline="upstream")
