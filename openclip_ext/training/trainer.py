"""The training loop. It knows no loss, no data format and no evaluation by name."""

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.loader.train_loader import Interrupted, TrainLoader
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.losses.heads import HEADS_KEY, heads_entry, with_heads
from openclip_ext.training import checkpoint as ckpt
from openclip_ext.training import lora, parallel
from openclip_ext.training.checkpoint import Position, RunIdentity
from openclip_ext.training.config import RunLength, SavePolicy
from openclip_ext.training.ema import TRAINED_KEY
from openclip_ext.training.guard import SkippedStep
from openclip_ext.training.optimizer import schedule_rate
from openclip_ext.training.runtime.profiling import profiled
from openclip_ext.training.runtime.reporting import Reporter, Stopwatch
from openclip_ext.training.runtime.run_folder import SAVED
from openclip_ext.training.runtime.signals import Request, SignalRequests
from openclip_ext.training.step import Batch, TrainStep
from openclip_ext.training.validation import ScheduledEvaluator, is_best, run_evaluators

# Entries of a checkpoint that are the model and no state of the training.
_MODEL_ENTRIES = ("epoch", "name", "state_dict", HEADS_KEY)
# How many samples of a skipped step the log names.
_NAMED_SAMPLES = 32
# Steps between two collections of garbage.
_GARBAGE_EVERY = 50


class TrainingDiverged(RuntimeError):
    """The parameters are no longer finite numbers."""


class SaveFailed(RuntimeError):
    """The run's last checkpoint could not be written."""


def stateful_parts(step: TrainStep, loader: TrainLoader) -> dict[str, Stateful]:
    """Return the parts of a run, by name, whose state a checkpoint has beside model, optimizer and loss."""
    return {"loader": loader, "guard": step.guard}


@dataclass(eq=False)
class Trainer:
    """Trains until the last epoch, saving, evaluating and reporting on the way.

    Attributes:
        schedule: sets the learning rates for an optimizer step of the run.
        evaluators: run at epoch ends, after the checkpoint is safe.
        unreadable: checkpoints that could not be read, which are neither overwritten nor deleted.
    """

    step: TrainStep
    loader: TrainLoader
    schedule: Callable[[int], None]
    length: RunLength
    policy: SavePolicy
    identity: RunIdentity
    reporter: Reporter
    evaluators: Sequence[ScheduledEvaluator] = ()
    position: Position = field(default_factory=Position)
    unreadable: frozenset[Path] = frozenset()

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.loader.batches_per_epoch // self.length.accum_freq
        self.stopwatch = Stopwatch()
        self._last_saved: tuple[str, int] | None = None
        self._has_stepped = False
        if self._step_of_schedule > 0:
            # A run that saves before it takes a step, since it was killed at its end, saves the last step's rates.
            self.schedule(self._step_of_schedule - 1)

    @property
    def _step_of_schedule(self) -> int:
        """Steps of whole epochs as they are now: before a resume they may have been of another number (batch, manifest)."""
        return self.position.epoch * self.steps_per_epoch + self.position.step_in_epoch

    @property
    def model(self) -> nn.Module:
        return self.step.model

    @property
    def loss(self) -> ContrastiveLoss:
        return self.step.loss

    # --- the loop ---------------------------------------------------------------------------------------------------

    def fit(self, evaluate_first: bool = False) -> None:
        """Train to the end; with ``evaluate_first``, begin with the evaluations that were due where the run starts.

        Raises:
            SystemExit: with 143 after SIGTERM, 130 after SIGINT, and a saved checkpoint.
            SaveFailed: the last checkpoint could not be written.
            TrainingDiverged: a checkpoint was due and the parameters are not finite, or every step was skipped.
            BadDataError, WorkerError: too many samples are bad, or data workers failed, on all ranks; the steps before are
                saved.
        """
        folder = None if self.policy.folder is None else self.policy.folder.parent
        with (
            SignalRequests() as signals,
            profiled(self.length.profile, folder) as self._profile_step,
            self.loader.interrupted_by(signals.interruptible),
        ):
            if evaluate_first:
                self._evaluate()
            while self.position.epoch < self.length.epochs:
                try:
                    self._train_epoch(signals)
                except (BadDataError, WorkerError):
                    self._save_before_abort()
                    raise
                except Interrupted:
                    self._save_before_abort()
                    self._stop(signals)
                self._end_epoch()

    def _train_epoch(self, signals: SignalRequests) -> None:
        epoch = self.position.epoch
        self.model.train()
        self.loss.train()
        self.loss.start_epoch(epoch)
        if distributed.is_master():
            logging.info(f"Start epoch {epoch}")
        batches = self.loader.iterate(epoch)
        with self.reporter.epoch(epoch, self.position.step_in_epoch), _without_garbage_collection():
            self.stopwatch.restart()
            # One iterator, taken accum_freq times: the micro-batches of one optimizer step.
            for step_batches in zip(*[batches] * self.length.accum_freq, strict=False):
                self._one_step(list(step_batches))
                if self.position.step % _GARBAGE_EVERY == 0:
                    gc.collect(generation=1)
                # Before an evaluation, which may take hours, a request is not left for the next step.
                self._act_on(signals.agreed(now=self.position.step_in_epoch >= self.steps_per_epoch), signals)

    def _one_step(self, batches: list[Batch]) -> None:
        self.stopwatch.data_arrived()
        position = self.position
        self.schedule(self._step_of_schedule)
        terms = self.step(batches, position.step)
        if not self._has_stepped:
            distributed.set_patience(distributed.STEP_PATIENCE)
            self._has_stepped = True
        self.stopwatch.step_done()
        is_last = position.step_in_epoch + 1 >= self.steps_per_epoch
        is_logged = position.step_in_epoch % self.length.log_every == 0 or is_last
        # Logging waits for the device anyway.
        skipped = self.step.guard.poll_outcomes(wait=is_logged)
        self._report_skipped(skipped)
        global_batch = distributed.world_size() * sum(len(batch["text"]) for batch in batches)
        position.samples += global_batch
        if is_logged:
            has_loss = all(step.has_loss for step in skipped if step.number == position.step)
            self._report(terms, global_batch, has_loss)
        self.reporter.advance()
        self._profile_step()
        position.step += 1
        position.step_in_epoch += 1

    def _act_on(self, request: Request, signals: SignalRequests) -> None:
        if self.step.guard.in_a_row >= self.length.max_skipped_steps:
            self._give_up()
        every = self.policy.every_steps
        due = every > 0 and self.position.step % every == 0
        if request == Request.NOTHING and not due:
            return
        self._report_all_skipped()
        self._save_mid_epoch(must_succeed=request == Request.SAVE_AND_STOP)
        self.stopwatch.restart()
        if request == Request.SAVE_AND_STOP:
            self._stop(signals)

    def _stop(self, signals: SignalRequests) -> NoReturn:
        if distributed.is_master():
            logging.warning(f"Stopped by a signal after step {self.position.step}; --resume latest goes on from here.")
        raise SystemExit(signals.exit_status)

    def _report_all_skipped(self) -> None:
        """Learn of the steps until now that changed nothing, before a save."""
        self._report_skipped(self.step.guard.poll_outcomes(wait=True))

    def _save_before_abort(self) -> None:
        """Save the steps of this launch, so that the run can continue with other data or a higher limit."""
        if self._has_stepped and self.position.step_in_epoch > 0:
            self._report_all_skipped()
            self._save_mid_epoch(must_succeed=False)

    def _give_up(self) -> None:
        """Save the last good state, which is the present one, and end the run."""
        self._report_all_skipped()
        self._save_mid_epoch(must_succeed=True)
        raise TrainingDiverged(
            f"{self.step.guard.in_a_row} steps in a row were not finite and changed nothing; the last was step "
            f"{self.position.step - 1}. The state before them is saved; --resume latest goes on after them. Look at the "
            "samples that the log names, lower --lr, set --grad-clip-norm, or allow more with --max-skipped-steps"
        )

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report_skipped(self, steps: Sequence[SkippedStep]) -> None:
        """Say which steps changed nothing, and which samples of all ranks they had."""
        for step in steps:
            parts = distributed.all_gather_object(step)
            named = [part for part in parts if part.are_bad] or parts
            samples = [sample for part in named for sample in part.samples]
            what = "samples" if named[0].are_bad else "its gradients; the batch has samples"
            more = f" and {len(samples) - _NAMED_SAMPLES} more" if len(samples) > _NAMED_SAMPLES else ""
            if not distributed.is_master():
                continue
            if self.step.scaler is not None and step.has_loss and not named[0].are_bad:
                logging.info(
                    f"Step {step.number} changed nothing: gradients overflowed. The loss scale falls to "
                    f"{self.step.scaler.get_scale():g}. Skipped so far: {self.step.guard.skipped}"
                )
            else:
                logging.warning(
                    f"Step {step.number} changed nothing. Not finite: {what} {samples[:_NAMED_SAMPLES]}{more}. Skipped so "
                    f"far: {self.step.guard.skipped}"
                )

    def _report(self, terms: dict[str, Tensor], global_batch: int, has_loss: bool) -> None:
        """Log a step. This is where the host waits for the device."""
        position = self.position
        known_bad, own_bad = self.loader.bad.counts()
        own = torch.stack([value.float() for value in terms.values()])
        *sums, other_bad = distributed.all_reduce_sum(torch.cat([own, own.new_tensor([own_bad])])).tolist()
        named = {name: value / distributed.world_size() for name, value in zip(terms, sums, strict=True)}
        metrics = self.loss.metrics()
        if not has_loss:
            # What the loss gives without valid samples, 0, is no loss.
            named, metrics = dict.fromkeys(named, math.nan), metrics | {"infonce": math.nan}
        for step, indices in self.loss.pop_nonfinite():
            logging.warning(
                f"Rank {distributed.rank()}: non-finite features at step {step}, masked out; samples {indices}"
            )
        record = {
            "step": position.step,
            "epoch": position.epoch,
            "samples": position.samples,
            "loss": sum(named.values()),
            "terms": named,
            "chance": math.log(global_batch),
            "lr": schedule_rate(self.step.optimizer),
            "global_batch": global_batch,
            "skipped_steps": self.step.guard.skipped,
            "bad_samples": known_bad + int(other_bad),
            **metrics,
        }
        record.setdefault("temperature", metrics.get("temperature_median", float("nan")))
        self.reporter.train_step(record, self.stopwatch)
        self.stopwatch.reset()

    # --- saving and evaluating --------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        position = self.position
        skipped = self.step.guard.skipped
        self.position = Position(position.epoch + 1, position.step, samples=position.samples)
        self.reporter.epoch_end({"step": position.step - 1, "epoch": position.epoch}, self.loader.bad.counts()[0])
        if self.position.epoch == self.length.epochs and skipped == position.step:
            raise TrainingDiverged(
                f"all {skipped} steps of the run changed nothing, since their gradients were not finite: the model is as it "
                "was at the start, and is not saved. Look at the samples that the log names, lower --lr, or set "
                "--grad-clip-norm"
            )
        self._save_epoch()
        self._evaluate()
        self.stopwatch.restart()

    def _save_mid_epoch(self, must_succeed: bool) -> None:
        path = self._save(ckpt.checkpoint_name(self.position), must_succeed)
        if path is not None and distributed.is_master():
            ckpt.remove_older_mid_epoch(path.parent, kept=path, spared=self.unreadable)

    def _save_epoch(self) -> None:
        completed, policy = self.position.epoch, self.policy
        is_last = completed == self.length.epochs
        saved = None
        if is_last or (policy.every_epochs > 0 and completed % policy.every_epochs == 0):
            saved = self._save(ckpt.checkpoint_name(self.position), must_succeed=is_last)
        if policy.most_recent:
            saved = self._save(ckpt.LATEST, must_succeed=False) or saved
        if saved is None or not distributed.is_master():
            return
        ckpt.remove_older_mid_epoch(saved.parent, kept=saved, spared=self.unreadable)
        every = max(1, policy.every_epochs)
        previous = saved.parent / f"epoch_{(completed - 1) // every * every}.pt"
        if policy.delete_previous and previous not in self.unreadable:
            ckpt.remove(previous)

    def _save(self, name: str, must_succeed: bool) -> Path | None:
        """Write a checkpoint; a failure is a warning, unless it is the run's last chance."""
        policy = self.policy
        if policy.folder is None or self._last_saved == (name, self.position.step):
            return None
        self._refuse_nonfinite_parameters()
        target = policy.folder / f"{name}.pt"
        try:
            if target in self.unreadable:
                ckpt.set_aside(target)
            self.unreadable -= {target}
            content = self._model_file()
            self._save_adapter(target, content)
            path = ckpt.save(
                policy.folder,
                name,
                content,
                self.loss,
                self.position,
                self.identity,
                stateful_parts(self.step, self.loader),
            )
        except OSError as error:
            if must_succeed:
                raise SaveFailed(f"the last checkpoint {name}.pt could not be saved: {error}") from error
            if distributed.is_master():
                logging.warning(f"Checkpoint {name}.pt could not be saved ({error}); training goes on.")
            return None
        self._last_saved = (name, self.position.step)
        if distributed.is_master():
            with contextlib.suppress(OSError):
                (policy.folder.parent / SAVED).touch()
        return path

    def _model_file(self) -> dict[str, Any]:
        """Return OpenCLIP's checkpoint dictionary, and the step that finds our state beside it; complete on the master."""
        model = compat.uncompiled(self.model)
        content = {
            "epoch": self.position.epoch,
            "name": self.policy.name,
            "state_dict": model.state_dict(),
            "optimizer": parallel.optimizer_state_dict(model, self.step.optimizer),
            "step": self.position.step,
        }
        if self.step.ema is not None:
            content |= {"state_dict": self.step.ema.state_dict(), TRAINED_KEY: content["state_dict"]}
        if self.step.scaler is not None:
            content["scaler"] = self.step.scaler.state_dict()
        head = self.loss.model_head()
        if head is not None:
            content[HEADS_KEY] = heads_entry(head)
        if lora.is_adapted(model) and distributed.is_master():
            content = lora.with_merged(content, model)
        return content

    def _save_adapter(self, path: Path, content: dict[str, Any]) -> None:
        """Write the adapter that a model file has, if any, beside it; before it, so that no file is without."""
        if lora.is_adapted(self.model):
            ckpt.save_adapter(path, lambda folder: lora.save_adapter(content, self.model, folder))

    def _refuse_nonfinite_parameters(self) -> None:
        head = self.loss.model_head()
        parameters = [*self.model.parameters(), *([] if head is None else head.parameters())]
        if not parallel.all_finite(parameters):
            raise TrainingDiverged(
                f"the parameters are not finite after step {self.position.step}; the last good checkpoint in "
                f"{self.policy.folder} is untouched. Lower --lr, lengthen --warmup, or set --grad-clip-norm"
            )

    def _evaluate(self) -> None:
        """Run what is due, on the master; the others wait. Training's random numbers are left as they were."""
        due = [item.evaluator for item in self.evaluators if item.is_due(self.position.epoch, self.length.epochs)]
        metrics: dict[str, float] = {}
        with parallel.whole_model(self.model, needed=bool(due)) as model:
            if model is not None:
                generators = ckpt.random_state()
                with contextlib.nullcontext() if self.step.ema is None else self.step.ema.in_place():
                    metrics = run_evaluators(due, with_heads(model, self.loss.model_head()))
                ckpt.set_random_state(generators)
        # Before the result is written: a run killed in between evaluates again.
        self._keep_best(metrics)
        self.reporter.evaluation(metrics, {"step": self.position.step, "epoch": self.position.epoch})
        distributed.barrier()

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Keep the model if it is the best so far; the master knows, and all take part."""
        folder, metric = self.policy.folder, self.policy.best_metric
        if folder is None or metric is None:
            return
        if distributed.broadcast_object(is_best(metrics, metric, folder, self.position.epoch)):
            content = self._model_file()
            try:
                self._save_adapter(folder / "best.pt", content)
            except OSError as error:
                logging.warning(f"The adapter of best.pt could not be saved ({error}); training goes on.")
            content = {name: content[name] for name in _MODEL_ENTRIES if name in content}
            if distributed.is_master():
                ckpt.save_model_file(folder / "best.pt", content)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from collecting garbage when it likes: in a step all ranks wait for the one that does."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
