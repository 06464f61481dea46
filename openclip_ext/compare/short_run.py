"""Perform one run on decoded data in one process, with the trainer's components, but without checkpoints or logs."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openclip_ext.cli.command_line import without_warnings
from openclip_ext.compare.decoded_data import Cache, KnownTexts, PilotData
from openclip_ext.compare.process_pool import threads_of_each
from openclip_ext.compare.runs import Run
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.losses import registry
from openclip_ext.losses.heads import with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import LossConfig, RunPlan, ScheduleConfig
from openclip_ext.training.model import build_loss, build_model, initialize, loss_options
from openclip_ext.training.optimizer import create_optimizer, create_schedule, logit_scale_lr
from openclip_ext.training.plan import text_groups
from openclip_ext.training.step import StepSettings, TrainStep, gradient_scaler

_CHUNK = 256
# A run is scored after these fractions of its steps.
_CURVE = (0.125, 0.25, 0.5, 1.0)
CURVE_POINTS = len(_CURVE)


def seconds_a_sample(config: RunPlan, processes: int) -> float:
    """Return the seconds per sample of a forward and backward pass. A training step takes at least this time.

    On the CPU, the pass has the threads of a run if ``processes`` runs work at a time.
    """
    add_model_configs()
    device, batch = torch.device(config.device or "cpu"), config.loading.batch_size
    with without_warnings():
        built = build_model(replace(config.model, pretrained=None, pretrained_image=False), device, 0)
    size = built.model.visual.image_size
    settings = StepSettings.of(config.step, device)
    images = torch.zeros(batch, 3, *(size if isinstance(size, tuple) else (size, size)), device=device)
    images, texts = images.to(settings.input_dtype), built.tokenizer([""] * batch).to(device)

    def seconds_of_a_pass() -> float:
        started = time.perf_counter()
        with settings.autocast():
            outputs = built.model(images, texts)
        loss = (outputs["image_features"] * outputs["text_features"]).sum()
        loss.backward()
        loss.item()  # synchronizes with the device
        return time.perf_counter() - started

    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of_each(processes))
    try:
        seconds_of_a_pass()  # warm-up
        return seconds_of_a_pass() / batch
    finally:
        torch.set_num_threads(threads)


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of warm-up steps in a run of ``steps`` steps: as in ``schedule``, but at most a tenth of the run."""
    return min(schedule.warmup_steps(steps), steps // 10)


class PilotRun:
    """One run that executes the steps of the training program. Subclasses in experiments override some methods.

    Args:
        config: The training configuration. The run replaces its loss, learning rate and length.

    Attributes:
        batch: Samples per optimizer step.
        steps: Number of optimizer steps of the run, all with full batches. Fewer than planned if the run has diverged.
        seconds: Duration of the training steps so far.
    """

    def __init__(self, config: RunPlan, data: PilotData, run: Run, device: torch.device) -> None:
        add_model_configs()
        self.config, self.data, self.run, self.device = config, data, run, device
        self.batch = config.loading.batch_size * config.loading.accum_freq
        self.steps_per_epoch = (run.epoch_samples or data.num_samples) // self.batch
        self.steps = self.steps_per_epoch * run.epochs
        options = run.setting.get("options", {})
        has_bias = registry.check_options(run.setting["loss"], **options).initial_logit_bias is not None
        with without_warnings():
            self.built = build_model(replace(config.model, siglip_start=has_bias), device, run.seed)
        self.model: Any = self.built.model
        self.texts: Any = self.built.tokenizer if data.tokens is None else KnownTexts(data.tokens, self.model)
        asked = LossConfig(run.setting["loss"], options, self.shared_options() | options)
        chosen = loss_options(asked, self.steps, bool(config.model.weights), data.reference)
        about = config.model.name, self.model, data.num_samples, device, data.reference
        self.loss = build_loss(asked, *about, chosen)
        self.prepare()
        rate = self.logit_scale_lr()
        optimizer = create_optimizer(self.model, replace(config.optimizer, lr=run.lr), rate, self.loss.model_head())
        warmup = warmup_steps(config.schedule, self.steps)
        schedule = replace(config.schedule, lr=run.lr, epochs=run.epochs, warmup=warmup)
        self._set_rates = create_schedule(schedule, optimizer, self.steps_per_epoch, rate)
        self.settings = StepSettings.of(config.step, device, self.normalize())
        scaler = gradient_scaler(config.step.precision, device)
        self._step = TrainStep(self.model, self.loss, optimizer, self.settings, scaler)
        self.loader = self.build_loader()
        self.seconds = 0.0

    def shared_options(self) -> dict[str, Any]:
        """Return default options. Each applies to all losses that use it."""
        return {"seed": self.run.seed, "epochs": self.run.epochs}

    def prepare(self) -> None:
        """Set the initial state of the model and the loss."""
        initialize(self.model, self.loss, self.config.model.weights)

    def logit_scale_lr(self) -> float | None:
        """Return the learning rate of the model's logit scale; None means the encoders' learning rate."""
        return logit_scale_lr(self.loss.logit_scale_lr, self.steps)

    def normalize(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function that converts a batch of images to the model's input; None if no conversion is needed."""
        return self.built.images.normalize

    def build_loader(self) -> Any:
        """Return the loader of the training data; its ``iterate(epoch)`` yields the micro-batches of an epoch."""
        loading = replace(
            self.config.loading,
            seed=self.run.seed,
            caption_hash=self.loss.needs_positives,
            hashed_steps=0,
            **text_groups(self.config.step.text_groups, self.config.parallel),
        )
        return self.data.loader(loading, self.built.images.transform, self.texts, self.steps_per_epoch * self.batch)

    def pixels(self, samples: Cache, rows: Sequence[int]) -> Tensor:
        """Return the model's input for the images of some ``samples``."""
        return torch.stack([self.built.preprocess_val(samples.image(row)) for row in rows])

    def run_steps(self) -> Iterator[int]:
        """Train until the end or until too many skipped steps; after each step, yield the number of steps so far."""
        length = self.config.length
        number = 0
        set_training_mode(self.model)
        for epoch in range(self.run.epochs):
            self.loss.start_epoch(epoch)
            batches = self.loader.iterate(epoch)
            start = time.perf_counter()
            # zip takes accum_freq micro-batches from the same iterator, for one optimizer step.
            for group in zip(*[batches] * length.accum_freq, strict=False):
                self._set_rates(number)
                self._step(list(group), number)
                number += 1
                self._step.guard.poll_outcomes()
                self.seconds += time.perf_counter() - start
                if self._step.guard.in_a_row >= length.max_skipped_steps:
                    self.steps = number  # the run diverged
                    return
                yield number
                start = time.perf_counter()

    def train(
        self, seen: Callable[[int], None], score: Callable[[int], float], each_epoch: bool = False
    ) -> list[list[float]]:
        """Train to the end; return a curve of points ``[samples, training seconds, score]``.

        ``seen`` is called with the number of samples of each step, and ``score`` with the number of samples so far. Points are
        at the fractions ``_CURVE`` of the run, or with ``each_epoch`` at the end of each epoch.
        """
        points = {max(1, round(share * self.steps)) for share in _CURVE}
        if each_epoch:
            points = {self.steps_per_epoch * epoch for epoch in range(1, self.run.epochs + 1)}
        curve = []
        for step in self.run_steps():
            seen(self.batch)
            if step in points:
                curve.append([step * self.batch, self.seconds, score(step * self.batch)])
        return curve

    def temperature(self) -> float:
        """Return the median temperature of the last step's anchors, or the model's if the loss reports none."""
        return self.loss.metrics().get("temperature_median", math.exp(-self.model.logit_scale.item()))

    @torch.no_grad()
    def embed(self, samples: Cache, *texts: Sequence[str]) -> list[Tensor]:
        """Return float32 embeddings ``(N, d)`` of the samples' images and of each list of texts, in evaluation mode."""
        was_training = self.model.training
        model: Any = with_heads(self.model.eval(), self.loss.model_head())
        found = []
        with self.settings.autocast():
            images = (self.pixels(samples, rows.tolist()) for rows in torch.arange(len(samples)).split(_CHUNK))
            inputs = (batch.to(self.device, self.settings.input_dtype) for batch in images)
            found.append(torch.cat([model.encode_image(batch, normalize=True).float() for batch in inputs]))
            for some in texts:
                tokens = self.texts(some).to(self.device).split(_CHUNK)
                found.append(torch.cat([model.encode_text(part, normalize=True).float() for part in tokens]))
        if was_training:
            set_training_mode(self.model)
        return found
