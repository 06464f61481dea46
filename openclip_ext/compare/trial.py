"""Perform a trial: a short run that the training program builds, on decoded data, without checkpoints and logs."""

import base64
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openclip_ext.cli.command_line import without_warnings
from openclip_ext.compare.data import StudyData
from openclip_ext.compare.decoded import Cache
from openclip_ext.compare.trials import Run
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.evaluation.ranks import Ranks, image_text_ranks, ranks_of_best_match
from openclip_ext.losses.heads import with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import flags
from openclip_ext.training.build import build
from openclip_ext.training.checkpoint.finding import Start
from openclip_ext.training.config import Config, RunPlan, ScheduleConfig
from openclip_ext.training.dry_run import peak_memory
from openclip_ext.training.model import BuiltModel, build_model
from openclip_ext.training.plan import resolve
from openclip_ext.training.step import Batch

RETRIEVAL, ZERO_SHOT = ("image_to_text_R@1", "text_to_image_R@1"), "zero_shot"
_CHUNK = 256
# A run is scored after these fractions of its steps.
_CURVE = (0.125, 0.25, 0.5, 1.0)


class Trial:
    """A run of the training program, which the caller steps through.

    Args:
        config, plan: What was asked for, and the plan of the run.
        adapt: Replaces parts of the built model, such as its transforms.

    Attributes:
        trainer: The parts of the run.
        batch: Samples per optimizer step.
        steps: Number of optimizer steps of the run, all with full batches. Fewer than planned if the run has diverged.
        seconds: Duration of the training steps so far.
    """

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        data: StudyData,
        device: torch.device,
        adapt: Callable[[BuiltModel], BuiltModel] = lambda built: built,
    ) -> None:
        add_model_configs()
        with without_warnings():
            built = adapt(build_model(plan.model, device, plan.loading.seed))
            if data.texts is not None:
                texts = copy.copy(data.texts)
                texts.shrink(built.model)
                built = replace(built, tokenizer=texts, padding=None)
            if data.train is not None:
                data.train.reference = data.reference
            self.trainer = build(config, plan, device, None, Start(), source=data.train, built=built)
        self.plan, self.device, self.built = plan, device, built
        self.model: Any = built.model
        self.batch = plan.loading.batch_size * plan.loading.accum_freq
        self.steps = self.trainer.steps_per_epoch * plan.length.epochs
        self.seconds = 0.0

    def run_steps(self, batches: Callable[[int], Iterator[Batch]] | None = None) -> Iterator[int]:
        """Train until the end or until too many skipped steps; after each step, yield the number of steps so far.

        ``batches`` returns the micro-batches of an epoch. None (default) means those of the training program's loader.
        """
        trainer, length, number = self.trainer, self.plan.length, 0
        guard = trainer.step.guard
        set_training_mode(self.model)
        for epoch in range(length.epochs):
            trainer.loss.start_epoch(epoch)
            of_epoch = (batches or trainer.loader.iterate)(epoch)
            start = time.perf_counter()
            # zip takes accum_freq micro-batches from the same iterator, for one optimizer step.
            for group in zip(*[of_epoch] * length.accum_freq, strict=False):
                trainer.schedule(number)
                trainer.step(list(group), number)
                number += 1
                guard.poll_outcomes()
                self.seconds += time.perf_counter() - start
                if guard.in_a_row >= length.max_skipped_steps:
                    self.steps = number  # the run diverged
                    return
                yield number
                start = time.perf_counter()

    @torch.no_grad()
    def embed(self, samples: Cache, *texts: Sequence[str]) -> list[Tensor]:
        """Return float32 embeddings ``(N, d)`` of the samples' images and of each list of texts, in evaluation mode."""
        was_training, settings = self.model.training, self.trainer.step.settings
        model: Any = with_heads(self.model.eval(), self.trainer.loss.model_head())
        found = []
        with settings.autocast():
            images = (
                torch.stack([self.built.preprocess_val(samples.image(row)) for row in rows.tolist()])
                for rows in torch.arange(len(samples)).split(_CHUNK)
            )
            inputs = (batch.to(self.device, settings.input_dtype) for batch in images)
            found.append(torch.cat([model.encode_image(batch, normalize=True).float() for batch in inputs]))
            for some in texts:
                tokens = self.built.tokenizer(list(some)).to(self.device).split(_CHUNK)
                found.append(torch.cat([model.encode_text(part, normalize=True).float() for part in tokens]))
        if was_training:
            set_training_mode(self.model)
        return found

    def ranks(self, samples: Cache, names: Sequence[str] = ()) -> dict[str, Ranks]:
        """Return the samples' ranks in retrieval in each direction, as in training's validation, and in classification.

        Classification needs class ``names``.
        """
        captions, classes = samples.captions(), samples.classes()
        to_classify = [names] if names and classes is not None else []
        place = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
        image, text, *of_names = (of.cpu() for of in self.embed(samples, [*place], *to_classify))
        text = text[[place[caption] for caption in captions]]
        directions = image_text_ranks(image, text, samples.image_hashes(), captions)
        found = {f"{name}_R@1": of for name, of in directions.items()}
        for prompts in of_names:
            right = torch.stack([torch.arange(len(image)), torch.tensor(classes)], dim=1)
            found[ZERO_SHOT] = ranks_of_best_match(image, prompts, right)
        return found

    def recall(self, samples: Cache) -> float:
        """Return R@1 on the samples, averaged over both directions."""
        found = self.ranks(samples)
        return float(sum(found[name].hits().mean() for name in RETRIEVAL) / 2)


@dataclass(frozen=True)
class Task:
    """A trial of a comparison, as a task for a worker process.

    Attributes:
        words: The arguments of ``openclip-ext train`` that perform the run.
        workers: Processes that load the data of a run.
    """

    run: Run
    words: Sequence[str]
    workers: int
    data: StudyData

    def build(self, device: torch.device) -> Trial:
        config = flags.parse([*self.words])
        plan = resolve(config)
        # A comparison needs no report of repeated captions, for which the first batches would have hashes.
        loading = replace(plan.loading, workers=self.workers, hashed_steps=0)
        return Trial(config, replace(plan, loading=loading), self.data, device)

    def __call__(self, device: torch.device, seen: Callable[[int], None]) -> dict[str, Any]:
        """Train and score the run; return its row of results. ``seen`` receives each step's number of samples."""
        start = time.perf_counter()
        trial = self.build(device)
        points = curve_points(trial.steps)
        curve = []
        for step in trial.run_steps():
            seen(trial.batch)
            if step in points:
                curve.append([step * trial.batch, trial.seconds, trial.recall(self.data.test)])
        loss = trial.trainer.loss
        ranks = trial.ranks(self.data.val)
        # Mean reciprocal ranks need fewer samples than R@1 to rank models.
        reciprocal = torch.stack([(1 + ranks[name].mean()).reciprocal() for name in RETRIEVAL]).mean(dim=0)
        return {
            "id": self.run.id,
            **asdict(self.run),
            "steps": trial.steps,
            "seconds": trial.seconds,
            # The median over the last step's anchors, or the model's temperature if the loss reports none.
            "temperature": loss.metrics().get("temperature_median", (-trial.model.logit_scale).exp().item()),
            "state_bytes": sum(loss.state_size()),
            "memory_bytes": peak_memory(device),
            "val": {"mean": float(reciprocal.mean())},
            "curve": curve,
            "hits": {name: pack(of.hits()) for name, of in trial.ranks(self.data.test, self.data.names).items()},
            "all_seconds": time.perf_counter() - start,
        }


@dataclass(frozen=True)
class Probe:
    """The beginning of a trial, as a task that measures the trial's costs for up to ``limit`` seconds."""

    task: Task
    limit: float

    def __call__(self, device: torch.device, seen: Callable[[int], None]) -> dict[str, float]:
        """Return the costs of a run in seconds, and R@1 ``before`` training.

        ``per_sample`` is the training time per sample, and ``per_run`` the rest of a run's time.
        """
        start = time.perf_counter()
        trial, data = self.task.build(device), self.task.data
        rest = time.perf_counter() - start
        before = trial.recall(data.test)
        first, now, step = 0.0, 0.0, 1
        for step in trial.run_steps():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if step == 1:  # not measured, because the first step is slower
                first = now
            elif now - first > self.limit:
                break
        scoring = time.perf_counter()
        trial.ranks(data.val)
        rest += (2 + len(_CURVE)) * (time.perf_counter() - scoring)
        return {"per_sample": (now - first) / max(1, step - 1) / trial.batch, "per_run": rest, "before": before}


def warmup_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Return the number of warm-up steps in a run of ``steps`` steps: as in ``schedule``, but at most a tenth of the run."""
    return min(schedule.warmup_steps(steps), steps // 10)


def curve_points(steps: int) -> set[int]:
    """Return the steps after which a run of ``steps`` steps is scored."""
    return {max(1, round(share * steps)) for share in _CURVE}


def pack(values: Tensor) -> str:
    """Encode values from 0 to 1 as text, with a precision of about three digits."""
    return base64.b64encode(values.half().numpy().tobytes()).decode()


def unpack(packed: str) -> Tensor:
    """Decode the text of :func:`pack` to ``(N,)`` float64."""
    return torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float16).double()
