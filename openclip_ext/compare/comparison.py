"""Run ``openclip-ext compare``: read the data, plan, execute the runs, and report."""

import argparse
import json
import math
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import for_people, without_secrets
from openclip_ext.cli.options import option_as_words
from openclip_ext.compare import report, space
from openclip_ext.compare.config import CompareConfig, parse
from openclip_ext.compare.data import prepare
from openclip_ext.compare.decoded_data import DoesNotFit, PilotData
from openclip_ext.compare.pilot import ComparePilot, unpack
from openclip_ext.compare.plan import (
    CONTENDERS,
    FINALISTS,
    SEEDS,
    Costs,
    Stage,
    equal_epochs,
    least_seconds,
    plan_next,
    plan_tuning,
)
from openclip_ext.compare.process_pool import failure_words
from openclip_ext.compare.runs import Contest, Results, ResultsFile, Run, score
from openclip_ext.compare.short_run import seconds_a_sample, warmup_steps
from openclip_ext.compare.slurm_pool import make_pool
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.evaluation.results import config_digest
from openclip_ext.evaluation.statistics import group_numbers, half_width
from openclip_ext.files import json_lines
from openclip_ext.files.writing import held, write_atomically
from openclip_ext.losses.options import OPTIONS
from openclip_ext.training.config import TrainingConfig
from openclip_ext.training.runtime.run_folder import versions

# Share of --minutes that is reserved for runs that turn out slower than planned, and share that measuring the pace takes, at
# most so many seconds.
_RESERVE, _PROBE_SHARE, _PROBE_SECONDS = 0.1, 0.02, 10.0
_REPORT_SECONDS = 2.0
# A setting can be stopped after this share of a run, if another setting is ahead by so many half widths of the interval over
# the samples. One half width is too few, since the interval of one seed does not cover other seeds. Of the pairs of settings
# in docs/benchmarks/icons that were 3 points apart at an eighth of their runs, 7 of 100 changed places later; at a quarter it
# was 7 of 249, which ended at most 1.5 points apart.
_EARLIEST, _CLEARLY = 0.2, 1.5
_OTHER = "the folder {} holds a comparison with other {}: choose another --output, or remove the folder"


def main(argv: list[str]) -> None:
    """Compare losses and write the report; after a signal, report the finished runs and exit with status 130.

    The exit status is 1 if there is no result, because runs failed or the time was over.
    """
    started = time.monotonic() - time.process_time()  # includes the imports
    config, training = parse(argv)
    try:
        with held(config.folder):  # also protects the cache
            plan = read_plan(config, training)  # a folder of other flags is refused before the data are decoded
            if not plan:
                _refuse_short_time(config, training, started + 60 * config.minutes - time.monotonic() - _REPORT_SECONDS)
            data, notes = prepare(config, training)
            comparison = Comparison(config, training, data, started + 60 * config.minutes)
            stopped = comparison.run()
            has_result = comparison.write_report(notes)
    except (BadDataError, DoesNotFit) as error:
        raise ValueError(str(error)) from error
    if stopped:
        print("stopped; the same command continues from here")
        raise SystemExit(130)
    if not has_result:
        raise SystemExit(1)


def _refuse_short_time(config: CompareConfig, training: TrainingConfig, seconds: float) -> None:
    """Raise ValueError if the time is over before the least number of steps, before the data are decoded."""
    batch = training.loading.batch_size * training.loading.accum_freq
    needed = least_seconds(seconds_a_sample(training), len(config.losses), config.processes, batch)
    if seconds * (1 - _RESERVE) < needed:
        least = math.ceil(config.minutes + (needed / (1 - _RESERVE) - seconds) / 60)
        raise ValueError(
            f"the time is too short: --minutes {config.minutes:g}, and the shortest comparison of {len(config.losses)} losses "
            f"takes {needed / 60:.1f} minutes of training alone at this model's pace. Give --minutes {least} or, as reading "
            "and scoring take time, too, twice as many; or fewer --losses, or a smaller --model"
        )


class Comparison:
    """The comparison of one output folder, until a deadline of ``time.monotonic()``.

    Attributes:
        plan: the content of ``plan.json``; empty before the first plan.
        contests: the runs of the planned stages whose losses and settings are known.
    """

    def __init__(self, config: CompareConfig, training: TrainingConfig, data: PilotData, deadline: float) -> None:
        self.config, self.deadline = config, deadline
        self.results = ResultsFile(config.folder / "runs.jsonl")
        self.flags = digest_of_flags(config, training)
        self.context = config_digest([self.flags, data.digest])
        self.pilot = ComparePilot(training, data, config.population, config.anchors)
        self.candidates = {loss: space.candidates(loss, config.loss_options) for loss in config.losses}
        self.workers = make_pool(
            config.executor, config.processes, __name__, config.folder / "jobs", config.slurm, self.stop
        )
        self._under_way: dict[str, dict[str, Any]] = {}
        self._val_groups = group_numbers(data.val.captions())
        # The samples that a run may see at most: the whole batches of ``--epochs`` epochs.
        self._most_samples = training.length.epochs * (data.num_samples // self.pilot.batch * self.pilot.batch)
        self.contests: list[Contest] = []
        self.plan = read_plan(config, training)
        if self.plan and self.plan["context"] != self.context:
            raise ValueError(_OTHER.format(config.output, "data"))
        self._open_stages()

    def run(self) -> bool:
        """Work until everything is finished, the time is over or a signal comes; return whether a signal came."""
        try:
            if not self.plan:
                self._plan_tuning()
            self._drop_stage_not_begun()
            while self._work() and self._begin_stage():
                pass
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _seconds_left(self) -> float:
        return self.deadline - time.monotonic() - _REPORT_SECONDS

    def _open_stages(self) -> None:
        """Add the contests of the planned stages that can be known: each has the best runs of the stage before."""
        for stage in self.plan.get("stages", [])[len(self.contests) :]:
            if not self.contests:
                tried = {loss: range(min(self.plan["tried"], len(of))) for loss, of in self.candidates.items()}
                families = {loss: [self._make_run(loss, n, stage["samples"]) for n in of] for loss, of in tried.items()}
            elif self.contests[-1].pending(self.results.known):
                return
            else:
                length = self._length(stage["samples"])
                best = winners(self.contests[-1], self.results.known)
                families = {loss: [replace(run, **length) for run in runs] for loss, runs in best.items()}
            self.contests.append(Contest(families, stage["seeds"]))

    def _length(self, samples: int) -> dict[str, Any]:
        epochs, epoch_samples = equal_epochs(samples, self.pilot.batch, self.pilot.data.num_samples)
        return {"epochs": epochs, "epoch_samples": epoch_samples}

    def _make_run(self, loss: str, candidate: int, samples: int) -> Run:
        options, factor = self.candidates[loss][candidate]
        training = self.pilot.config
        return Run(
            data=self.context,
            model=training.model.name,
            schedule="compare",
            batch_size=self.pilot.batch,
            **self._length(samples),
            lr=training.optimizer.lr * factor,
            seed=SEEDS[0],
            family=loss,
            setting={"loss": loss, "options": options},
        )

    def _write_plan(self, **content: Any) -> None:
        self.plan = {**self.plan, **content}
        text = json_lines.dumps(self.plan, indent=2) + "\n"
        write_atomically(self.config.folder / "plan.json", lambda file: file.write(text.encode()))
        self._open_stages()

    def _plan_tuning(self) -> None:
        """Measure how wrong a batch is and how fast the baseline runs; plan the first stage as if all losses cost the same."""
        seconds = min(_PROBE_SECONDS, 60 * self.config.minutes * _PROBE_SHARE)
        run = self._make_run(space.BASELINE, 0, 10_000 * self.pilot.batch)
        probes = self.workers.run([partial(self.pilot.probe, run, seconds)] * self.config.processes)
        per_sample, per_run = (statistics.fmean(probe[key] for probe in probes) for key in ("per_sample", "per_run"))
        tried, stage = plan_tuning(
            Costs(dict.fromkeys(self.config.losses, per_sample), per_run),
            self._seconds_left * (1 - _RESERVE),
            self.config.processes,
            self.pilot.batch,
            self._most_samples,
            most_tried=min(map(len, self.candidates.values())),
        )
        about = {"flags": self.flags, "context": self.context, "judged": probes[0]}
        self._write_plan(**about, tried=tried, stages=[asdict(stage)])

    def _drop_stage_not_begun(self) -> None:
        """Drop a stage that an earlier call planned but had no time for, so that it is planned for this call's time."""
        stages, rows = self.plan["stages"], self.results.rows
        if 1 < len(self.contests) == len(stages) and not any(run.id in rows for run in self.contests[-1].decided(rows)):
            self.contests.pop()
            self._write_plan(stages=stages[:-1])

    def _begin_stage(self) -> bool:
        """Begin the next stage, planned from the pace of the runs so far; return False if there is no time for one."""
        known, stages, last = self.results.known, self.plan["stages"], self.contests[-1]
        if len(self.contests) == len(stages):
            costs = measured_costs(last, winners(last, known), known)
            if costs is None or self._seconds_left <= 0:
                return False
            left = self._seconds_left * (1 - _RESERVE)
            limits = (self.config.processes, self.pilot.batch, self._most_samples)
            following = plan_next(Stage(**stages[-1]), costs, left, *limits)
            if following is None:
                return False
            stages = [*stages, asdict(following)]
        self._write_plan(stages=stages)
        return True

    def stop(self, name: str, so_far: dict[str, Any]) -> dict[str, Any] | None:
        """Return the row of a run that should stop here, because another setting is clearly ahead at equal samples."""
        self._under_way[name] = so_far
        if so_far["samples"] < _EARLIEST * so_far["epochs"] * so_far["epoch_samples"]:
            return None
        at, scores = str(so_far["samples"]), unpack(so_far["points"][str(so_far["samples"])])
        equal = ("data", "family", "seed", "epochs", "epoch_samples")
        for other in [*self.results.rows.values(), *self._under_way.values()]:
            if at not in other["points"] or any(other[key] != so_far[key] for key in equal):
                continue
            ahead = unpack(other["points"][at]) - scores
            half = half_width(ahead, self._val_groups)
            if half is not None and float(ahead.mean()) > _CLEARLY * half:
                return {**so_far, "stopped": so_far["samples"], "val": {"mean": so_far["val"]["mean"] - 1}}
        return None

    def _work(self) -> bool:
        """Execute the remaining runs of the stage; return False if the time is over before they are finished."""
        contest, rows = self.contests[-1], self.results.rows
        samples = self.plan["stages"][len(self.contests) - 1]["samples"]
        runs = sum(len(tried) + len(contest.seeds) - 1 for tried in contest.families.values())
        done = sum(run.id in rows for run in contest.decided(rows)) * samples - self.workers.samples
        with command_line.progress_bar(
            total=runs * samples, initial=done + self.workers.samples, unit="sample", unit_scale=True, smoothing=0.05
        ) as bar:

            def goes_on() -> bool:
                bar.update(done + self.workers.samples - bar.n)
                return self._seconds_left > 0

            def ended(name: str, row: dict[str, Any] | None, failure: str) -> None:
                self.results.keep(name, row, failure)
                bar.set_postfix_str(f"{len(rows)} runs finished", refresh=False)
                if row is None:
                    tqdm.write(for_people(failure_words(failure.strip().splitlines()[-1])))

            def tasks() -> dict[str, Any]:
                return {run.id: partial(self.pilot.run, run) for run in contest.pending(self.results.known)}

            return self.workers.work_off(tasks, ended, goes_on)

    def write_report(self, notes: list[str]) -> bool:
        """Write the report of the finished runs, and print where it is; return whether it recommends a loss."""
        if not self.plan:
            print("no run is finished yet, so there is no report")
            return False
        found = report.make_report(
            contests=self.contests,
            results=self.results.known,
            judged=self.plan["judged"],
            about=report.About(
                data=without_secrets(self.config.shards),
                model=self.pilot.config.model.name,
                batch=self.pilot.batch,
                num_samples=self.pilot.data.num_samples,
                notes=tuple(notes),
                processes=self.config.processes,
                minutes=self.config.minutes,
                most_epochs=self._most_samples / self.pilot.data.num_samples,
            ),
            captions=self.pilot.data.test.captions(),
            command_line=self.command_line,
        )
        for name, text in (
            ("report.json", json_lines.dumps(asdict(found), indent=2) + "\n"),
            ("report.md", report.markdown(found)),
            ("report.html", report.page(found)),
        ):
            (self.config.folder / name).write_text(text, encoding="utf-8")
        print(found.text_of_judgement)
        print(found.sentence)
        print(f"report: {self.config.folder / 'report.html'}, report.md, report.json")
        return found.recommended is not None

    def command_line(self, row: Mapping[str, Any]) -> str:
        """Return the training command line of a run."""
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for flag in ("--lr", "--epochs", "--warmup"):  # set below
            ours.add_argument(flag)
        _, kept = ours.parse_known_args(list(self.config.training))
        words = ["openclip-ext", "train", "--train-data", self.config.shards]
        words += ["--val-data", self.config.val] if self.config.val else []
        words += [*kept, "--loss", row["family"]]
        for name, value in row["setting"]["options"].items():
            words += option_as_words(OPTIONS[name], value)
        epochs, samples = row["epochs"], row["epoch_samples"]
        warmup = warmup_steps(self.pilot.config.schedule.warmup, epochs * (samples // self.pilot.batch))
        words += ["--lr", f"{row['lr']:g}", "--warmup", str(warmup), "--epochs", str(epochs)]
        return shlex.join(without_secrets([*words, "--train-num-samples", str(samples)]))


def read_plan(config: CompareConfig, training: TrainingConfig) -> dict[str, Any]:
    """Return the plan in the output folder; it is empty if there is none."""
    path = config.folder / "plan.json"
    if not path.exists():
        return {}
    try:
        plan = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to plan anew") from error
    if plan.get("flags") != digest_of_flags(config, training):
        raise ValueError(_OTHER.format(config.output, "flags or versions"))
    return plan


def winners(contest: Contest, results: Results) -> dict[str, list[Run]]:
    """Return the runs that a finished stage passes on: the best settings of the baseline and of the best losses."""
    best = {
        loss: statistics.fmean(score(results[run.id]) for run in contest.best(loss, results) if run.id in results)
        for loss in contest.families
    }
    first, *others = best
    going_on = [first, *sorted(others, key=lambda loss: -best[loss])[:CONTENDERS]]
    ranked = {loss: contest.ranked(loss, results)[:FINALISTS] for loss in going_on}
    return {
        loss: [run for run in runs if run is runs[0] or score(results[run.id]) >= 0] for loss, runs in ranked.items()
    }


def measured_costs(contest: Contest, losses: Iterable[str], results: Results) -> Costs | None:
    """Return the costs of some losses' finished runs in a stage; None if one of the losses has no finished run."""
    rows = [results[run.id] for run in contest.decided(results) if results.get(run.id, {}).get("curve")]
    of_loss = {loss: [row for row in rows if row["family"] == loss] for loss in losses}
    if not all(of_loss.values()):
        return None
    samples = {loss: sum(row["curve"][-1][0] for row in of) for loss, of in of_loss.items()}
    per_sample = {loss: sum(row["seconds"] for row in of) / samples[loss] for loss, of in of_loss.items()}
    return Costs(per_sample, statistics.fmean(row["all_seconds"] - row["seconds"] for row in rows))


def digest_of_flags(config: CompareConfig, training: TrainingConfig) -> str:
    """Return a digest of everything that decides the runs, except the data and each run's own loss and options."""
    names = ("model", "loading", "optimizer", "schedule", "step", "length")
    parts = [asdict(getattr(training, name)) for name in names]
    return config_digest([parts, config.anchors, config.population, versions()])
