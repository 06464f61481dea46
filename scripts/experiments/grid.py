"""Train losses with a grid of settings on icons or clip arts, and append a JSON line per finished run.

    python -m scripts.experiments.grid GRID.json --data icons-11k --results runs.jsonl [--workers 2]

``scripts.experiments.pairs`` describes the data folder. A family is a list of settings to choose from. For each schedule, all
settings of a family run with the first seed. Then the setting with the highest score on ``val/`` runs with the other seeds.
``test/`` has no influence on this choice. All families must have the same number of settings. Runs with equal seeds have equal
initial weights, order and augmentation. Finished runs are skipped, so you can repeat a killed command.

A setting has ``loss`` and ``options`` for ``create_loss``, and optionally
``lr``: a learning rate that replaces the schedule's;
``lora_rank``: rank of adapters, which are trained instead of the model's weights;
``temperature`` and ``lr_tau``: initial value and learning rate (0: constant) of the temperature, for OpenCLIP's loss;
``captions``: ``name`` to train on canonical names, which are often equal, instead of captions.

``--start`` sets the initial weights of all runs. ``--reference`` sets the embeddings for settings with the option ``steer``.
``scripts.experiments.reference`` writes files for both flags.

With ``"estimation_error": N``, the curve has a point for every epoch, and the estimation error on N training samples is
measured after every epoch (see :func:`estimation_errors`).
"""

import argparse
import hashlib
import itertools
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import Tensor, nn

from openclip_ext.cli import command_line
from openclip_ext.compare import decoded
from openclip_ext.compare.data import StudyData
from openclip_ext.compare.decoded import Cache, KnownTexts
from openclip_ext.compare.pool import ProcessPool
from openclip_ext.compare.trial import Trial, curve_points, warmup_steps
from openclip_ext.compare.trials import Results, Run, Trials, chosen, ranked
from openclip_ext.data.images import ImagePipeline
from openclip_ext.data.reference import REFERENCE_KEYS, EmbeddingStore
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.diagnostics.estimation_error import measure
from openclip_ext.evaluation.ranks import ranks_of_best_match
from openclip_ext.files.writing import file_lock, output_path
from openclip_ext.losses.registry import check_options
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import flags
from openclip_ext.training.config import LossConfig
from openclip_ext.training.model import BuiltModel
from openclip_ext.training.optimizer import create_optimizer, create_schedule
from openclip_ext.training.plan import resolve
from openclip_ext.training.runtime.run_folder import versions
from openclip_ext.training.step import Batch

METRICS = ("name", "image-to-text", "text-to-image")
_GRID_KEYS = {"model", "schedules", "families", "seeds", "estimation_error"}
_SETTING_KEYS = {"loss", "options", "lr", "lora_rank", "temperature", "lr_tau", "captions"}
_SHIFT = 2  # maximum random shift of an image in each direction, in pixels
_IMAGE_SIZE = 32  # input size of the demo models in pixels; stored images may be twice as large
# Training flags of all runs. The grid sets the learning rate and the length.
_FLAGS = "--precision fp32 --wd 0.2 --beta1 0.9 --beta2 0.999 --eps 1e-8 --warmup 100 --workers 0 --logs none"


@dataclass(frozen=True)
class Contest:
    """A comparison of families of settings. All families are tuned equally and use the same seeds.

    ``families`` contains, for each family, the runs of all its settings with the first seed. The first family is the baseline.
    """

    families: Mapping[str, Sequence[Run]]
    seeds: Sequence[int]

    def best(self, family: str, results: Results) -> list[Run]:
        """Return the runs of the best setting with all seeds; empty before the best setting is known."""
        return [replace(run, seed=seed) for run in ranked(self.families[family], results)[:1] for seed in self.seeds]

    def pending(self, results: Results) -> list[Run]:
        """Return the runs that can start now, the most urgent first."""
        return [run for run in chosen(self.families, self.seeds, results) if run.id not in results]


def contests(grid: Mapping[str, Any], data: str) -> dict[str, Contest]:
    """Return the comparison of the families for each schedule of a grid file."""
    for what, content, known in (
        ("a grid", grid, _GRID_KEYS),
        *(("a setting", setting, _SETTING_KEYS) for tried in grid["families"].values() for setting in tried),
    ):
        if unknown := sorted(content.keys() - known):
            raise ValueError(f"{what} cannot have {', '.join(unknown)}: expected only {', '.join(sorted(known))}")
    sizes = {family: len(settings) for family, settings in grid["families"].items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"expected equally many settings in all families, found {sizes}")
    found = {}
    for schedule, length in grid["schedules"].items():
        about = {"data": data, "model": grid["model"], "schedule": schedule, **length, "seed": grid["seeds"][0]}
        families = {
            family: [
                Run(**about | {"lr": setting.get("lr", length["lr"])}, family=family, setting=setting)
                for setting in settings
            ]
            for family, settings in grid["families"].items()
        }
        found[schedule] = Contest(families, grid["seeds"])
    return found


def pending(grid: Mapping[str, Any], data: str, results: Results) -> list[Run]:
    """Return the runs that can start now, ordered by schedule."""
    return [run for contest in contests(grid, data).values() for run in contest.pending(results)]


def data_digest(data: Path) -> str:
    return hashlib.sha256((data / "recipe.json").read_bytes()).hexdigest()[:12]


def load_data(data: Path, model: str) -> StudyData:
    """Decode the splits to ``data/cache``, unless it is complete, and tokenize the captions and class names."""
    names = tuple((data / "names.txt").read_text().splitlines())
    train, val, test = (
        decoded.write_cache(DataSpec(f"{data}/{split}/*.tar"), data / "cache" / split, _IMAGE_SIZE, classes=len(names))
        for split in ("train", "val", "test")
    )
    texts = itertools.chain(names, train.captions(), val.captions(), test.captions())
    known = KnownTexts(texts, open_clip.get_tokenizer(model))
    return StudyData(train, len(train), val, test, names, known, data_digest(data))


def classes_of(samples: Cache) -> Tensor:
    """Return the class numbers ``(N,)`` of the samples."""
    classes = samples.classes()
    assert classes is not None, "load_data reads them"
    return torch.tensor(classes)


class GridRun(Trial):
    """A run of a grid, with the loss's default seed and temperature learning rate instead of the training program's.

    Args:
        weights: File with the initial weights. None (default) means random weights.
    """

    def __init__(self, data: StudyData, run: Run, device: torch.device, weights: Path | None = None) -> None:
        self.run, self.data = run, data
        config = flags.parse(_argv(run, weights))
        plan, options = resolve(config), run.setting.get("options", {})
        loss = LossConfig(run.setting["loss"], options, {"epochs": run.epochs, **options})
        super().__init__(config, replace(plan, loss=loss), data, device, with_averaged_images)
        scale, trainer = self.model.logit_scale, self.trainer
        if hasattr(trainer.loss, "attach"):  # a loss with an encoder of its own, in examples/other_losses
            trainer.loss.attach(self.model)
        if "temperature" in run.setting:
            nn.init.constant_(scale, -math.log(run.setting["temperature"]))
        rate = run.setting.get("lr_tau", check_options(loss.name, **options).logit_scale_lr)
        scale.requires_grad_(scale.requires_grad and rate != 0)
        optimizer = create_optimizer(self.model, plan.optimizer, rate, trainer.loss.model_head())
        trainer.step.optimizer = optimizer
        schedule = replace(plan.schedule, warmup=warmup_steps(plan.schedule, self.steps))
        trainer.schedule = create_schedule(schedule, optimizer, trainer.steps_per_epoch, rate)

    def run_steps(self, batches: Callable[[int], Iterator[Batch]] | None = None) -> Iterator[int]:
        train, tokenizer = self.data.train, self.built.tokenizer
        assert train is not None, "load_data decodes it"
        texts = train.captions()
        if self.run.setting.get("captions") == "name":
            texts = [self.data.names[number] for number in classes_of(train)]
        images = ShiftedImages(train, tokenizer(texts), self.run.seed, self.batch, self.data.reference)
        return super().run_steps(batches or images.iterate)


def with_averaged_images(built: BuiltModel) -> BuiltModel:
    """Return a model whose images are stored images, reduced by averaging (see :func:`averaged`)."""

    def for_scores(image: Any) -> Tensor:
        return averaged(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], built.model.visual)[0]

    normalize = partial(averaged, visual=built.model.visual)
    images = ImagePipeline(built.images.decode, built.images.transform, normalize)
    return replace(built, images=images, preprocess_val=for_scores)


class ShiftedImages:
    """Loader of images of equal size, randomly shifted on a white background, with caption tokens ``texts`` ``(N, L)``.

    ``seed`` determines the order and the shifts. An incomplete last batch of an epoch is dropped.
    """

    def __init__(
        self, samples: Cache, texts: Tensor, seed: int, batch_size: int, reference: EmbeddingStore | None = None
    ) -> None:
        self._samples, self._texts, self._batch_size, self._reference = samples, texts, batch_size, reference
        self._labels = texts.unique(dim=0, return_inverse=True)[1]
        self._random = torch.Generator().manual_seed(seed)

    def iterate(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch. Call this method for all epochs in order."""
        order = torch.randperm(len(self._labels), generator=self._random)
        for rows in order.split(self._batch_size)[: len(order) // self._batch_size]:
            shifts = torch.randint(-_SHIFT, _SHIFT + 1, (len(rows), 2), generator=self._random)
            batch = {
                "image": shifted(stored_images(self._samples, rows.tolist()), shifts),
                "text": self._texts[rows],
                "index": rows,
                "caption_hash": self._labels[rows],
            }
            if self._reference is not None:
                batch |= dict(zip(REFERENCE_KEYS, self._reference.rows(rows), strict=True))
            yield batch


def stored_images(samples: Cache, rows: Sequence[int]) -> Tensor:
    """Return stored images ``(B, 3, S, S)`` uint8."""
    return torch.from_numpy(np.stack([samples.pixels(row) for row in rows])).permute(0, 3, 1, 2).contiguous()


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift images by ``shifts`` ``(B, 2)``, which are up to two pixels in each direction."""
    size = images.shape[-1]
    padded = nn.functional.pad(images, [_SHIFT] * 4, value=255)
    places = (_SHIFT + shifts).tolist()
    return torch.stack([one[:, y : y + size, x : x + size] for (y, x), one in zip(places, padded, strict=True)])


def averaged(images: Tensor, visual: Any) -> Tensor:
    """Return the model's input: images ``(B, 3, S, S)``, reduced to the model's size by averaging, and normalized."""
    wanted = max(visual.image_size) if isinstance(visual.image_size, tuple) else visual.image_size
    factor, rest = divmod(images.shape[-1], wanted)
    if rest:
        raise ValueError(f"expected images whose size is a multiple of {wanted} pixels, found {images.shape[-1]}")
    mean, std = (
        images.new_tensor(value, dtype=torch.float32).view(3, 1, 1) for value in (visual.image_mean, visual.image_std)
    )
    return (nn.functional.avg_pool2d(images.float(), factor) / 255 - mean) / std


def score(training: Trial, samples: Cache, names: Sequence[str]) -> dict[str, float]:
    """Return the top-1 accuracy among the split's names, R@1 in both directions, and the mean of these three scores.

    In retrieval, every sample with the query's name counts as correct.
    """
    present, labels = classes_of(samples).unique(return_inverse=True)
    images, texts, prompts = training.embed(samples, samples.captions(), [names[number] for number in present])
    names_of_images = torch.stack([torch.arange(len(labels)), labels], dim=1)
    same_name = (labels[:, None] == labels).nonzero()
    ranks = {
        "name": ranks_of_best_match(images, prompts, names_of_images),
        "image-to-text": ranks_of_best_match(images, texts, same_name),
        "text-to-image": ranks_of_best_match(texts, images, same_name),
    }
    values = {metric: float(ranks[metric].hits().mean()) for metric in METRICS}
    return values | {"mean": statistics.fmean(values.values())}


def estimation_errors(training: Trial, samples: Cache, count: int) -> dict[str, Any]:
    """Return the estimation errors of the log-normalizers on ``count`` training samples (see ``estimation_error.measure``)."""
    rows = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[:count].tolist()
    part = samples.part(rows)
    images, texts = training.embed(part, part.captions())
    scale = training.model.logit_scale.exp()
    found = measure(training.trainer.loss, images, texts, scale, batch_size=training.batch, index=rows, anchors=2000)
    return {
        "minibatch": found.minibatch.mean,
        "estimator": None if found.estimator is None else found.estimator.mean,
        "temperature": found.temperature,
    }


def train(
    data: StudyData,
    run: Run,
    device: torch.device,
    seen: Callable[[int], None],
    measured: int = 0,
    weights: Path | None = None,
) -> dict[str, Any]:
    """Train and score one run; return its row of results.

    Args:
        measured: Number of training samples for the estimation error after each epoch. 0 (default) means no measurement.
        weights: File with the initial weights. None (default) means random weights.
    """
    torch.set_num_threads(1)
    start, start_cpu = time.perf_counter(), time.process_time()
    training = GridRun(data, run, device, weights)
    each_epoch = {training.trainer.steps_per_epoch * epoch for epoch in range(1, run.epochs + 1)}
    points = each_epoch if measured else curve_points(training.steps)
    errors, curve = [], []
    for step in training.run_steps():
        seen(training.batch)
        if step not in points:
            continue
        if measured:
            assert data.train is not None, "load_data decodes it"
            errors.append(estimation_errors(training, data.train, measured))
        samples = step * training.batch
        curve.append([samples, training.seconds, score(training, data.val, data.names)["mean"]])
    return {
        "id": run.id,
        **asdict(run),
        "val": score(training, data.val, data.names),
        "test": score(training, data.test, data.names),
        "curve": curve,
        **({"estimation_errors": errors} if measured else {}),
        "temperature": math.exp(-training.model.logit_scale.item()),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - start_cpu, 1),
        "environment": environment(),
    }


def _argv(run: Run, weights: Path | None) -> list[str]:
    """Return the training flags of a run, without the options of its loss."""
    argv = ["--train-data", "unused.tar", "--model", run.model, "--batch-size", str(run.batch_size), *_FLAGS.split()]
    argv += ["--loss", run.setting["loss"], "--lr", str(run.lr), "--epochs", str(run.epochs), "--seed", str(run.seed)]
    argv += [] if weights is None else ["--pretrained", str(weights)]
    return argv + (["--lora-rank", str(run.setting["lora_rank"])] if "lora_rank" in run.setting else [])


def environment() -> dict[str, str]:
    """Return the names of the CPU and GPU, and the versions of packages, because these may affect results."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": (models or [platform.processor()])[0], **gpu, **versions()}


def run_all(
    grid: Mapping[str, Any],
    data: Path,
    path: Path,
    workers: int,
    reference: Path | None = None,
    weights: Path | None = None,
) -> list[str]:
    """Execute all runs of a grid; return the errors of failed runs."""
    add_model_configs()
    results = Trials(path)

    def pending_tasks() -> dict[str, Any]:
        measured = grid.get("estimation_error", 0)
        runs = pending(grid, digest, results.known)
        return {run.id: partial(train, loaded, run, measured=measured, weights=weights) for run in runs}

    def keep(name: str, row: dict[str, Any] | None, failure: str) -> None:
        results.keep(name, row, failure)
        outcome = f"a run failed: {failure.strip()}"
        if row is not None:
            outcome = f"{row['schedule']}, {row['family']}, seed {row['seed']}: val {row['val']['mean']:.4f}"
        print(f"{name}: {outcome}; {len(results.done)} runs finished", flush=True)

    loaded = load_data(data, grid["model"])
    digest = loaded.digest
    if weights is not None:
        digest += f", from {hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}"
    if reference is not None:
        loaded = replace(loaded, reference=EmbeddingStore.open(reference, loaded.num_samples))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ProcessPool(workers, device).work_off(pending_tasks, keep)
    return [row["failed"] for row in results.failed.values()]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("grid", type=Path, help="JSON file with model, schedules, families and seeds")
    parser.add_argument("--data", type=Path, required=True, help="folder from scripts.experiments.icons or .clip_arts")
    parser.add_argument(
        "--results", type=output_path, required=True, help="JSON lines file to which finished runs are added"
    )
    parser.add_argument("--workers", type=int, default=2, help="number of parallel runs, each on one core or GPU")
    parser.add_argument("--start", type=Path, metavar="FILE", help="file with the initial weights of all models")
    parser.add_argument("--reference", type=Path, help="folder with embeddings of the training data")
    args = parser.parse_args(argv)
    with file_lock(args.results.parent, f".{args.results.name}.lock"):
        grid = json.loads(args.grid.read_text())
        failures = run_all(grid, args.data, args.results, args.workers, args.reference, args.start)
    if failures:
        sys.exit(f"{len(failures)} runs failed. Repeat the command to run them again")


if __name__ == "__main__":
    command_line.run(main)
