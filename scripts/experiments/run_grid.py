"""Train a grid of losses on icons or clip arts in a plain loop, equally tuned, and append one JSON line for each finished run.

    .venv/bin/python -m scripts.experiments.run_grid GRID.json --data icons-11k --results runs.jsonl [--workers 2]

The data are a folder as ``scripts.experiments.pairs`` describes it. For each schedule and family of losses the queue holds

    stage 1   every setting of the family, at the schedule's learning rate, with the first seed
    stage 2   the best setting at the other learning rates
    stage 3   the best of all of these with the other seeds

"Best" is by the score on ``val/``; ``test/`` is of other sets and decides nothing. All families must have equally many
settings. Equal seeds have the same start weights, order and augmentation. Finished runs are skipped and a killed call
loses only the runs under way: call it again.

A setting: ``loss`` and ``options`` for ``create_loss``, and optionally
``temperature`` and ``lr_tau``: of the model's logit scale, for OpenCLIP's own loss, which has no such options (0: constant),
``captions``: ``name`` to train on the canonical names, which are often equal, instead of the captions.
"""

import argparse
import fcntl
import hashlib
import io
import json
import logging
import math
import multiprocessing
import platform
import statistics
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from torch import Tensor, nn

import openclip_ext
from openclip_ext.losses.registry import options_used_by
from openclip_ext.model_configs import add_model_configs
from openclip_ext.text_tower import find_causal_tower, shrink
from scripts.experiments.pairs import RECIPE, SPLITS

METRICS = ("name", "image-to-text", "text-to-image")
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.2
CURVE_POINTS = 4
SHIFT = 2  # random shift of the stored images in pixels, each way


@dataclass(frozen=True)
class Run:
    """One training run; everything that its numbers follow from, but the code."""

    data: str
    model: str
    schedule: str
    batch_size: int
    epochs: int
    lr: float
    seed: int
    family: str
    setting: dict[str, Any]

    @property
    def id(self) -> str:
        """Equal for equal runs, whatever their family and schedule are called."""
        content = {key: value for key, value in asdict(self).items() if key not in ("family", "schedule")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def plan(grid: dict[str, Any], data: str, results: dict[str, dict[str, Any]]) -> list[Run]:
    """The runs that can start now, the most urgent first: schedule by schedule, stage by stage, one of each family in turn.

    Args:
        grid: the parsed grid file.
        data: what the data set was made from.
        results: finished runs' lines by id.

    Raises:
        ValueError: families with different numbers of settings.
    """
    sizes = {family: len(settings) for family, settings in grid["families"].items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"families must have equally many settings, or the tuning is not equal: found {sizes}")
    pending = []
    for number, schedule in enumerate(grid["schedules"]):
        for family in grid["families"]:
            for stage, runs in enumerate(stages(grid, schedule, family, data, results)):
                pending += [((number, stage, rank), run) for rank, run in enumerate(runs) if run.id not in results]
    return [run for _, run in sorted(pending, key=lambda entry: entry[0])]


def stages(
    grid: dict[str, Any], schedule: str, family: str, data: str, results: dict[str, dict[str, Any]]
) -> Iterator[list[Run]]:
    """The runs of a family on a schedule, stage by stage as far as they are decided."""
    base = {"data": data, "model": grid["model"], "schedule": schedule, "family": family, **grid["schedules"][schedule]}
    first_seed, *other_seeds = grid["seeds"]
    tried = [Run(**base, setting=setting, seed=first_seed) for setting in grid["families"][family]]
    yield tried
    best = best_run(tried, results)
    if best is None:
        return
    other_rates = [Run(**asdict(best) | {"lr": best.lr * factor}) for factor in grid["lr_factors"]]
    yield other_rates
    best = best_run([*tried, *other_rates], results)
    if best is not None:
        yield [Run(**asdict(best) | {"seed": seed}) for seed in other_seeds]


def best_run(runs: list[Run], results: dict[str, dict[str, Any]]) -> Run | None:
    """The run with the best score on the validation sets; None while some are not finished."""
    if any(run.id not in results for run in runs):
        return None
    return max(runs, key=lambda run: results[run.id]["val"]["mean"])


@dataclass(frozen=True)
class SplitData:
    """A split in memory: images ``(N, 3, S, S)`` uint8, token numbers ``(N, L)`` and each sample's class ``(N,)``."""

    images: Tensor
    texts: Tensor
    classes: Tensor


def load_split(data: Path, split: str, names: list[str], model: str) -> SplitData:
    """Decode a split, once; afterwards it is read from ``data/cache``."""
    cache = data / "cache" / f"{split}-{model}.pt"
    if not cache.exists():
        number_of = {name: number for number, name in enumerate(names)}
        images, captions, classes = zip(*read_shards(data / split), strict=True)
        content = {
            "images": torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(),
            "texts": open_clip.get_tokenizer(model)(list(captions)),
            "classes": torch.tensor([number_of[name] for name in classes]),
        }
        cache.parent.mkdir(exist_ok=True)
        torch.save(content, cache.with_suffix(".partial"))
        cache.with_suffix(".partial").rename(cache)
    return SplitData(**torch.load(cache, mmap=True, weights_only=True))


def read_shards(folder: Path) -> Iterator[tuple[np.ndarray, str, str]]:
    """Image, caption and canonical name of each sample, in order."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        for key in dict.fromkeys(name.split(".")[0] for name in members):
            image = np.asarray(Image.open(io.BytesIO(members[f"{key}.png"])).convert("RGB"))
            yield image, members[f"{key}.txt"].decode(), json.loads(members[f"{key}.json"])["name"]


class Pairs:
    """The splits as a model wants them: images made smaller by averaging, and the names as prompts.

    Texts are numbered by the tokens that occur and cut to the longest one: see ``shrink_text_tower``.

    Attributes:
        vocabulary: the tokens that occur, in order.
        splits: the data by split.
        names: token numbers of the canonical names.
    """

    def __init__(self, data: Path, model: str) -> None:
        names = (data / "names.txt").read_text().splitlines()
        splits = {split: load_split(data, split, names, model) for split in SPLITS}
        prompts = open_clip.get_tokenizer(model)(names)
        every = torch.cat([prompts, *(split.texts for split in splits.values())])
        self.vocabulary = every.unique()
        self.length = int((every != 0).sum(dim=1).max())
        self.splits = {name: replace(split, texts=self._renumbered(split.texts)) for name, split in splits.items()}
        self.names = self._renumbered(prompts)

    def _renumbered(self, texts: Tensor) -> Tensor:
        return torch.searchsorted(self.vocabulary, texts[:, : self.length].contiguous())

    def shrink_text_tower(self, model: nn.Module) -> None:
        """Leave out of an OpenCLIP model the tokens and positions that occur in no text."""
        tower = find_causal_tower(model)
        assert tower is not None, "the grids' models have OpenCLIP's own text tower"
        shrink(tower[1], self.vocabulary, self.length)

    def images(self, split: str, rows: Tensor, model: nn.Module, shifts: Tensor | None = None) -> Tensor:
        """Model inputs ``(B, 3, S', S')``, shifted by ``(B, 2)`` pixels of the stored size (white comes in).

        Raises:
            ValueError: the stored size is no multiple of the model's.
        """
        stored = self.splits[split].images[rows]
        if shifts is not None:
            size = stored.shape[-1]
            padded = nn.functional.pad(stored, [SHIFT] * 4, value=255)
            crops = ((SHIFT + shifts).tolist(), padded)
            stored = torch.stack([image[:, y : y + size, x : x + size] for (y, x), image in zip(*crops, strict=True)])
        visual = model.visual
        wanted = max(visual.image_size) if isinstance(visual.image_size, tuple) else visual.image_size
        factor, rest = divmod(stored.shape[-1], wanted)
        if rest:
            raise ValueError(f"images of {stored.shape[-1]} pixels: expected a multiple of {wanted}")
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (visual.image_mean, visual.image_std))
        return (nn.functional.avg_pool2d(stored.float(), factor) / 255 - mean) / std

    @torch.no_grad()
    def score(self, model: nn.Module, split: str, batch_size: int = 500) -> dict[str, float]:
        """Top-1 of images among the split's names, R@1 either way (any sample of the same name is right), their mean."""
        data = self.splits[split]
        model.eval()
        rows = torch.arange(len(data.classes)).split(batch_size)
        images = torch.cat([model.encode_image(self.images(split, part, model), normalize=True) for part in rows])
        texts = torch.cat([model.encode_text(data.texts[part], normalize=True) for part in rows])
        present, wanted = data.classes.unique(return_inverse=True)
        names = torch.cat([model.encode_text(self.names[part], normalize=True) for part in present.split(batch_size)])
        model.train()
        similarities = images @ texts.T
        scores = {
            "name": (images @ names.T).argmax(dim=1) == wanted,
            "image-to-text": wanted[similarities.argmax(dim=1)] == wanted,
            "text-to-image": wanted[similarities.argmax(dim=0)] == wanted,
        }
        values = {metric: scores[metric].double().mean().item() for metric in METRICS}
        return values | {"mean": statistics.fmean(values.values())}


def train(run: Run, data: str) -> dict[str, Any]:
    """Train and score one run; returns its line of the results."""
    torch.set_num_threads(1)
    add_model_configs()
    pairs = Pairs(Path(data), run.model)
    start, start_cpu = time.perf_counter(), time.process_time()
    trainer = _Trainer(run, pairs)
    curve, points = [], {round(run.epochs * (point + 1) / CURVE_POINTS) for point in range(CURVE_POINTS)}
    for epoch in range(run.epochs):
        trainer.epoch(epoch)
        if epoch + 1 in points:
            curve.append([epoch + 1, pairs.score(trainer.model, "val")["mean"]])
    return {
        "id": run.id,
        **asdict(run),
        "val": pairs.score(trainer.model, "val"),
        "test": pairs.score(trainer.model, "test"),
        "curve": curve,
        "temperature": math.exp(-trainer.model.logit_scale.item()),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - start_cpu, 1),
        "environment": environment(),
    }


class _Trainer:
    """A plain OpenCLIP loop around a loss of this package."""

    def __init__(self, run: Run, pairs: Pairs) -> None:
        self.run, self.pairs = run, pairs
        torch.manual_seed(run.seed)
        self.model = open_clip.create_model(run.model, output_dict=True)
        pairs.shrink_text_tower(self.model)
        self.samples = len(pairs.splits["train"].classes)
        setting = run.setting
        self.loss = openclip_ext.create_loss(
            setting["loss"], embed_dim=_embed_dim(self.model), num_samples=self.samples, **self._options()
        )
        train = pairs.splits["train"]
        self.texts = pairs.names[train.classes] if setting.get("captions") == "name" else train.texts
        self.labels = self.texts.unique(dim=0, return_inverse=True)[1]
        self.random = torch.Generator().manual_seed(run.seed)  # order and shifts: the same for all losses
        start = -math.log(setting["temperature"]) if "temperature" in setting else self.loss.initial_logit_scale
        if start is not None:
            nn.init.constant_(self.model.logit_scale, start)
        lr_tau = setting.get("lr_tau", self.loss.logit_scale_lr)
        self.model.logit_scale.requires_grad_(self.loss.learns_logit_scale and lr_tau != 0)
        self.optimizer = create_optimizer(self.model, run.lr, lr_tau)
        self.steps_per_epoch = self.samples // run.batch_size
        self.step = 0

    def _options(self) -> dict[str, Any]:
        """The setting's options, and the length of the run where the loss's schedules span it."""
        options = self.run.setting.get("options", {})
        takes_epochs = "epochs" in options_of(self.run.setting)
        return options | ({"epochs": self.run.epochs} if takes_epochs else {})

    def epoch(self, epoch: int) -> None:
        """Train one epoch; the last, incomplete batch is left out."""
        self.loss.start_epoch(epoch)
        order = torch.randperm(self.samples, generator=self.random)
        for rows in order.split(self.run.batch_size)[: self.steps_per_epoch]:
            self._step(rows)

    def _step(self, rows: Tensor) -> None:
        self._set_learning_rates()
        shifts = torch.randint(-SHIFT, SHIFT + 1, (len(rows), 2), generator=self.random)
        images = self.pairs.images("train", rows, self.model, shifts)
        outputs = self.model(images, self.texts[rows])
        outputs = {name: value for name, value in outputs.items() if value is not None}
        positives = {"positives": self.labels[rows]} if self.loss.needs_positives else {}
        terms = self.loss(**outputs, **positives, index=rows, output_dict=True)
        self.optimizer.zero_grad(set_to_none=True)
        sum(terms.values()).backward()
        before = self.model.logit_scale.detach().clone()
        self.optimizer.step()
        with torch.no_grad():
            self.loss.finish_logit_scale_step(self.model.logit_scale, before)
        self.step += 1

    def _set_learning_rates(self) -> None:
        """Linear warm-up, then a cosine to 0; a rate of the temperature's own stays as it is."""
        total = self.steps_per_epoch * self.run.epochs
        warmup = min(WARMUP_STEPS, total // 10)
        if self.step < warmup:
            factor = (self.step + 1) / warmup
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (self.step - warmup) / (total - warmup)))
        for group in self.optimizer.param_groups:
            if not group["constant"]:
                group["lr"] = self.run.lr * factor


def options_of(setting: dict[str, Any]) -> dict[str, Any]:
    """The options that a setting's loss takes."""
    options = setting.get("options", {})
    return options_used_by(setting["loss"], **options)


def create_optimizer(model: nn.Module, lr: float, lr_tau: float | None) -> torch.optim.Optimizer:
    """AdamW with OpenCLIP's groups: no decay for gains and biases; the temperature by itself where it has its own rate."""
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no decay": [], "temperature": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name == "logit_scale" and lr_tau is not None:
            groups["temperature"].append(parameter)
        elif parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale")):
            groups["no decay"].append(parameter)
        else:
            groups["decay"].append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": WEIGHT_DECAY if kind == "decay" else 0.0,
                "lr": lr_tau if kind == "temperature" else lr,
                "constant": kind == "temperature",
            }
            for kind, parameters in groups.items()
            if parameters
        ],
        fused=True,
    )


def _embed_dim(model: nn.Module) -> int:
    return model.text_projection.shape[1]


def environment() -> dict[str, str]:
    """What else the numbers may depend on."""
    return {
        "cpu": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "openclip_ext": openclip_ext.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Finished runs' lines by id; a last line that was cut off does not count."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for number, line in enumerate(lines):
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                continue
            raise
        found[result["id"]] = result
    return found


def run_all(grid: dict[str, Any], data: Path, path: Path, workers: int) -> None:
    """Work on the queue until it is empty."""
    digest = data_digest(data)
    add_model_configs()
    Pairs(data, grid["model"])  # decoded before the workers start
    context = multiprocessing.get_context("spawn")
    with path.open("a") as file, ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one call at a time appends
        file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a line that was cut off
        results = read_results(path)
        under_way: dict[Any, str] = {}
        while True:
            pending = [run for run in plan(grid, digest, results) if run.id not in under_way.values()]
            for run in pending[: workers - len(under_way)]:
                under_way[pool.submit(train, run, str(data))] = run.id
            if not under_way:
                return
            for job in wait(under_way, return_when=FIRST_COMPLETED).done:
                del under_way[job]
                result = job.result()
                results[result["id"]] = result
                file.write(json.dumps(result) + "\n")
                file.flush()
                print(f"{describe(result)}; {len(results)} runs finished", flush=True)


def data_digest(data: Path) -> str:
    """A name for what the data were made from."""
    return hashlib.sha256((data / RECIPE).read_bytes()).hexdigest()[:12]


def _start_worker() -> None:
    logging.disable(logging.WARNING)  # OpenCLIP warns that a new model has random weights


def describe(result: dict[str, Any]) -> str:
    setting = {key: value for key, value in result["setting"].items() if key != "loss"}
    return (
        f"{result['schedule']}, {result['family']} {json.dumps(setting)}, lr {result['lr']:g}, seed {result['seed']}: "
        f"val {result['val']['mean']:.4f}, test {result['test']['mean']:.4f}, τ {result['temperature']:.3f}, "
        f"{result['seconds']:.0f} s"
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.experiments.run_grid", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("grid", type=Path, help="JSON: model, schedules, families, lr_factors, seeds")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that scripts.experiments.icons or .clip_arts made"
    )
    parser.add_argument("--results", type=Path, required=True, help="file of finished runs; lines are appended")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on one core")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    grid = json.loads(args.grid.read_text())
    try:
        run_all(grid, args.data, args.results, args.workers)
    except BlockingIOError:
        sys.exit(f"error: another call is appending to {args.results}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
