"""The reports of a run: a progress bar, log lines, ``metrics.jsonl``, TensorBoard, W&B."""

import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.files import json_lines
from openclip_ext.training.config import ReportingConfig

logger = get_logger(__name__)

# Number of consecutive logged steps at chance that counts as collapse or failure to learn.
_CHANCE_REPORTS = 5
# A step is at chance if InfoNCE is at least this fraction of log(batch size), the InfoNCE of equal embeddings. Random
# embeddings have a larger InfoNCE.
_CHANCE_SHARE = 0.999


class Stopwatch:
    """A timer of full steps, and of the wait for data in each step, since the last report and since the start."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._all_steps, self._all_seconds = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Set the times since the last report to 0."""
        self.steps, self.data_seconds, self.seconds = 0, 0.0, 0.0

    def data_arrived(self) -> None:
        self.data_seconds += time.perf_counter() - self._last

    def step_done(self) -> None:
        seconds = time.perf_counter() - self._last
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self._all_steps, self._all_seconds = self._all_steps + 1, self._all_seconds + seconds
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step, for example for a checkpoint or an evaluation."""
        self._last = time.perf_counter()

    def seconds_for(self, steps: int) -> float:
        """Return the expected duration of ``steps`` steps in seconds, at the average speed since the start."""
        return steps * self._all_seconds / max(self._all_steps, 1)


class Reporter:
    """Writer of a run's metrics to all destinations. Only rank 0 writes. ``flags`` are stored in W&B.

    ``is_steered``: whether the loss is steered. The InfoNCE of a steered loss may exceed chance, so it causes no warning.
    If this launch repeats ``first_step`` and later steps, TensorBoard hides the values that an earlier launch logged for them.

    If a destination fails (for example on a full disk), a warning is logged once and the run continues. Without a folder, no
    files are written.
    """

    def __init__(
        self,
        folder: Path | None,
        config: ReportingConfig,
        first_step: int,
        steps_left: int,
        steps_per_epoch: int,
        flags: Mapping[str, Any] | None = None,
        is_steered: bool = False,
    ) -> None:
        self.active = distributed.is_rank0()
        self.total_steps = first_step + steps_left
        self.steps_per_epoch = steps_per_epoch
        self.epochs, self._is_steered = config.epochs, is_steered
        self.warmup = config.warmup * (self.total_steps if config.warmup < 1 else 1)
        self._folder = folder if self.active else None
        self._failed: set[str] = set()
        self._unwritten: defaultdict[str, bytes] = defaultdict(bytes)  # by file: lines that are still to be written
        self._reports_at_chance = 0
        self._bar: tqdm | None = None
        self._tensorboard: Any = None
        if self._folder and "tensorboard" in config.destinations:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = first_step if steps_left > 0 else None
            self._tensorboard = SummaryWriter(self._folder / "tensorboard", purge_step=purge_step)
        self._wandb: Any = None
        if self.active and "wandb" in config.destinations:
            import wandb

            plain = {
                name: value for name, value in (flags or {}).items() if isinstance(value, str | int | float | bool)
            }
            wandb.init(
                project=config.wandb_project,
                name=config.name,
                id=config.name,
                notes=config.wandb_notes,
                resume="auto" if config.resumes else None,
                config=plain,
            )
            if folder is not None:
                wandb.save(str(folder / "params.txt"))
            self._wandb = wandb

    @contextmanager
    def epoch(self, epoch: int, first_step: int) -> Iterator[None]:
        """Show a progress bar for an epoch on a terminal. Log lines are printed above the bar."""
        if not (self.active and sys.stderr.isatty()):
            yield
            return
        options = {"desc": f"epoch {epoch + 1}/{self.epochs}", "unit": "step", "dynamic_ncols": True}
        with logging_redirect_tqdm(), tqdm(total=self.steps_per_epoch, initial=first_step, **options) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def advance(self) -> None:
        """Advance the progress bar by one optimizer step."""
        if self._bar is not None:
            self._bar.update()

    def train_step(self, record: dict[str, Any], stopwatch: Stopwatch) -> None:
        """Report a step. ``record`` contains ``step``, ``epoch``, ``loss``, a dictionary ``terms``, and other numbers."""
        if not self.active:
            return
        steps = max(stopwatch.steps, 1)
        seconds = stopwatch.seconds / steps
        timing = {"samples_per_second": record["global_batch"] / max(seconds, 1e-9), "batch_time": seconds}
        record = {**record, **timing, "data_time": stopwatch.data_seconds / steps}
        left = stopwatch.seconds_for(self.total_steps - record["step"] - 1)
        self._log_line(record, left)
        self._warn_at_chance(record)
        self._write("metrics.jsonl", record)
        self._scalars("train", record, record["step"])
        if self._bar is not None:
            shown = {"loss": f"{record['loss']:.4g}", "infonce": f"{record.get('infonce', float('nan')):.4g}"}
            self._bar.set_postfix({**shown, "left": tqdm.format_interval(left)}, refresh=False)

    def _log_line(self, record: dict[str, Any], left: float) -> None:
        terms = " ".join(f"{name} {value:.5g}" for name, value in record["terms"].items())
        parts = [
            f"epoch {record['epoch'] + 1}/{self.epochs} step {record['step'] + 1}/{self.total_steps}",
            f"loss {record['loss']:.5g}" + (f" ({terms})" if len(record["terms"]) > 1 else ""),
            f"infonce {record.get('infonce', float('nan')):.4f} (chance {record['chance']:.4f})",
            f"temperature {record['temperature']:.4g}",
            f"lr {record['lr']:.3g}",
            f"{record['samples_per_second']:.0f} samples/s, step {1000 * record['batch_time']:.0f} ms",
            f"data wait {100 * record['data_time'] / max(record['batch_time'], 1e-9):.0f} %",
            f"left {tqdm.format_interval(left)}",
            *([f"bad samples {record['bad_samples']}"] if record.get("bad_samples") else []),
        ]
        logger.info(" | ".join(parts))

    def _warn_at_chance(self, record: dict[str, Any]) -> None:
        """Log a warning once if the run stays at chance after the warm-up. All other metrics may look normal."""
        chance = record["chance"]
        is_late = record["step"] >= self.warmup and not self._is_steered
        # Without any negatives (equal captions), chance is 0.
        is_at_chance = is_late and chance > 0 and record.get("infonce", -math.inf) >= _CHANCE_SHARE * chance
        self._reports_at_chance = self._reports_at_chance + 1 if is_at_chance else 0
        if self._reports_at_chance == _CHANCE_REPORTS:
            logger.warning(
                f"InfoNCE at chance ({chance:.4f}) or above for {_CHANCE_REPORTS} logged steps after the warm-up. "
                "If it falls, train more steps. If not, the embeddings collapsed or do not learn: try a smaller --lr or a "
                "longer --warmup"
            )

    def epoch_end(self, position: dict[str, int], bad_samples: int) -> None:
        """Write an epoch's number of bad samples, unless it is 0.

        ``position`` contains ``epoch``, the last ``step``, and the ``samples`` seen.
        """
        if self.active and bad_samples:
            self._write("metrics.jsonl", {**position, "bad_samples": bad_samples})

    def evaluation(self, metrics: dict[str, float], position: dict[str, int]) -> None:
        """Report an evaluation of the model. ``position`` contains ``step`` and ``epoch`` (completed epochs)."""
        if not self.active or not metrics:
            return
        shown = "\t".join(f"{name}: {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
        logger.info(f"Eval Epoch: {position['epoch']} {shown}")
        self._write("checkpoints/results.jsonl", {**metrics, "epoch": position["epoch"]})
        self._write("metrics.jsonl", {**position, "evaluation": metrics})
        self._scalars("val", metrics, position["epoch"], wandb_step=position["step"])

    def close(self) -> None:
        try:
            if self._tensorboard is not None:
                self._tensorboard.close()
        except OSError as error:  # TensorBoard raises an earlier error of its writer again
            self._warn_once("the TensorBoard or W&B log", error)
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, file: str, record: dict[str, Any]) -> None:
        if self._folder is None:
            return
        self._unwritten[file] += json_lines.dumps(record).encode() + b"\n"
        end = None
        try:
            with open(self._folder / file, "ab+") as lines:
                end = lines.tell()
                lines.seek(max(0, end - 1))
                torn = lines.read(1) not in (b"", b"\n")  # a killed process may have left an incomplete line
                lines.write(b"\n" * torn + self._unwritten[file])
            del self._unwritten[file]
        except OSError as error:  # the lines stay in `_unwritten`, and the next call writes them
            if end is not None:
                with suppress(OSError):
                    os.truncate(self._folder / file, end)
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
            logger.warning(f"Cannot write {destination} ({error}); training continues.")
