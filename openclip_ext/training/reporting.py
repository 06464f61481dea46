"""What a run tells while it trains: a bar, plain lines in the log, ``metrics.jsonl``, TensorBoard, W&B."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from openclip_ext import distributed


class Stopwatch:
    """Seconds spent waiting for data and in whole steps, since the last report."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._all_steps, self._all_seconds = 0, 0.0
        self.reset()

    def reset(self) -> None:
        self.steps, self.data_seconds, self.seconds = 0, 0.0, 0.0

    def data_arrived(self) -> None:
        """Call when the step's batches are there."""
        self.data_seconds += time.perf_counter() - self._last

    def step_done(self) -> None:
        """Call at the end of the step."""
        now = time.perf_counter()
        self.seconds += now - self._last
        self._all_seconds += now - self._last
        self._last = now
        self.steps += 1
        self._all_steps += 1

    def restart(self) -> None:
        """Forget the time since the last step: a checkpoint or an evaluation was in between."""
        self._last = time.perf_counter()

    def seconds_for(self, steps: int) -> float:
        """How long so many steps take, at the average pace since the start."""
        return steps * self._all_seconds / max(self._all_steps, 1)

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / max(self.steps, 1)

    @property
    def data_seconds_per_step(self) -> float:
        return self.data_seconds / max(self.steps, 1)


class Reporter:
    """Writes the run's numbers everywhere they belong. Only the master's reporter does anything.

    A destination that fails (a full disk, say) is named once in the log and costs the run nothing.

    Args:
        folder: run folder, or None to write no files.
        args: flags ``reports``, ``name``, ``tensorboard_path``, ``wandb_*``, ``debug``.
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps of an epoch.
    """

    def __init__(self, folder: Path | None, args: argparse.Namespace, total_steps: int, steps_per_epoch: int) -> None:
        self.active = distributed.is_master()
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.epochs = args.epochs
        self._folder = folder if self.active else None
        self._failed: set[str] = set()
        self._bar: tqdm | None = None
        self._tensorboard = _tensorboard_writer(args) if self._folder is not None else None
        self._wandb = _start_wandb(args, folder) if self.active and "wandb" in args.reports else None

    @contextmanager
    def epoch(self, epoch: int, first_step: int) -> Iterator[None]:
        """Show a bar for an epoch on a terminal; log lines are printed above it."""
        if not (self.active and sys.stderr.isatty()):
            yield
            return
        description = f"epoch {epoch + 1}/{self.epochs}"
        with (
            logging_redirect_tqdm(),
            tqdm(
                total=self.steps_per_epoch, initial=first_step, desc=description, unit="step", dynamic_ncols=True
            ) as bar,
        ):
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def advance(self) -> None:
        """One more optimizer step is done."""
        if self._bar is not None:
            self._bar.update()

    def train_step(self, record: dict[str, Any], stopwatch: Stopwatch) -> None:
        """Report a logged step.

        Args:
            record: ``step``, ``epoch``, ``samples``, ``loss``, and whatever else is known, as plain numbers.
            stopwatch: times since the last report.
        """
        if not self.active:
            return
        samples_per_second = record["global_batch"] / max(stopwatch.seconds_per_step, 1e-9)
        timing = {
            "samples_per_second": samples_per_second,
            "batch_time": stopwatch.seconds_per_step,
            "data_time": stopwatch.data_seconds_per_step,
        }
        left = stopwatch.seconds_for(self.total_steps - record["step"] - 1)
        self._log_line(record, timing, left)
        self._write("metrics.jsonl", {**record, **timing})
        self._scalars("train", {**record, **timing}, record["step"])
        if self._bar is not None:
            shown = {"loss": f"{record['loss']:.4g}", "infonce": f"{record.get('infonce', float('nan')):.4g}"}
            self._bar.set_postfix({**shown, "left": _duration(left)}, refresh=False)

    def _log_line(self, record: dict[str, Any], timing: dict[str, float], left: float) -> None:
        terms = " ".join(f"{name} {value:.5g}" for name, value in record["terms"].items())
        parts = [
            f"epoch {record['epoch'] + 1}/{self.epochs} step {record['step'] + 1}/{self.total_steps}",
            f"loss {record['loss']:.5g}" + (f" ({terms})" if len(record["terms"]) > 1 else ""),
            f"infonce {record.get('infonce', float('nan')):.4f} (chance {record['chance']:.4f})",
            f"temperature {record['temperature']:.4g}",
            f"lr {record['lr']:.3g}",
            f"{timing['samples_per_second']:.0f} samples/s, step {1000 * timing['batch_time']:.0f} ms",
            f"data wait {100 * timing['data_time'] / max(timing['batch_time'], 1e-9):.0f} %",
            f"left {_duration(left)}",
        ]
        logging.info(" | ".join(parts))

    def evaluation(self, metrics: dict[str, float], position: dict[str, int]) -> None:
        """Report an evaluation: OpenCLIP's ``results.jsonl``, a line in ``metrics.jsonl``, TensorBoard, W&B.

        Args:
            metrics: plain numbers; written to ``results.jsonl`` as they are.
            position: ``step`` and ``epoch`` (completed epochs) at which the model stood.
        """
        if not self.active or not metrics:
            return
        shown = "\t".join(f"{name}: {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
        logging.info(f"Eval Epoch: {position['epoch']} {shown}")
        self._write("checkpoints/results.jsonl", {**metrics, "epoch": position["epoch"]})
        self._write("metrics.jsonl", {**position, "evaluation": metrics})
        self._scalars("val", metrics, position["epoch"], wandb_step=position["step"])

    def close(self) -> None:
        """Flush and end what was opened."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, file: str, record: dict[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            with open(self._folder / file, "a") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            self._warn_once(file, error)

    def _scalars(self, group: str, values: dict[str, Any], step: int, wandb_step: int | None = None) -> None:
        numbers = {f"{group}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        try:
            if self._tensorboard is not None:
                for name, value in numbers.items():
                    self._tensorboard.add_scalar(name, value, step)
            if self._wandb is not None:
                self._wandb.log(numbers, step=step if wandb_step is None else wandb_step)
        except OSError as error:
            self._warn_once("the TensorBoard or W&B log", error)

    def _warn_once(self, destination: str, error: OSError) -> None:
        if destination not in self._failed:
            self._failed.add(destination)
            logging.warning(f"Cannot write {destination} ({error}); training goes on.")


def _tensorboard_writer(args: argparse.Namespace) -> Any:
    if not args.tensorboard_path:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(args.tensorboard_path)


def _start_wandb(args: argparse.Namespace, folder: Path | None) -> Any:
    import wandb

    wandb.init(
        project=args.wandb_project_name,
        name=args.name,
        id=args.name,
        notes=args.wandb_notes,
        resume="auto" if args.resume is not None else None,
        config={name: value for name, value in vars(args).items() if isinstance(value, str | int | float | bool)},
    )
    if folder is not None:
        wandb.save(str(folder / "params.txt"))
    return wandb


def _duration(seconds: float) -> str:
    """``h:mm:ss``"""
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
