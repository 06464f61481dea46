"""One run of the pilot: train with the parts of the ordinary trainer, then score. Runs in a process of its own."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import open_clip
import torch
from torch import Tensor

from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.data.train_loader import TrainLoader
from openclip_ext.diagnostics import estimation_error
from openclip_ext.diagnostics.command_line import without_warnings
from openclip_ext.diagnostics.compare import space
from openclip_ext.diagnostics.compare.design import SEEDS, Run
from openclip_ext.diagnostics.compare.samples import Cache, PilotData, Texts
from openclip_ext.diagnostics.compare.space import BASELINE, Configuration, Setting
from openclip_ext.diagnostics.finished_run import embed
from openclip_ext.losses import registry
from openclip_ext.losses.heads import with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.retrieval import ranks_of_best_match
from openclip_ext.training.config import TrainingConfig
from openclip_ext.training.flags import PARTS
from openclip_ext.training.model import (
    BuiltModel,
    LossConfig,
    build_loss,
    build_model,
    load_pretrained_heads,
    prepare_for,
)
from openclip_ext.training.optimizer import create_optimizer, create_schedule, logit_scale_lr
from openclip_ext.training.step import Batch, TrainStep

IMAGE_TO_TEXT, TEXT_TO_IMAGE, ZERO_SHOT = "image_to_text_R@1", "text_to_image_R@1", "zero_shot"
RETRIEVAL = (IMAGE_TO_TEXT, TEXT_TO_IMAGE)
# Batches, at least, that exact normalizers are taken over.
_BATCHES = 8
_CURVE = (0.125, 0.25, 0.5)  # and the end
CURVE_POINTS = len(_CURVE) + 1
# The loss's schedules and the learning rate's leave this share of a run at most to the warm-up.
_WARMUP = 0.1
_CHUNK = 256


@dataclass(frozen=True)
class Pilot:
    """What all runs share.

    Attributes:
        config: the training command line's; its loss, rates and lengths are each run's own.
        loss_options: given for all losses that use them.
        data: what to train on and to score with.
        population, anchors: samples that normalizers are compared over, and how many of them are compared.
    """

    config: TrainingConfig
    loss_options: dict[str, Any]
    data: PilotData
    population: int
    anchors: int

    @property
    def batch(self) -> int:
        """Samples of an optimizer step."""
        return self.config.loading.batch_size * self.config.loading.accum_freq


@dataclass(frozen=True)
class Length:
    """Epochs of equal length that a number of samples makes, none longer than the data set."""

    epochs: int
    epoch_samples: int

    @classmethod
    def of(cls, samples: int, batch: int, num_samples: int) -> "Length":
        longest, steps = num_samples // batch, samples // batch
        # One of the two comes close to the number that was asked; whole steps and equal epochs leave out the rest.
        counts = (max(1, steps // longest), math.ceil(steps / longest))
        epochs = max(counts, key=lambda count: count * min(longest, steps // count))
        return cls(epochs, min(longest, steps // epochs) * batch)

    def steps(self, batch: int) -> int:
        return self.epochs * (self.epoch_samples // batch)


def run_pilot(pilot: Pilot, run: Run, device: torch.device, seen: Callable[[int], None]) -> dict[str, Any]:
    """Train and score; returns the run's line of the results.

    Args:
        pilot: what all runs share.
        run: which.
        device: where to.
        seen: is told of the samples of each step.
    """
    start = time.perf_counter()
    trained = _Training(pilot, run, device)
    clock = _Clock()
    points = {max(1, round(share * trained.steps)) for share in _CURVE} if run.final else set()
    curve = []
    for step, samples in enumerate(trained.run_steps(), start=1):
        seen(samples)
        if step in points:
            clock.pause()
            curve.append([step * pilot.batch, clock.seconds, recall(trained.score(pilot.data.verdict))])
            clock.go_on()
    clock.pause()
    line = {"id": run.id, **asdict(run), "options": trained.options, "steps": trained.steps, "seconds": clock.seconds}
    line |= {"length": asdict(trained.length), "temperature": trained.temperature(), "diverged": trained.diverged}
    line |= {"state_bytes": sum(asdict(trained.loss.state_size()).values()), "memory_bytes": _peak_memory(device)}
    scoring = time.perf_counter()
    line["choice"] = mean_reciprocal_rank(trained.score(pilot.data.choice))
    if run.final:
        found = trained.score(pilot.data.verdict, pilot.data.names)
        curve.append([trained.steps * pilot.batch, clock.seconds, recall(found)])
        line |= {"curve": curve, "hits": {name: _packed(ranks) for name, ranks in found.items()}}
        normalizers = trained.normalizers(pilot.population, pilot.anchors) if run.seed == SEEDS[0] else None
        line |= {} if normalizers is None else {"normalizers": normalizers}
    now = time.perf_counter()
    return line | {"scoring_seconds": now - scoring, "all_seconds": now - start}


def measure_pace(
    pilot: Pilot, run: Run, seconds: float, device: torch.device, seen: Callable[[int], None]
) -> dict[str, Any]:
    """Seconds for each sample of a run that is given up after some seconds, and of what comes before and after."""
    start = time.perf_counter()
    trained = _Training(pilot, run, device)
    building = time.perf_counter() - start
    steps, first, now = trained.run_steps(), 0.0, 0.0
    count = 0
    for count, _ in enumerate(steps):
        _synchronize(device)
        now = time.perf_counter()
        if count == 0:  # the first is slower than the rest
            first = now
        elif now - first > seconds:
            break
    pace = (now - first) / max(1, count) / pilot.batch
    scoring = time.perf_counter()
    trained.score(pilot.data.choice)
    scored = time.perf_counter()
    return {"loss": run.loss, "per_sample": pace, "building": building, "scoring": scored - scoring}


def judge_batch(pilot: Pilot, device: torch.device, seen: Callable[[int], None]) -> dict[str, Any]:
    """How wrong a batch is about its normalizers, with the model as it starts."""
    start = time.perf_counter()
    untrained = Configuration(BASELINE, Setting(), 1.0)
    started = _Training(pilot, Run("", untrained, pilot.config.optimizer.lr, 0, pilot.batch, False), device)
    found = started.normalizers(pilot.population, pilot.anchors)
    if found is None:
        raise ValueError("the model's embeddings are not finite before the first step")
    return found | {"seconds": time.perf_counter() - start}


def warmup_steps(asked: int, steps: int) -> int:
    """Of a run of so many steps: what ``--warmup`` says, but not more than a tenth."""
    return min(asked, round(steps * _WARMUP))


class _Training:
    """Model, loss, optimizer and loader of a run."""

    def __init__(self, pilot: Pilot, run: Run, device: torch.device) -> None:
        add_model_configs()
        config, data = pilot.config, pilot.data
        self.pilot, self.device = pilot, device
        self.length = Length.of(run.samples, pilot.batch, data.num_samples)
        self.steps = self.length.steps(pilot.batch)
        with without_warnings():
            built = build_model(config.model, device, run.seed)
        self.model: Any = built.model
        self.texts = Texts(data.tokens, built.tokenizer, built.model)
        self.built = built
        loss_config = self._loss_config(run)
        self.options = dict(loss_config.options)
        self.loss = build_loss(loss_config, config.model.name, built.model, data.num_samples, device)
        self._start(loss_config, built)
        rate = logit_scale_lr(self.loss.logit_scale_lr, self.steps)
        optimizer = create_optimizer(self.model, replace(config.optimizer, lr=run.lr), rate, self.loss.model_head())
        warmup = warmup_steps(config.schedule.warmup, self.steps)
        schedule = replace(config.schedule, lr=run.lr, epochs=self.length.epochs, warmup=warmup)
        self.set_rates = create_schedule(
            schedule,
            optimizer,
            self.length.epoch_samples // pilot.batch,
            rate,
        )
        self.step = TrainStep(
            self.model,
            self.loss,
            optimizer,
            config.step.settings(device, built.images.normalize),
            config.step.scaler(device),
        )
        self.loader = self._loader(run.seed, built.images.transform, self.length.epoch_samples)
        self.diverged = False

    def _loss_config(self, run: Run) -> LossConfig:
        options = space.options_of(run.loss, run.configuration.setting, self.pilot.loss_options)
        used = registry.options_used_by(run.loss, **{part: options.get(part) for part in PARTS})
        shared = {"seed": run.seed, "epochs": self.length.epochs}
        return LossConfig(
            run.loss, {name: shared[name] for name in shared if name in used} | options, frozenset(options)
        )

    def _start(self, config: LossConfig, built: BuiltModel) -> None:
        """As the training's own start."""
        pretrained = self.pilot.config.model.pretrained
        if pretrained:
            load_pretrained_heads(self.loss, pretrained)
        keeps_own = bool(pretrained) and "temperature" not in config.given and self.loss.learns_logit_scale
        prepare_for(self.loss, built.model, set_logit_scale=not keeps_own)

    def _loader(self, seed: int, preprocess: Callable, samples: int) -> TrainLoader:
        loading = replace(self.pilot.config.loading, seed=seed, caption_hash=self.loss.needs_positives)
        return self.pilot.data.loader(loading, preprocess, self.texts, samples)

    def run_steps(self) -> Iterator[int]:
        """Train, one step at a time; yields the samples of each."""
        number = 0
        limit = self.pilot.config.length.max_skipped_steps
        self.model.train()
        for epoch in range(self.length.epochs):
            self.loss.start_epoch(epoch)
            for group in _groups(self.loader.iterate(epoch, []), self.pilot.config.loading.accum_freq):
                self.set_rates(number)
                self.step(group, number)
                number += 1
                self.step.guard.learn()
                self.diverged = self.step.guard.in_a_row >= limit
                if self.diverged:
                    return
                yield self.pilot.batch

    def score(self, cache: Cache, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """As :func:`score`."""
        model = with_heads(self.model, self.loss.model_head())
        was_training = self.model.training
        model.eval()
        try:
            return score(model, cache, names, self.built, self.texts, self.pilot)
        finally:
            self.model.train(was_training)

    def temperature(self) -> float:
        """The median anchor's of the last step, or the model's."""
        return self.loss.metrics().get("temperature_median", math.exp(-self.model.logit_scale.item()))

    def normalizers(self, population: int, anchors: int) -> dict[str, Any] | None:
        """Error of the loss's and of the batch's log-normalizers, against the exact ones over many training samples.

        None if the model has diverged.
        """
        batch = self.pilot.batch
        # Against itself a batch makes no error.
        samples = min(max(population, _BATCHES * batch), self.pilot.data.num_samples) // batch * batch
        self.model.eval()
        self.loss.eval()
        loader = self._loader(0, self.built.preprocess_val, samples)
        found = embed(self.model, loader.iterate(0, []), self.pilot.config.step.precision, self.device, samples)
        if not all(bool(side.isfinite().all()) for side in (found.image, found.text)):
            return None
        measure = partial(
            estimation_error.measure,
            image=found.image,
            text=found.text,
            logit_scale=found.logit_scale,
            batch_size=batch,
            index=found.index,
            anchors=anchors,
            device=self.device,
        )
        own = measure(self.loss) if isinstance(self.loss, GlobalContrastiveLoss) else None
        # The loss's own temperatures, which may be one for each sample. A normalizer with the positive pair is another one.
        comparable = own is not None and not self.loss.normalizers_include_positive
        of_batch = own if own is not None and comparable else measure(registry.create_loss(BASELINE))
        errors = {"batch": asdict(of_batch.minibatch), "samples": of_batch.samples, "temperature": self.temperature()}
        if own is not None and own.estimator is not None:
            errors |= {"own": asdict(own.estimator), "own_batch": asdict(own.minibatch)}
        return errors


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Micro-batches by optimizer step."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []


# --- scores ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(
    model: Any, cache: Cache, names: Sequence[str], built: BuiltModel, tokenizer: Callable, pilot: Pilot
) -> dict[str, Tensor]:
    """Ranks in retrieval either way, where any sample of the same caption is right, and in zero-shot classification.

    Returns:
        ``(N,)`` by metric: each sample's rank of what is right, from 1.
    """
    settings = pilot.config.step.settings(built.device)
    captions = cache.captions()
    number = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
    same = torch.tensor([number[caption] for caption in captions], device=built.device)

    def encode_images(rows: Sequence[int]) -> Tensor:
        pixels = torch.stack([built.preprocess_val(cache.image(row)) for row in rows])
        return model.encode_image(pixels.to(built.device, settings.input_dtype), normalize=True)

    def encode_texts(texts: Sequence[str]) -> Tensor:
        return model.encode_text(tokenizer(texts).to(built.device), normalize=True)

    def encode(encoder: Callable[[Any], Tensor], items: Sequence[Any]) -> Tensor:
        with settings.autocast():
            return torch.cat([encoder(items[first : first + _CHUNK]).float() for first in range(0, len(items), _CHUNK)])

    image = encode(encode_images, range(len(captions)))
    text = encode(encode_texts, list(number))  # of each caption, once
    numbers = torch.arange(len(number), device=built.device)
    found = {
        IMAGE_TO_TEXT: ranks_of_best_match(image, text, same, numbers),
        TEXT_TO_IMAGE: ranks_of_best_match(text, image, numbers, same)[same],
    }
    classes = cache.classes()
    if names and classes is not None:
        right = torch.tensor(classes, device=built.device)
        found[ZERO_SHOT] = ranks_of_best_match(
            image, encode(encode_texts, names), right, torch.arange(len(names), device=built.device)
        )
    return {name: 1 + ranks.cpu() for name, ranks in found.items()}


def recall(ranks: Mapping[str, Tensor]) -> float:
    """R@1, the mean of both directions."""
    return float(sum((ranks[name] == 1).double().mean() for name in RETRIEVAL) / 2)


def mean_reciprocal_rank(ranks: Mapping[str, Tensor]) -> float:
    """The mean of both directions. It tells two models apart with fewer samples than R@1."""
    return float(sum(ranks[name].double().reciprocal().mean() for name in RETRIEVAL) / 2)


def _packed(ranks: Tensor) -> str:
    """A digit for each sample: whether what is right comes first."""
    return "".join("1" if value == 1 else "0" for value in ranks.tolist())


def unpacked(digits: str) -> Tensor:
    """Inverse of what results keep: ``(N,)`` float64 of 0 and 1."""
    return torch.tensor([float(digit) for digit in digits], dtype=torch.float64)


# --- measures --------------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds of training, without those of scoring."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.go_on()

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._since
        self._since = time.perf_counter()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(device: torch.device) -> int:
    """Of the GPU's memory, what tensors took; without a GPU, of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """What else the numbers may depend on."""
    from openclip_ext.version import __version__

    return {"torch": torch.__version__, "open_clip": open_clip.__version__, "openclip_ext": __version__}
