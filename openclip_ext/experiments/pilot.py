"""One run on decoded data: the trainer's parts put together, without checkpoints, logs and other processes."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import open_clip
import torch
from torch import Tensor

from openclip_ext.diagnostics.command_line import without_warnings
from openclip_ext.experiments.cache import KnownTexts, PilotData
from openclip_ext.experiments.runs import Run
from openclip_ext.losses import registry
from openclip_ext.losses.heads import with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import TrainingConfig
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
from openclip_ext.version import __version__

_CHUNK = 256
_CURVE = (0.125, 0.25, 0.5)  # and the end
CURVE_POINTS = len(_CURVE) + 1


class Loader(Protocol):
    """What a run needs of the training data."""

    def iterate(self, epoch: int) -> Iterator[Batch]:
        """Yield the epoch's micro-batches."""
        ...


@dataclass(frozen=True)
class Pilot:
    """What all runs of an experiment share.

    Attributes:
        config: the training command line's; the loss, the rates and the lengths are each run's own.
        data: what to train on and to score with.
    """

    config: TrainingConfig
    data: PilotData

    @property
    def batch(self) -> int:
        """Samples of an optimizer step."""
        return self.config.loading.batch_size * self.config.loading.accum_freq

    def steps_per_epoch(self, run: Run) -> int:
        """Return the optimizer steps of an epoch of a run; samples that fill no batch are left out."""
        return (run.epoch_samples or self.data.num_samples) // self.batch

    def loader(self, training: "PilotRun", run: Run) -> Loader:
        """Return the training data of a run: the ordinary training loader's."""
        loading = replace(self.config.loading, seed=run.seed, caption_hash=training.loss.needs_positives)
        samples = self.steps_per_epoch(run) * self.batch
        return self.data.loader(loading, training.built.images.transform, training.texts, samples)

    def loss_config(self, run: Run) -> LossConfig:
        """Return the loss of a run, with the run's seed and length as in training."""
        return loss_config(run, seed=run.seed, epochs=run.epochs)

    def logit_scale_lr(self, training: "PilotRun", run: Run) -> float | None:
        """Return the learning rate of the model's logit scale, as in training; None: the encoders'."""
        return logit_scale_lr(training.loss.logit_scale_lr, self.steps_per_epoch(run) * run.epochs)

    def normalize(self, training: "PilotRun") -> Callable[[Tensor], Tensor] | None:
        """Return what makes batches of images the model's input, where they are not."""
        return training.built.images.normalize

    def prepare(self, training: "PilotRun", run: Run) -> None:
        """Set the model's and the loss's start, as in training."""
        loss, pretrained = training.loss, self.config.model.pretrained
        if pretrained:
            load_pretrained_heads(loss, pretrained)
        is_given = "temperature" in run.setting.get("options", {})
        keeps_own = bool(pretrained) and not is_given and loss.learns_logit_scale
        prepare_for(loss, training.model, set_logit_scale=not keeps_own)


def loss_config(run: Run, **shared: Any) -> LossConfig:
    """Return a run's loss: the options of its setting, and those of ``shared`` that the loss uses with them."""
    options = run.setting.get("options", {})
    used = registry.options_used_by(run.setting["loss"], **options)
    shared = {name: value for name, value in shared.items() if name in used}
    return LossConfig(run.setting["loss"], shared | options, frozenset(options))


def versions() -> dict[str, str]:
    """Return what else the numbers may depend on."""
    return {"torch": torch.__version__, "open_clip": open_clip.__version__, "openclip_ext": __version__}


def warmup_steps(asked: int, steps: int) -> int:
    """Return the warm-up of a run of so many steps: as asked, but not more than a tenth."""
    return min(asked, steps // 10)


class PilotRun:
    """Model, loss, optimizer and data of a run.

    Attributes:
        steps: optimizer steps of the whole run.
        seconds: of training so far, without what the caller does between the steps.
        diverged: whether so many steps in a row were not finite that it has ended.
    """

    def __init__(self, pilot: Pilot, run: Run, device: torch.device) -> None:
        add_model_configs()
        config, steps_per_epoch = pilot.config, pilot.steps_per_epoch(run)
        self.device, self.epochs, self.steps = device, run.epochs, steps_per_epoch * run.epochs
        self._pilot = pilot
        with without_warnings():
            self.built: BuiltModel = build_model(config.model, device, run.seed)
        self.model: Any = self.built.model
        self.texts = KnownTexts(pilot.data.tokens, self.built.tokenizer, self.model)
        self.loss = build_loss(pilot.loss_config(run), config.model.name, self.model, pilot.data.num_samples, device)
        pilot.prepare(self, run)
        rate = pilot.logit_scale_lr(self, run)
        optimizer = create_optimizer(self.model, replace(config.optimizer, lr=run.lr), rate, self.loss.model_head())
        warmup = warmup_steps(config.schedule.warmup, self.steps)
        schedule = replace(config.schedule, lr=run.lr, epochs=run.epochs, warmup=warmup)
        self._set_rates = create_schedule(schedule, optimizer, steps_per_epoch, rate)
        self.settings = config.step.settings(device, pilot.normalize(self))
        self._step = TrainStep(self.model, self.loss, optimizer, self.settings, config.step.scaler(device))
        self.loader = pilot.loader(self, run)
        self.seconds = 0.0
        self.diverged = False

    def run_steps(self) -> Iterator[int]:
        """Train, one step at a time; yield the number of steps so far."""
        length = self._pilot.config.length
        number = 0
        self.model.train()
        for epoch in range(self.epochs):
            self.loss.start_epoch(epoch)
            batches = self.loader.iterate(epoch)
            while True:
                start = time.perf_counter()
                group = list(itertools.islice(batches, length.accum_freq))
                if len(group) < length.accum_freq:
                    break
                self._set_rates(number)
                self._step(group, number)
                number += 1
                self._step.guard.learn()
                self.diverged = self._step.guard.in_a_row >= length.max_skipped_steps
                self.seconds += time.perf_counter() - start
                if self.diverged:
                    return
                yield number

    def train(self, seen: Callable[[int], None], score: Callable[[], float]) -> list[list[float]]:
        """Train to the end.

        Args:
            seen: is told of the samples of each step.
            score: measures the model at some points of the run, and at its end.

        Returns:
            The curve: samples, seconds of training and score of each point.
        """
        points = {max(1, round(share * self.steps)) for share in (*_CURVE, 1.0)}
        curve = []
        for step in self.run_steps():
            seen(self._pilot.batch)
            if step in points:
                curve.append([step * self._pilot.batch, self.seconds, score()])
        return curve

    def temperature(self) -> float:
        """Return the median anchor's of the last step, or the model's."""
        return self.loss.metrics().get("temperature_median", math.exp(-self.model.logit_scale.item()))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Any]:
        """Give the model with the loss's heads, in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.settings.autocast():
                yield with_heads(self.model, self.loss.model_head())
        finally:
            self.model.train(was_training)

    def encode_images(self, model: Any, pixels: Callable[[Sequence[int]], Tensor], count: int) -> Tensor:
        """Return embeddings ``(count, d)`` of images in float32; ``pixels`` gives the model's input for some of them."""
        inputs = (pixels(rows).to(self.device, self.settings.input_dtype) for rows in _chunks(range(count)))
        return torch.cat([model.encode_image(batch, normalize=True).float() for batch in inputs])

    def encode_texts(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Return embeddings ``(len(texts), d)`` of texts in float32."""
        tokens = [self.texts(part).to(self.device) for part in _chunks(texts)]
        return torch.cat([model.encode_text(part, normalize=True).float() for part in tokens])


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[first : first + _CHUNK] for first in range(0, len(items), _CHUNK))
