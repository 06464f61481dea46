"""One run on decoded data: the trainer's parts put together, without checkpoints, logs and other processes."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from openclip_ext.training.model import LossConfig, build_loss, build_model, load_pretrained_heads, prepare_for
from openclip_ext.training.optimizer import create_optimizer, create_schedule, logit_scale_lr
from openclip_ext.training.step import TrainStep
from openclip_ext.version import __version__

_CHUNK = 256
_CURVE = (0.125, 0.25, 0.5)  # and the end
CURVE_POINTS = len(_CURVE) + 1


def versions() -> dict[str, str]:
    """Return what else the numbers may depend on."""
    return {"torch": torch.__version__, "open_clip": open_clip.__version__, "openclip_ext": __version__}


def warmup_steps(asked: int, steps: int) -> int:
    """Return the warm-up of a run of so many steps: as asked, but not more than a tenth."""
    return min(asked, steps // 10)


class PilotRun:
    """Model, loss, optimizer and data of a run, as in training; what a kind of experiment does otherwise it overrides.

    Args:
        config: the training command line's; the loss, the rates and the lengths are the run's.
        data: what to train on and to score with.
        run: what to do.
        device: where to train.

    Attributes:
        batch: samples of an optimizer step.
        steps: optimizer steps of the whole run; samples that fill no batch are left out.
        seconds: of training so far, without what the caller does between the steps.
        diverged: whether so many steps in a row were not finite that it has ended.
    """

    def __init__(self, config: TrainingConfig, data: PilotData, run: Run, device: torch.device) -> None:
        add_model_configs()
        self.config, self.data, self.run, self.device = config, data, run, device
        self.batch = config.loading.batch_size * config.loading.accum_freq
        self.steps_per_epoch = (run.epoch_samples or data.num_samples) // self.batch
        self.steps = self.steps_per_epoch * run.epochs
        with without_warnings():
            self.built = build_model(config.model, device, run.seed)
        self.model: Any = self.built.model
        self.texts = KnownTexts(data.tokens, self.built.tokenizer, self.model)
        options = run.setting.get("options", {})
        used = registry.options_used_by(run.setting["loss"], **options)
        shared = {name: value for name, value in self.shared_options().items() if name in used}
        chosen = LossConfig(run.setting["loss"], shared | options, frozenset(options))
        self.loss = build_loss(chosen, config.model.name, self.model, data.num_samples, device)
        self.prepare()
        rate = self.logit_scale_lr()
        optimizer = create_optimizer(self.model, replace(config.optimizer, lr=run.lr), rate, self.loss.model_head())
        warmup = warmup_steps(config.schedule.warmup, self.steps)
        schedule = replace(config.schedule, lr=run.lr, epochs=run.epochs, warmup=warmup)
        self._set_rates = create_schedule(schedule, optimizer, self.steps_per_epoch, rate)
        self.settings = config.step.settings(device, self.normalize())
        self._step = TrainStep(self.model, self.loss, optimizer, self.settings, config.step.scaler(device))
        self.loader = self.build_loader()
        self.seconds = 0.0
        self.diverged = False

    # --- what kinds of experiments differ in ---------------------------------------------------------------------------

    def shared_options(self) -> dict[str, Any]:
        """Return options of the loss that no setting says, for losses that use them."""
        return {"seed": self.run.seed, "epochs": self.run.epochs}

    def prepare(self) -> None:
        """Set the model's and the loss's start."""
        pretrained = self.config.model.pretrained
        if pretrained:
            load_pretrained_heads(self.loss, pretrained)
        is_given = "temperature" in self.run.setting.get("options", {})
        keeps_own = bool(pretrained) and not is_given and self.loss.learns_logit_scale
        prepare_for(self.loss, self.model, set_logit_scale=not keeps_own)

    def logit_scale_lr(self) -> float | None:
        """Return the learning rate of the model's logit scale; None: the encoders'."""
        return logit_scale_lr(self.loss.logit_scale_lr, self.steps)

    def normalize(self) -> Callable[[Tensor], Tensor] | None:
        """Return what makes batches of images the model's input; None: they are it."""
        return self.built.images.normalize

    def build_loader(self) -> Any:
        """Return the training data: ``iterate(epoch)`` yields an epoch's micro-batches."""
        loading = replace(self.config.loading, seed=self.run.seed, caption_hash=self.loss.needs_positives)
        return self.data.loader(loading, self.built.images.transform, self.texts, self.steps_per_epoch * self.batch)

    # --- training and scoring ------------------------------------------------------------------------------------------

    def run_steps(self) -> Iterator[int]:
        """Train, one step at a time; yield the number of steps so far."""
        length = self.config.length
        number = 0
        self.model.train()
        for epoch in range(self.run.epochs):
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

    def train(self, seen: Callable[[Any], None], score: Callable[[int], float]) -> list[list[float]]:
        """Train to the end.

        Args:
            seen: is told of the samples of each step.
            score: measures the model at some points of the run, after so many samples, and at its end.

        Returns:
            The curve: samples, seconds of training and score of each point.
        """
        points = {max(1, round(share * self.steps)) for share in (*_CURVE, 1.0)}
        curve = []
        for step in self.run_steps():
            seen(self.batch)
            if step in points:
                curve.append([step * self.batch, self.seconds, score(step * self.batch)])
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
