"""Samples per second of ``eval.datacomp`` and of DataComp's own way, in one run on the same data.

Upstream's way is DataComp's harness with clip-benchmark's functions: it creates and loads the model for every task, makes
the classifier class by class (``zero_shot_classifier``), scores the images (``run_classification``), and reads the
metadata of grouped tasks in a second pass. Ours loads the model once, encodes texts in batches without their padding, and
encodes equal classes once. Both use the same image tower in the same precision.

The data has the proportions of DataComp's: ``--scale`` divides the images **and** the classes of each task (with all
classes, texts would weigh too much). Class names and templates are clip-benchmark's, images are photographs. A task keeps
at least one class and eight images; the result states the prompts per image here and in DataComp. The default tasks are
ImageNet and its variants, which are always reported together.

The two ways alternate task by task, ``--repeats`` times. The result has the median, minimum and maximum of the ratio of a
repetition's totals. The script stops if the two ways give different accuracies. Loading the model does not scale with the
data and weighs more here than in a full evaluation, so the result also has the ratio without it. ``at_datacomps_size``
multiplies the measured times of an image, a prompt and a load by DataComp's numbers of them.

    python scripts/bench/evaluation.py --output evaluation.json

``--reading`` compares reading and preprocessing alone, the bottleneck if the model is fast.

    python scripts/bench/evaluation.py --reading --tasks imagenetv2 --scale 20 --shards 1
"""

import argparse
import io
import json
import logging
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

import clip_benchmark
import numpy as np
import open_clip
import torch
from _report import hardware
from clip_benchmark.datasets.builder import build_dataset
from clip_benchmark.metrics.zeroshot_classification import run_classification, zero_shot_classifier
from PIL import Image
from sklearn.datasets import load_sample_images
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.data import SampleFormat, find_shards, read_classes
from eval.features import Encoder, resolve_precision
from eval.models import load_model
from eval.runner import evaluate_task
from eval.tasks import AVERAGED, GROUPS, TASKS, Task

# Names of the parts of the work.
MODEL, PROMPTS, IMAGES, METADATA, READING = "model", "texts", "images", "metadata", "reading"
VARIANTS = GROUPS["ImageNet & variants (7)"]
# clip-benchmark's name for classes and templates, for tasks that it does not list under their own name.
TEXTS = dict.fromkeys(VARIANTS, "imagenet1k")
# Sets of tasks whose result is projected to their true size.
PROJECTED = {
    "ImageNet & variants (7)": [TASKS[key] for key in VARIANTS],
    "classification tasks of the average (35)": [TASKS[key] for key in AVERAGED if TASKS[key].classes is not None],
}


@dataclass(frozen=True)
class Settings:
    """What to compare, and how; a field for every argument of the command line."""

    model: str = "ViT-B-32"
    tasks: Sequence[str] = VARIANTS
    scale: int = 200
    repeats: int = 3
    batch_size: int = 64
    workers: int = 4
    shards: int = 2
    reading: bool = False
    device: str = "cpu"
    data_dir: str | None = None
    output: str | None = None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="ViT-B-32", help="default: that of DataComp's scales small and medium")
    parser.add_argument("--tasks", nargs="+", default=list(VARIANTS), choices=[*TASKS], metavar="TASK")
    parser.add_argument("--scale", type=int, default=200, help="divides DataComp's numbers of images and of classes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of both ways; upstream's default")
    parser.add_argument(
        "--workers", type=int, default=4, help="of both ways, at most one per shard; upstream's default"
    )
    parser.add_argument("--shards", type=int, default=2, help="of each task")
    parser.add_argument("--reading", action="store_true", help="compare reading and preprocessing alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", help="use DataComp's own data instead of making some")
    parser.add_argument("--output", help="JSON file for the result")
    return parser.parse_args()


def main() -> None:
    settings = Settings(**vars(parse_args()))
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / "checkpoint.pt"
        torch.manual_seed(0)
        torch.save({"state_dict": open_clip.create_model(settings.model).state_dict()}, checkpoint)
        data_dir = Path(settings.data_dir) if settings.data_dir else Path(temporary) / "data"
        tasks = [TASKS[key] for key in settings.tasks]
        if not settings.data_dir:
            for task in tasks:
                make_data(data_dir, task, settings.scale, settings.shards)
        result = compare(settings, checkpoint, data_dir, tasks)
    print(json.dumps(result, indent=2))
    if settings.output:
        Path(settings.output).write_text(json.dumps(result, indent=2) + "\n")


def compare(settings: Settings, checkpoint: Path, data_dir: Path, tasks: list[Task]) -> dict:
    """Both ways in turn, so that a change of the machine's speed affects both."""
    runs = []
    with tqdm(total=settings.repeats * len(tasks), desc="tasks") as bar:
        for _ in range(settings.repeats):
            ways = {"upstream": Upstream(settings, checkpoint), "ours": Ours(settings, checkpoint)}
            for task in tasks:
                # Fill the page cache, so that neither way does it for the other.
                for shard in (data_dir / task.folder).rglob("*.tar"):
                    shard.read_bytes()
                for way in ways.values():
                    (way.read if settings.reading else way.evaluate)(task, data_dir)
                bar.update()
            runs.append(ways)
    return report(settings, runs)


class Clock:
    """Seconds by task and part of the work; waits for the device before every reading."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[tuple[str, str], float] = {}

    def time(self, task: str, part: str, work: Callable, *arguments, **options):
        """Run ``work`` and note its time."""
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
    """One of the two ways of evaluating: its times, samples, prompts and accuracies."""

    def __init__(self, settings: Settings, checkpoint: Path):
        self.settings, self.checkpoint = settings, checkpoint
        self.clock, self.samples, self.prompts, self.scores = Clock(settings.device), 0, 0, {}

    def count(self, part: str) -> int:
        """Number of images, prompts or loads in the time of a part."""
        loads = sum(name == MODEL for _, name in self.clock.seconds)
        return {IMAGES: self.samples, PROMPTS: self.prompts, MODEL: loads}[part]

    def seconds(self, *parts: str) -> float:
        """Time of these parts of the work, of all without any."""
        return sum(value for (_, part), value in self.clock.seconds.items() if not parts or part in parts)


class Upstream(Way):
    """DataComp's way, without the parts that fail today (more workers than shards, `accuracy`)."""

    def evaluate(self, task: Task, data_dir: Path) -> None:
        device, amp = self.settings.device, self.settings.device.startswith("cuda")
        model, preprocess, tokenizer = self.clock.time(task.key, MODEL, self._load)
        root = data_dir / task.folder
        dataset = build_dataset(f"wds/{task.key}", root=str(root), transform=preprocess)
        prompting = (model, tokenizer, dataset.classes, dataset.templates, device)
        weights = self.clock.time(task.key, PROMPTS, zero_shot_classifier, *prompting, amp=amp)
        images = (model, weights, self._loader(dataset, root), device)
        logits, labels = self.clock.time(task.key, IMAGES, run_classification, *images, amp=False)
        if task.metadata:
            metadata = build_dataset(f"wds/{task.key}", root=str(root), transform=lambda image: 0)
            self.clock.time(task.key, METADATA, list, self._loader(metadata, root))
        self.samples += len(labels)
        self.prompts += len(dataset.classes) * len(dataset.templates)
        self.scores[task.key] = (logits.argmax(dim=1) == labels).double().mean().item()

    def read(self, task: Task, data_dir: Path) -> None:
        root = data_dir / task.folder
        dataset = build_dataset(f"wds/{task.key}", root=str(root), transform=self._load()[1])
        loader = self._loader(dataset, root)
        self.samples += self.clock.time(task.key, READING, lambda: sum(len(labels) for _, labels in loader))

    def _load(self) -> tuple[torch.nn.Module, Callable, Callable]:
        model, _, preprocess = open_clip.create_model_and_transforms(
            self.settings.model, pretrained=str(self.checkpoint)
        )
        return model.eval().to(self.settings.device), preprocess, open_clip.get_tokenizer(self.settings.model)

    def _loader(self, dataset, root: Path) -> torch.utils.data.DataLoader:
        workers = min(self.settings.workers, int((root / "test" / "nshards.txt").read_text()))
        return torch.utils.data.DataLoader(
            dataset.batched(self.settings.batch_size), batch_size=None, num_workers=workers
        )


class Ours(Way):
    """``eval.datacomp``: loads the model once and encodes shared classes once."""

    def __init__(self, settings: Settings, checkpoint: Path):
        super().__init__(settings, checkpoint)
        loaded = self.clock.time("all", MODEL, load_model, settings.model, checkpoint, settings.device)
        device = torch.device(settings.device)
        precision = resolve_precision("datacomp", device)
        parts = (loaded.model, loaded.preprocess, loaded.tokenizer, device, precision)
        self.encoder = Encoder(*parts, settings.batch_size, settings.workers)

    def evaluate(self, task: Task, data_dir: Path) -> None:
        classes = read_classes(data_dir / task.folder, task, any_size=True)
        known = self._known_prompts()
        self.clock.time(task.key, PROMPTS, self.encoder.class_embeddings, *classes)
        self.prompts += self._known_prompts() - known
        # The classes are known now: this is reading and encoding the images, scoring, and the check of the data.
        arguments = (task, data_dir, self.encoder)
        result = self.clock.time(task.key, IMAGES, evaluate_task, *arguments, any_size=True)
        self.samples += result.samples
        self.scores[task.key] = result.metrics["acc1"]

    def read(self, task: Task, data_dir: Path) -> None:
        shards, spec = find_shards(data_dir / task.folder), SampleFormat(num_classes=task.classes)
        batches = self.encoder.batches
        self.samples += self.clock.time(
            task.key, READING, lambda: sum(len(batch.keys) for batch in batches(shards, spec))
        )

    def _known_prompts(self) -> int:
        return sum(len(templates) * len(classes) for templates, classes in self.encoder._class_embeddings.items())


def report(settings: Settings, runs: list[dict[str, Way]]) -> dict:
    """Speeds, ratios, hardware and versions. Both ways must have scored the same samples alike."""
    for ways in runs:
        check_scores(ways, 1e-6 if settings.device == "cpu" else 0.01)
    return {
        "ratio": spread(speed(ways["ours"]) / speed(ways["upstream"]) for ways in runs),
        **({} if settings.reading else work_ratios(settings, runs)),
        "samples": runs[0]["ours"].samples,
        "ways": {name: [details(ways[name]) for ways in runs] for name in runs[0]},
        "arguments": asdict(settings),
        "hardware": hardware(settings.device),
        "load_average": os.getloadavg(),
        "versions": {
            name: version(name) for name in ("torch", "open_clip_torch", "clip-benchmark", "webdataset", "pillow")
        },
    }


def work_ratios(settings: Settings, runs: list[dict[str, Way]]) -> dict:
    """Ratios besides that of whole evaluations."""
    work = (PROMPTS, IMAGES, METADATA)
    upstream = runs[0]["upstream"]
    return {
        "ratio_without_loading_the_model": spread(
            speed(ways["ours"], *work) / speed(ways["upstream"], *work) for ways in runs
        ),
        "at_datacomps_size": {name: at_datacomps_size(tasks, runs) for name, tasks in PROJECTED.items()},
        "prompts_for_each_image": {
            "benchmark": upstream.prompts / upstream.samples,
            "datacomp": sum(prompts(TASKS[key]) for key in settings.tasks)
            / sum(TASKS[key].size for key in settings.tasks),
        },
    }


def check_scores(ways: dict[str, Way], tolerance: float) -> None:
    """On CUDA, batches of other shapes round differently, and a sample near a tie may change sides."""
    for key, expected in ways["upstream"].scores.items():
        found = ways["ours"].scores[key]
        if abs(found - expected) > tolerance:
            raise RuntimeError(f"{key}: accuracy {found} here, {expected} upstream: the two ways do not do the same")


def speed(way: Way, *parts: str) -> float:
    """Samples per second; of reading alone if only that was timed."""
    reading = way.seconds(READING)
    return way.samples / (reading or way.seconds(*parts))


def details(way: Way) -> dict:
    """One way in one repetition."""
    return {
        "samples_per_second": speed(way),
        "prompts": way.prompts,
        "seconds": {f"{task}: {part}": value for (task, part), value in way.clock.seconds.items()},
        "acc1": way.scores,
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def at_datacomps_size(tasks: Sequence[Task], runs: list[dict[str, Way]]) -> dict:
    """Projection of the measured times to DataComp's numbers of images, prompts and loads.

    It assumes that every image and every prompt costs as much as here. Upstream's second pass for metadata is left out.
    """
    distinct = len({(template, name) for task in tasks for name, template in product(*texts(task))})
    numbers = {
        "upstream": {IMAGES: sum(task.size for task in tasks), PROMPTS: sum(map(prompts, tasks)), MODEL: len(tasks)},
        "ours": {IMAGES: sum(task.size for task in tasks), PROMPTS: distinct, MODEL: 1},
    }
    hours: dict[str, list[float]] = {}
    for name, counts in numbers.items():
        hours[name] = [
            sum(count * way.seconds(part) / way.count(part) for part, count in counts.items()) / 3600
            for way in (ways[name] for ways in runs)
        ]
    return {
        "tasks": len(tasks),
        "numbers": numbers,
        "hours": {name: spread(values) for name, values in hours.items()},
        "ratio": spread(up / ours for up, ours in zip(hours["upstream"], hours["ours"], strict=True)),
    }


def texts(task: Task) -> tuple[list[str], list[str]]:
    """clip-benchmark's class names and templates; the right number of stand-ins if it has none."""
    folder = Path(clip_benchmark.__file__).parent / "datasets"
    classnames = json.loads((folder / "en_classnames.json").read_text())
    templates = json.loads((folder / "en_zeroshot_classification_templates.json").read_text())
    name = TEXTS.get(task.key, task.key.removeprefix("vtab/"))
    found = classnames.get(name, [])[: task.classes]
    if len(found) != task.classes or task.key == "objectnet":  # ObjectNet: ImageNet's templates, its own classes
        found = [f"{task.name} class {number}" for number in range(task.classes)]
    return found, templates.get(name, ["a photo of {c}"])


def prompts(task: Task) -> int:
    """Number of a task's prompts."""
    classnames, templates = texts(task)
    return len(classnames) * len(templates)


def make_data(data_dir: Path, task: Task, scale: int, shards: int = 2) -> None:
    """A task in DataComp's format: photographs of 300 to 500 pixels, some of its real classes."""
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
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as archive:
            for index in range(shard, count, shards):
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
