"""The training loop. It does not depend on a particular loss, data format or evaluation."""

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from openclip_ext import compat, distributed
from openclip_ext.checkpoint import format as ckpt
from openclip_ext.checkpoint.format import TRAINED_KEY, Position, RunIdentity
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.data.loader.train_loader import Interrupted
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.losses.heads import HEADS_KEY, heads_entry, with_heads
from openclip_ext.training import lora, parallel
from openclip_ext.training.checkpoint import saving
from openclip_ext.training.config import RunLength, SavePolicy
from openclip_ext.training.guard import SkippedStep
from openclip_ext.training.optimizer import schedule_rate
from openclip_ext.training.runtime.batch_report import BatchReport
from openclip_ext.training.runtime.reporting import Reporter, Stopwatch
from openclip_ext.training.runtime.run_folder import SAVED
from openclip_ext.training.runtime.signals import Request, SignalRequests
from openclip_ext.training.step import Batch, TrainStep

if TYPE_CHECKING:
    from openclip_ext.data.loader.rehearsal import RehearsalLoader
    from openclip_ext.data.loader.single_source import AnyTrainLoader
    from openclip_ext.training.validation import Scheduled

logger = get_logger(__name__)

# Maximum number of sample indices to log for a skipped step.
_NAMED_SAMPLES = 32
_GARBAGE_EVERY_STEPS = 50


class TrainingDiverged(RuntimeError):
    """The parameters, or the gradients of too many steps, are not finite."""


class SaveFailed(RuntimeError):
    """The run's last checkpoint could not be written."""


def stateful_parts(step: TrainStep, loader: "AnyTrainLoader | RehearsalLoader") -> dict[str, Stateful]:
    """Return, by name, the parts of a run that a checkpoint contains in addition to model, optimizer and loss."""
    return {"loader": loader, "guard": step.guard}


@dataclass(eq=False)
class Trainer:
    """The training loop: steps, checkpoints, evaluations and reports until the last epoch."""

    step: TrainStep
    loader: "AnyTrainLoader | RehearsalLoader"
    schedule: Callable[[int], None]  # sets the learning rates for the given optimizer step of the run
    length: RunLength
    policy: SavePolicy
    identity: RunIdentity
    reporter: Reporter
    tasks: "Sequence[Scheduled]" = ()  # scored at the end of an epoch, after the checkpoint is saved
    position: Position = field(default_factory=Position)
    batch_report: BatchReport | None = None

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.loader.batches_per_epoch // self.length.accum_freq
        self.stopwatch = Stopwatch()
        self._saved_step = self.position.step
        self._has_stepped = False
        self.model, self.loss = self.step.model, self.step.loss
        if self._schedule_step > 0:
            # A resumed run may save before it takes a step, so set the learning rates of the last step.
            self.schedule(self._schedule_step - 1)

    @property
    def _schedule_step(self) -> int:
        """The step of the learning rate schedule. It depends on the number of steps per epoch, which a resume may change.

        A resumed epoch may have more steps than ``steps_per_epoch``. The extra steps use the next epoch's first learning rate,
        or in the last epoch the run's last learning rate.
        """
        return self.position.epoch * self.steps_per_epoch + min(self.position.step_in_epoch, self.steps_per_epoch)

    def fit(self, evaluate_first: bool = False) -> None:
        """Train to the last epoch. With ``evaluate_first``, start with the evaluations that are due at the run's position.

        Raises:
            SystemExit: Status 143 after SIGTERM, 130 after SIGINT. A checkpoint is saved first.
            SaveFailed: The last checkpoint could not be written.
            TrainingDiverged: Parameters are not finite at a save, or too many consecutive steps (or all) were skipped.
            BadDataError, WorkerError: Too many samples are bad, or data workers failed. All ranks first save a checkpoint.
        """
        with SignalRequests() as signals:
            if evaluate_first:
                self._evaluate()
            while self.position.epoch < self.length.epochs:
                try:
                    self._train_epoch(signals)
                except (BadDataError, WorkerError):
                    self._save_before_abort(must_succeed=False)
                    raise
                except Interrupted:
                    self._save_before_abort(must_succeed=True)
                    self._stop(signals)
                self._end_epoch()

    def _train_epoch(self, signals: SignalRequests) -> None:
        epoch = self.position.epoch
        set_training_mode(self.model)
        self.loss.train()
        self.loss.start_epoch(epoch)
        if distributed.is_rank0():
            logger.info(f"Start epoch {epoch}")
        batches = self.loader.iterate(epoch, signals.interruptible)
        # Garbage is collected on all ranks in the same steps, because one rank's collection makes all ranks wait.
        gc.disable()
        self.stopwatch.restart()
        with self.reporter.epoch(epoch, self.position.step_in_epoch), contextlib.ExitStack() as stack:
            stack.callback(gc.enable)
            # For each optimizer step, zip takes accum_freq micro-batches from the same iterator.
            for step_batches in zip(*[batches] * self.length.accum_freq, strict=False):
                self._one_step(list(step_batches))
                if self.position.step % _GARBAGE_EVERY_STEPS == 0:
                    gc.collect(generation=1)
                # At the end of an epoch, requests are read immediately, because the following evaluation may take hours.
                self._act_on(signals.poll_ranks(now=self.position.step_in_epoch >= self.steps_per_epoch), signals)

    def _one_step(self, batches: list[Batch]) -> None:
        self.stopwatch.data_arrived()
        position = self.position
        self.schedule(self._schedule_step)
        if self.batch_report is not None:
            self.batch_report.add(batches)
        terms = self.step(batches, position.step)
        if not self._has_stepped:
            distributed.set_timeout(distributed.STEP_TIMEOUT)
            self._has_stepped = True
        is_last = position.step_in_epoch + 1 >= self.steps_per_epoch
        is_logged = position.step_in_epoch % self.length.log_every == 0 or is_last
        # In a logged step, waiting costs nothing, because logging also synchronizes with the device.
        skipped = self.step.guard.poll_outcomes(wait=is_logged)
        self.stopwatch.step_done()
        self._report_skipped(skipped)
        padding = _padding_share(batches) if self.step.is_grouped(batches[0]) else None
        global_batch = distributed.world_size() * sum(len(batch["text"]) for batch in batches)
        position.samples += global_batch
        if is_logged:
            has_loss = all(step.has_loss for step in skipped if step.number == position.step)
            self._report(terms, global_batch, has_loss, padding)
        self.reporter.advance()
        position.step += 1
        position.step_in_epoch += 1

    def _act_on(self, request: Request, signals: SignalRequests) -> None:
        if self.step.guard.in_a_row >= self.length.max_skipped_steps:
            self._save_mid_epoch(must_succeed=True)  # skipped steps change nothing, so the state can be saved
            raise TrainingDiverged(
                f"{self.step.guard.in_a_row} steps in a row were not finite and skipped; the last was step "
                f"{self.position.step - 1}. Check the samples in the log, lower --lr, set --grad-clip-norm, or "
                "raise --max-skipped-steps. --resume latest continues after these steps"
            )
        every = self.policy.every_steps
        if request == Request.NOTHING and not (every > 0 and self.position.step % every == 0):
            return
        # After the last step of an epoch, the epoch's own checkpoint follows immediately.
        is_last = self.position.step_in_epoch == self.steps_per_epoch
        if is_last and self._is_saved(self.position.epoch + 1) and request != Request.SAVE_AND_STOP:
            return
        self._save_mid_epoch(must_succeed=request == Request.SAVE_AND_STOP)
        self.stopwatch.restart()
        if request == Request.SAVE_AND_STOP:
            self._stop(signals)

    def _stop(self, signals: SignalRequests) -> NoReturn:
        if distributed.is_rank0():
            logger.warning(f"Stopped by a signal after step {self.position.step}; continue with --resume latest.")
        raise SystemExit(signals.exit_status)

    def _save_before_abort(self, must_succeed: bool) -> None:
        """Save the steps since the last checkpoint, so that the user can fix the problem and continue the run."""
        if self._saved_step != self.position.step:
            self._save_mid_epoch(must_succeed)

    def _report_skipped(self, steps: Sequence[SkippedStep]) -> None:
        """Log the skipped steps with the samples of all ranks. Collective: all ranks call it."""
        for step in steps:
            parts = distributed.all_gather_object(step)
            if not distributed.is_rank0():
                continue
            affected = [part for part in parts if part.are_bad] or parts
            samples = [sample for part in affected for sample in part.samples]
            guard, scaler, are_bad = self.step.guard, self.step.scaler, affected[0].are_bad
            if scaler is not None and step.has_loss and not are_bad:
                logger.info(
                    f"Step {step.number} skipped: gradients overflowed. The loss scale falls to {scaler.get_scale():g}. "
                    f"Skipped so far: {guard.skipped}"
                )
                continue
            what = "samples" if are_bad else "gradients; the batch has samples"
            more = f" and {len(samples) - _NAMED_SAMPLES} more" if len(samples) > _NAMED_SAMPLES else ""
            named = f"{what} {samples[:_NAMED_SAMPLES]}{more}"
            logger.warning(f"Step {step.number} skipped: non-finite {named}. Skipped so far: {guard.skipped}")

    def _report(self, terms: dict[str, Tensor], global_batch: int, has_loss: bool, padding: float | None) -> None:
        """Log a step; this synchronizes with the device."""
        position = self.position
        known_bad, own_bad = self.loader.bad_counts()
        own = torch.stack([value.float() for value in terms.values()])
        *sums, other_bad = distributed.all_reduce_sum(torch.cat([own, own.new_tensor([own_bad])])).tolist()
        named = {name: value / distributed.world_size() for name, value in zip(terms, sums, strict=True)}
        metrics = self.loss.metrics()
        if not has_loss:
            # Without valid samples, these values have no meaning. Log NaN, because a loss of 0 would look like a perfect loss.
            named = dict.fromkeys(named, math.nan)
            metrics = {name: value for name, value in metrics.items() if name not in ("chance", "weight_mean")}
            metrics["infonce"] = math.nan
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
            **({} if padding is None else {"text_padding": padding}),
            **metrics,
        }
        record.setdefault("temperature", metrics.get("temperature_median", float("nan")))
        self.reporter.train_step(record, self.stopwatch)
        self.stopwatch.reset()

    def _end_epoch(self) -> None:
        position = self.position
        skipped = self.step.guard.skipped
        self.position = Position(position.epoch + 1, position.step, samples=position.samples)
        reached = {"step": position.step - 1, "epoch": position.epoch, "samples": position.samples}
        self.reporter.epoch_end(reached, self.loader.bad_counts()[0])
        if self.position.epoch == self.length.epochs and skipped == position.step:
            raise TrainingDiverged(
                f"all {skipped} steps of the run were skipped, because their gradients were not finite. The model is "
                "unchanged and not saved. Check the samples in the log, lower --lr, or set --grad-clip-norm"
            )
        self._save_epoch()
        self._evaluate()
        self.stopwatch.restart()

    def _save_mid_epoch(self, must_succeed: bool) -> None:
        self._report_skipped(self.step.guard.poll_outcomes(wait=True))
        path = self._save(f"epoch_{self.position.epoch}_step_{self.position.step}", must_succeed)
        if path is not None and distributed.is_rank0():
            saving.remove_older_mid_epoch(path.parent, kept=path)

    def _is_kept(self, epochs: int) -> bool:
        """Return whether the model after ``epochs`` epochs gets a checkpoint of its own."""
        every = self.policy.every_epochs
        return epochs == self.length.epochs or (every > 0 and epochs % every == 0)

    def _is_saved(self, epochs: int) -> bool:
        """Return whether a checkpoint is saved after ``epochs`` epochs."""
        return self.policy.most_recent or self._is_kept(epochs)

    def _save_epoch(self) -> None:
        completed, policy = self.position.epoch, self.policy
        saved = None
        if self._is_kept(completed):
            saved = self._save(f"epoch_{completed}", must_succeed=completed == self.length.epochs)
        if policy.most_recent:
            saved = self._save(ckpt.LATEST, must_succeed=False) or saved
        if saved is None or not distributed.is_rank0():
            return
        saving.remove_older_mid_epoch(saved.parent, kept=saved)
        every = max(1, policy.every_epochs)
        previous = saved.parent / f"epoch_{(completed - 1) // every * every}.pt"
        if policy.delete_previous:
            saving.remove(previous)

    def _save(self, name: str, must_succeed: bool) -> Path | None:
        """Write a checkpoint. If this fails, raise SaveFailed if ``must_succeed``, else log a warning and return None."""
        folder, position = self.policy.folder, self.position
        if folder is None:
            return None
        head = self.loss.model_head()
        if not parallel.all_finite([*self.model.parameters(), *([] if head is None else head.parameters())]):
            raise TrainingDiverged(
                f"the parameters are not finite after step {position.step}; the last good checkpoint in {folder} is "
                "unchanged. Lower --lr, lengthen --warmup, or set --grad-clip-norm"
            )
        target = folder / f"{name}.pt"
        try:
            content = self.model_file()
            saving.save_adapter(target, content, self.model)
            parts = stateful_parts(self.step, self.loader)
            path = saving.save(folder, name, content, self.loss, position, self.identity, parts)
        except OSError as error:
            if must_succeed:
                raise SaveFailed(f"the last checkpoint {name}.pt could not be saved: {error}") from error
            if distributed.is_rank0():
                logger.warning(f"Checkpoint {name}.pt could not be saved ({error}); training continues.")
            return None
        self._saved_step = position.step
        if distributed.is_rank0():
            with contextlib.suppress(OSError):
                (folder.parent / SAVED).touch()
        return path

    def model_file(self) -> dict[str, Any]:
        """Return OpenCLIP's checkpoint dictionary, complete on rank 0. Collective: all ranks call it.

        ``step`` is added to find the ``.state`` folder.
        """
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
        if lora.is_adapted(model) and distributed.is_rank0():
            content = lora.with_merged(content, model)
        return content

    def _evaluate(self) -> None:
        """Run the due evaluations on rank 0, while other ranks wait. Afterwards, restore the random generators."""
        from openclip_ext.training.validation import run_tasks

        epoch, is_last = self.position.epoch, self.position.epoch == self.length.epochs
        due = [one for one in self.tasks if one.every > 0 and (is_last or epoch % one.every == 0)]
        metrics: dict[str, float] = {}
        with parallel.whole_model(self.model, needed=bool(due)) as model:
            if model is not None:
                generators = ckpt.random_state()
                with contextlib.nullcontext() if self.step.ema is None else self.step.ema.in_place():
                    metrics = run_tasks(due, with_heads(model, self.loss.model_head()))
                ckpt.set_random_state(generators)
        # Save best.pt before the result is logged. If the run is killed in between, a resume evaluates again.
        self._keep_best(metrics)
        self.reporter.evaluation(metrics, {"step": self.position.step, "epoch": epoch})
        distributed.barrier()

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Save the model as best.pt if its metric is the best so far. Collective: all ranks call it."""
        folder, metric = self.policy.folder, self.policy.best_metric
        if folder is None or metric is None:
            return
        from openclip_ext.training.validation import is_best

        if distributed.broadcast_object(is_best(metrics, metric, folder, self.position.epoch)):
            saving.save_model(folder / "best.pt", self.model_file(), self.model)


def _padding_share(batches: Sequence[Batch]) -> float:
    """Return the share of padding in the positions of this rank's texts that the model computes."""
    groups = [batch["text_groups"] for batch in batches]
    return 1 - sum(one.num_tokens for one in groups) / sum(one.num_positions for one in groups)
