"""Run ``openclip-ext compare``: read the data, plan and execute the trials, and write the report."""

import argparse
import itertools
import math
import os
import platform
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from openclip_ext import compat
from openclip_ext.checkpoint.format import checksum
from openclip_ext.cli import command_line
from openclip_ext.cli.messages import for_people, get_logger, without_secrets
from openclip_ext.cli.options import option_as_words
from openclip_ext.compare import plan as planner
from openclip_ext.compare import report, space
from openclip_ext.compare.config import CompareConfig, parse
from openclip_ext.compare.data import StudyData, prepare
from openclip_ext.compare.pool import ProcessPool
from openclip_ext.compare.trial import Probe, Task, warmup_steps
from openclip_ext.compare.trials import Run, Trials, chosen, score
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.evaluation.results import config_digest
from openclip_ext.files import json_lines
from openclip_ext.files.writing import file_lock, write_text
from openclip_ext.losses.options import OPTIONS
from openclip_ext.training.checks import slow_precision
from openclip_ext.training.config import RunPlan
from openclip_ext.training.runtime.run_folder import versions

logger = get_logger(__name__)

# Time to measure the costs of the losses: as a fraction of --minutes, and its maximum in seconds.
_PROBE_SHARE, _PROBE_SECONDS = 0.02, 10.0
_REPORT_SECONDS = 2.0
_OTHER = "the folder {} holds a comparison with different {}: choose another --output, or remove the folder"


def main(argv: list[str]) -> None:
    """Compare losses and write the report. The exit status is 130 after a signal, and 1 if there is no result."""
    started = time.monotonic() - time.process_time()  # the start of the process, because --minutes includes the imports
    config, training = parse(argv)
    if warning := slow_precision(training, torch.device(training.device or "cpu")):
        logger.warning(warning)
    try:
        with file_lock(config.folder):  # locks the folder, including the cache in it
            trials = open_trials(config, training)  # rejects a folder with other flags before the data are decoded
            data, notes = prepare(config, training)
            comparison = Comparison(config, training, data, trials, started + 60 * config.minutes)
            stopped = comparison.run()
            has_result = comparison.write_report(notes)
    except BadDataError as error:
        raise ValueError(str(error)) from error
    if stopped:
        print("stopped; the same command continues from here")
        raise SystemExit(130)
    if not has_result:
        raise SystemExit(1)


def open_trials(config: CompareConfig, training: RunPlan) -> Trials:
    """Return the trials in the output folder. Raise ValueError if their flags differ."""
    trials = Trials(config.folder / "trials.jsonl")
    if trials.study is not None and trials.study["flags"] != digest_of_flags(config, training):
        raise ValueError(_OTHER.format(config.output, "flags, versions or pretrained weights"))
    return trials


class Comparison:
    """A comparison, stored in the table ``trials``. It stops at ``deadline``, a value of ``time.monotonic()``."""

    def __init__(
        self, config: CompareConfig, training: RunPlan, data: StudyData, trials: Trials, deadline: float
    ) -> None:
        self.config, self.training, self.data, self.trials, self.deadline = config, training, data, trials, deadline
        self.batch = training.loading.batch_size * training.loading.accum_freq
        self.candidates = {loss: space.candidates(loss, config.loss_options) for loss in config.losses}
        self._flags = digest_of_flags(config, training)
        self.context = config_digest([self._flags, data.digest])
        self._pool = ProcessPool(config.processes, torch.device(training.device or "cpu"))
        # Maximum number of training samples of a run: the full batches of ``--epochs`` epochs.
        self._most_samples = training.length.epochs * (data.num_samples // self.batch * self.batch)
        if trials.study is not None and trials.study["context"] != self.context:
            raise ValueError(_OTHER.format(config.output, "data"))

    def run(self) -> bool:
        """Execute all rungs until the deadline or a signal; return whether a signal arrived."""
        try:
            if self.trials.study is None:
                self._plan_first()
            else:
                self._drop_unstarted_rung()
            while self._work() and self._plan_next():
                pass
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _seconds_left(self) -> float:
        return (self.deadline - time.monotonic() - _REPORT_SECONDS) * (1 - planner.RESERVE)

    def _plan_first(self) -> None:
        """Plan the first rung from the costs of each loss, which are measured first."""
        costs, before = self._probe()
        tried, rung = planner.plan_first(
            costs,
            self._seconds_left,
            self.config.processes,
            self.batch,
            self._most_samples,
            most_tried=min(map(len, self.candidates.values())),
            minutes=self.config.minutes,
        )
        study = {"flags": self._flags, "context": self.context, "before": before, "tried": tried}
        self.trials.plan_rung(rung, study=study)

    def _probe(self) -> tuple[planner.Costs, float]:
        """Return the costs of each loss while all processes are busy, and R@1 before training.

        A loss whose probe fails counts like the most costly loss, and its trials tell the reason.
        """
        losses, processes = self.config.losses, self.config.processes
        rounds = math.ceil(len(losses) / processes)
        seconds = min(_PROBE_SECONDS, 60 * self.config.minutes * _PROBE_SHARE) / rounds
        length = self._length(10_000 * self.batch)
        tasks: dict[str, Probe] = {}
        for number, loss in enumerate(itertools.islice(itertools.cycle(losses), rounds * processes)):
            run = self.make_run(loss, *self.candidates[loss][0], length)
            tasks[f"{number} {loss}"] = Probe(self.task(run), seconds)
        found: dict[str, list[dict[str, Any]]] = {loss: [] for loss in losses}
        failures = []

        def on_end(name: str, probe: dict[str, Any] | None, failure: str) -> None:
            del tasks[name]
            if probe is None:
                failures.append(failure)
            else:
                found[name.partition(" ")[2]].append(probe)

        self._pool.work_off(lambda: tasks, on_end)
        if not found[space.BASELINE]:
            raise ValueError(f"a run failed: {failures[0]}")
        means = {loss: statistics.fmean(one["per_sample"] for one in own) for loss, own in found.items() if own}
        per_run = statistics.fmean(one["per_run"] for own in found.values() for one in own)
        costs = planner.Costs({loss: means.get(loss, max(means.values())) for loss in losses}, per_run)
        return costs, found[space.BASELINE][0]["before"]

    def _drop_unstarted_rung(self) -> None:
        """Forget a later rung that an earlier call did not start. This call plans it again for the remaining time."""
        last = len(self.trials.rungs) - 1
        if last > 0 and not self.trials.planned[last].keys() & self.trials.done.keys():
            self.trials.drop_rungs(last)

    def _plan_next(self) -> bool:
        """Plan the next rung from the measured costs, if none is unfinished; return False if there is no time for it."""
        last = len(self.trials.rungs) - 1
        if self._pending(last):
            return True
        costs = self._measured_costs(last)
        if costs is None or self._seconds_left <= 0:
            return False
        limits = (self.config.processes, self.batch, self._most_samples)
        rung = planner.plan_next(self.trials.rungs[last], costs, self._seconds_left, *limits)
        if rung is not None:
            self.trials.plan_rung(rung)
        return rung is not None

    def _measured_costs(self, rung: int) -> planner.Costs | None:
        """Return the costs of the winners in the trials of a rung; None if one of them has no finished trial."""
        rows = [self.trials.done[name] for name in self.trials.planned[rung] if name in self.trials.done]
        rows = [row for row in rows if row["curve"]]
        per_sample = {}
        for loss in winners(self.trials, rung, self.config.losses):
            own = [row for row in rows if row["family"] == loss]
            if not own:
                return None
            per_sample[loss] = sum(row["seconds"] for row in own) / sum(row["curve"][-1][0] for row in own)
        return planner.Costs(per_sample, statistics.fmean(row["all_seconds"] - row["seconds"] for row in rows))

    def _extend(self) -> int:
        """Plan the trials that the results allow; return the first rung with a trial that has not ended, else the last."""
        for number, rung in enumerate(self.trials.rungs):
            self.trials.plan(number, chosen(self._first_runs(number), rung.seeds, self.trials.known))
            if self._pending(number):
                return number
        return len(self.trials.rungs) - 1

    def _first_runs(self, number: int) -> dict[str, list[Run]]:
        """Return the runs of a rung with its first seed, by loss."""
        length = self._length(self.trials.rungs[number].samples)
        if number == 0:
            tried = (self.trials.study or {})["tried"]  # stored with the first rung
            every = self.candidates.items()
            return {loss: [self.make_run(loss, *one, length) for one in own[:tried]] for loss, own in every}
        best = winners(self.trials, number - 1, self.config.losses)
        return {loss: [replace(run, **length) for run in runs] for loss, runs in best.items()}

    def _pending(self, rung: int) -> dict[str, Run]:
        """Return the planned runs of a rung that have not ended, by id, ordered by seed."""
        known, losses = self.trials.known, self.config.losses
        runs = [run for run in self.trials.planned[rung].values() if run.id not in known and run.family in losses]
        return {run.id: run for run in sorted(runs, key=lambda run: run.seed)}

    def _length(self, samples: int) -> dict[str, Any]:
        epochs, epoch_samples = planner.equal_epochs(samples, self.batch, self.data.num_samples)
        return {"epochs": epochs, "epoch_samples": epoch_samples}

    def make_run(self, loss: str, options: space.Options, factor: float, length: Mapping[str, Any]) -> Run:
        return Run(
            data=self.context,
            model=self.training.model.name,
            schedule="compare",
            batch_size=self.batch,
            **length,
            lr=self.training.optimizer.lr * factor,
            seed=planner.SEEDS[0],
            family=loss,
            setting={"loss": loss, "options": options, **space.source(loss)},
        )

    def _work(self) -> bool:
        """Execute the trials of the first unfinished rung; return False if the deadline comes first."""
        trials, number = self.trials, self._extend()
        rung, losses = trials.rungs[number], self._first_runs(number)
        runs = sum(len(own) + len(rung.seeds) - 1 for own in losses.values())
        done = len(trials.planned[number].keys() & trials.done.keys()) * rung.samples - self._pool.samples
        with command_line.progress_bar(
            total=runs * rung.samples,
            initial=done + self._pool.samples,
            unit="sample",
            unit_scale=True,
            smoothing=0.05,
        ) as bar:

            def has_time() -> bool:
                bar.update(done + self._pool.samples - bar.n)
                return self.deadline - time.monotonic() > _REPORT_SECONDS

            def on_start(name: str, pid: int) -> None:
                trials.start(name, pid=pid, host=platform.node(), time=datetime.now().isoformat(timespec="seconds"))

            def on_end(name: str, row: dict[str, Any] | None, failure: str) -> None:
                trials.keep(name, row, failure)
                self._extend()
                bar.set_postfix_str(f"{len(trials.done)} runs finished", refresh=False)
                if row is None:
                    tqdm.write(for_people(f"a run failed: {failure.strip().splitlines()[-1]}"))

            def tasks() -> dict[str, Task]:
                return {name: self.task(run) for name, run in self._pending(number).items()}

            return self._pool.work_off(tasks, on_end, has_time, on_start)

    def task(self, run: Run) -> Task:
        """Return the task that trains and scores a run, as the command in the report would."""
        words = [*self._words(asdict(run)), "--seed", str(run.seed), "--logs", "none"]
        return Task(run, words, self.training.loading.workers, self.data)

    def _words(self, row: Mapping[str, Any], *more: str) -> list[str]:
        """Return the arguments of ``openclip-ext train`` for a run, ``more`` of them after the training data."""
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        # These flags are removed here, because they are set below.
        for flag in ("--lr", "--epochs", "--warmup", "--reference", "--lr-min", "--epochs-cooldown"):
            ours.add_argument(flag)
        own, kept = ours.parse_known_args(list(self.config.training))
        words = ["--train-data", self.config.shards, *more, *kept, "--loss", row["setting"]["loss"]]
        if "steer" in row["setting"]["options"]:  # without this check, --reference would also steer the baseline
            words += ["--reference", own.reference]
        for name, value in row["setting"]["options"].items():
            words += option_as_words(OPTIONS[name], value)
        epochs, samples = row["epochs"], row["epoch_samples"]
        steps = epochs * (samples // self.batch)
        warmup = warmup_steps(self.training.schedule, steps)
        words += ["--lr", str(row["lr"]), "--warmup", str(warmup), "--epochs", str(epochs)]
        # A short run, or one with a small learning rate, may be below the limits of the user's values.
        words += [] if own.lr_min is None else ["--lr-min", str(min(float(own.lr_min), row["lr"]))]
        words += (
            [] if own.epochs_cooldown is None else ["--epochs-cooldown", str(min(int(own.epochs_cooldown), epochs))]
        )
        return [*words, "--train-num-samples", str(samples)]

    def command_line(self, row: Mapping[str, Any]) -> str:
        """Return the ``openclip-ext train`` command of a run."""
        val = ["--val-data", self.config.val] if self.config.val else []
        return shlex.join(without_secrets(["openclip-ext", "train", *self._words(row, *val)]))

    def write_report(self, notes: list[str]) -> bool:
        """Write the report of the finished runs; return whether the report recommends a loss."""
        if self.trials.study is None:
            print("there is no report, because no run is finished yet")
            return False
        found = report.make_report(
            trials=self.trials,
            losses=self.config.losses,
            about=report.About(
                data=without_secrets(self.config.shards),
                model=self.training.model.name,
                batch=self.batch,
                num_samples=self.data.num_samples,
                before=self.trials.study["before"],
                notes=tuple(notes),
                processes=self.config.processes,
            ),
            images=self.data.test.image_hashes(),
            captions=self.data.test.captions(),
            command_line=self.command_line,
        )
        content = json_lines.dumps(asdict(found), indent=2) + "\n"
        texts = {"report.json": content, "report.md": report.markdown(found), "report.html": report.page(found)}
        for name, text in texts.items():
            write_text(self.config.folder / name, text)
        print(found.sentence)
        if command := report.recommended_command(found):
            print(f"{report.ABOUT_COMMAND}\n{command}")
        print(f"report: {self.config.folder / 'report.html'}, report.md, report.json")
        return found.recommended is not None


def winners(trials: Trials, rung: int, losses: Iterable[str]) -> dict[str, list[Run]]:
    """Return the runs whose settings enter the next rung: the best runs of the baseline and of the best other losses."""

    def mean_score(loss: str) -> float:
        return statistics.fmean(score(trials.known[run.id]) for run in trials.best(rung, loss))

    baseline, *others = (loss for loss in losses if trials.best(rung, loss))
    found = {}
    for loss in [baseline, *sorted(others, key=lambda loss: -mean_score(loss))[: planner.CONTENDERS]]:
        first, *rest = (runs[0] for runs in trials.settings(rung, loss)[: planner.FINALISTS])
        found[loss] = [first, *(run for run in rest if "failed" not in trials.known[run.id])]
    return found


def digest_of_flags(config: CompareConfig, training: RunPlan) -> str:
    """Return a digest of the flags, the model's files and the versions that apply to all runs, without the data."""
    names = ("model", "loading", "optimizer", "schedule", "step", "length")
    parts: list[Any] = [asdict(getattr(training, name)) for name in names]
    parts.append(compat.architecture(training.model.name, training.model.cache_dir))
    if (weights := training.model.weights) is not None and os.path.isfile(weights):
        parts.append(checksum(Path(weights)))
    return config_digest([parts, versions()])
