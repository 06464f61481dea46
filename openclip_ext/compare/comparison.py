"""Run ``openclip-ext compare``: read the data, plan and execute the runs, and write the report."""

import argparse
import json
import math
import os
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openclip_ext.checkpoint.format import checksum
from openclip_ext.cli import command_line
from openclip_ext.cli.messages import for_people, without_secrets
from openclip_ext.cli.options import option_as_words
from openclip_ext.compare import plan as planner
from openclip_ext.compare import report, space
from openclip_ext.compare.config import CompareConfig, parse
from openclip_ext.compare.data import prepare
from openclip_ext.compare.decoded_data import PilotData
from openclip_ext.compare.pilot import ComparePilot
from openclip_ext.compare.runs import Contest, Results, ResultsFile, Run, score
from openclip_ext.compare.short_run import seconds_a_sample, warmup_steps
from openclip_ext.compare.slurm_pool import make_pool
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.evaluation.results import config_digest
from openclip_ext.files import json_lines
from openclip_ext.files.writing import held, write_text
from openclip_ext.losses.options import OPTIONS
from openclip_ext.training.config import RunPlan
from openclip_ext.training.runtime.run_folder import versions

# Time to measure the throughput: as a fraction of --minutes, and its maximum in seconds.
_PROBE_SHARE, _PROBE_SECONDS = 0.02, 10.0
_REPORT_SECONDS = 2.0
_OTHER = "the folder {} holds a comparison with different {}: choose another --output, or remove the folder"


def main(argv: list[str]) -> None:
    """Compare losses and write the report. The exit status is 130 after a signal, and 1 if there is no result."""
    started = time.monotonic() - time.process_time()  # the start of the process, because --minutes includes the imports
    config, training = parse(argv)
    deadline = started + 60 * config.minutes
    try:
        with held(config.folder):  # locks the folder, including the cache in it
            plan = read_plan(config, training)  # rejects a folder with other flags before the data are decoded
            if plan is None and config.executor == "local":  # a login node may be slower than the jobs
                _refuse_short_time(config, training, deadline - time.monotonic() - _REPORT_SECONDS)
            data, notes = prepare(config, training)
            comparison = Comparison(config, training, data, plan, deadline)
            stopped = comparison.run()
            has_result = comparison.write_report(notes)
    except BadDataError as error:
        raise ValueError(str(error)) from error
    if stopped:
        print("stopped; the same command continues from here")
        raise SystemExit(130)
    if not has_result:
        raise SystemExit(1)


def _refuse_short_time(config: CompareConfig, training: RunPlan, seconds: float) -> None:
    """Raise ValueError if ``seconds`` is too short for runs with the minimum number of steps."""
    costs = planner.Costs(dict.fromkeys(config.losses, seconds_a_sample(training, config.processes)), 0.0)
    needed = planner.least_seconds(costs, config.processes, training.loading.batch_size * training.loading.accum_freq)
    if seconds * (1 - planner.RESERVE) < needed:
        raise planner.too_short(costs, needed, seconds * (1 - planner.RESERVE), config.minutes)


@dataclass(frozen=True)
class Plan:
    """The content of ``plan.json``."""

    flags: str  # result of digest_of_flags
    context: str  # digest of `flags` and the data
    before: float  # R@1 before training, averaged over both directions
    tried: int  # number of settings of each loss in the first stage
    stages: tuple[planner.Stage, ...]


class Comparison:
    """A comparison, stored in one output folder. It stops at ``deadline``, a value of ``time.monotonic()``.

    ``plan`` is None before the first stage is planned.
    """

    def __init__(
        self, config: CompareConfig, training: RunPlan, data: PilotData, plan: Plan | None, deadline: float
    ) -> None:
        self.config, self.plan, self.deadline = config, plan, deadline
        self.results = ResultsFile(config.folder / "runs.jsonl")
        self.flags = digest_of_flags(config, training) if plan is None else plan.flags
        self.context = config_digest([self.flags, data.digest])
        self.pilot = ComparePilot(training, data)
        self.candidates = {loss: space.candidates(loss, config.loss_options) for loss in config.losses}
        jobs = config.folder / "jobs"
        # By default, the time limit of SLURM jobs is --minutes.
        parameters = f"time={math.ceil(config.minutes)},{config.slurm}"
        self.workers = make_pool(config.executor, config.processes, jobs, parameters)
        # Maximum number of training samples of a run: the full batches of ``--epochs`` epochs.
        self._most_samples = training.length.epochs * (data.num_samples // self.pilot.batch * self.pilot.batch)
        if plan is not None and plan.context != self.context:
            raise ValueError(_OTHER.format(config.output, "data"))

    def run(self) -> bool:
        """Execute all stages until the deadline or a signal; return whether a signal arrived."""
        try:
            if self.plan is None:
                self._plan_tuning()
            else:
                self._drop_unstarted_stage()
            while self._work() and self._plan_next_stage():
                pass
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _plan(self) -> Plan:
        assert self.plan is not None, "run plans the first stage before all others"
        return self.plan

    @property
    def _seconds_left(self) -> float:
        return self.deadline - time.monotonic() - _REPORT_SECONDS

    def contests(self) -> list[Contest]:
        """Return the runs of each planned stage, up to the first unfinished stage, whose results select the next runs."""
        known = self.results.known
        found: list[Contest] = []
        for stage in self._plan.stages:
            length = self._length(stage.samples)
            if not found:
                tried = {loss: own[: self._plan.tried] for loss, own in self.candidates.items()}
                families = {loss: [self._make_run(loss, *one, length) for one in own] for loss, own in tried.items()}
            elif found[-1].pending(known):
                break
            else:
                best = winners(found[-1], known)
                families = {loss: [replace(run, **length) for run in runs] for loss, runs in best.items()}
            found.append(Contest(families, stage.seeds))
        return found

    def _length(self, samples: int) -> dict[str, Any]:
        epochs, epoch_samples = planner.equal_epochs(samples, self.pilot.batch, self.pilot.data.num_samples)
        return {"epochs": epochs, "epoch_samples": epoch_samples}

    def _make_run(self, loss: str, options: space.Options, factor: float, length: Mapping[str, Any]) -> Run:
        training = self.pilot.config
        return Run(
            data=self.context,
            model=training.model.name,
            schedule="compare",
            batch_size=self.pilot.batch,
            **length,
            lr=training.optimizer.lr * factor,
            seed=planner.SEEDS[0],
            family=loss,
            setting={"loss": loss, "options": options, **space.source(loss)},
        )

    def _write_plan(self, plan: Plan) -> None:
        self.plan = plan
        text = json_lines.dumps(asdict(plan), indent=2) + "\n"
        write_text(self.config.folder / "plan.json", text)

    def _plan_tuning(self) -> None:
        """Plan the first stage, assuming that all losses cost as much as the baseline.

        The baseline's throughput is measured first.
        """
        seconds = min(_PROBE_SECONDS, 60 * self.config.minutes * _PROBE_SHARE)
        run = self._make_run(
            space.BASELINE, *self.candidates[space.BASELINE][0], self._length(10_000 * self.pilot.batch)
        )
        probes = self.workers.run([partial(self.pilot.probe, run, seconds)] * self.config.processes)
        per_sample, per_run = (statistics.fmean(probe[key] for probe in probes) for key in ("per_sample", "per_run"))
        tried, stage = planner.plan_tuning(
            planner.Costs(dict.fromkeys(self.config.losses, per_sample), per_run),
            self._seconds_left * (1 - planner.RESERVE),
            self.config.processes,
            self.pilot.batch,
            self._most_samples,
            most_tried=min(map(len, self.candidates.values())),
            minutes=self.config.minutes,
        )
        self._write_plan(Plan(self.flags, self.context, probes[0]["before"], tried, (stage,)))

    def _drop_unstarted_stage(self) -> None:
        """Remove a stage that an earlier call planned but did not start. This call plans it again for the remaining time."""
        stages, rows, contests = self._plan.stages, self.results.rows, self.contests()
        if 1 < len(contests) == len(stages) and not any(run.id in rows for run in contests[-1].decided(rows)):
            self._write_plan(replace(self._plan, stages=stages[:-1]))

    def _plan_next_stage(self) -> bool:
        """Plan the next stage from the measured costs, if it has no plan yet; return False if there is no time for it."""
        known, stages, last = self.results.known, self._plan.stages, self.contests()[-1]
        if last.pending(known):
            return True
        costs = measured_costs(last, winners(last, known), known)
        if costs is None or self._seconds_left <= 0:
            return False
        left = self._seconds_left * (1 - planner.RESERVE)
        limits = (self.config.processes, self.pilot.batch, self._most_samples)
        stage = planner.plan_next(stages[-1], costs, left, *limits)
        if stage is not None:
            self._write_plan(replace(self._plan, stages=(*stages, stage)))
        return stage is not None

    def _work(self) -> bool:
        """Execute the remaining runs of the stage; return False if the deadline comes first."""
        contests, rows = self.contests(), self.results.rows
        contest, samples = contests[-1], self._plan.stages[len(contests) - 1].samples
        runs = sum(len(tried) + len(contest.seeds) - 1 for tried in contest.families.values())
        done = sum(run.id in rows for run in contest.decided(rows)) * samples - self.workers.samples
        with command_line.progress_bar(
            total=runs * samples, initial=done + self.workers.samples, unit="sample", unit_scale=True, smoothing=0.05
        ) as bar:

            def has_time() -> bool:
                bar.update(done + self.workers.samples - bar.n)
                return self._seconds_left > 0

            def on_end(name: str, row: dict[str, Any] | None, failure: str) -> None:
                self.results.keep(name, row, failure)
                bar.set_postfix_str(f"{len(rows)} runs finished", refresh=False)
                if row is None:
                    tqdm.write(for_people(f"a run failed: {failure.strip().splitlines()[-1]}"))

            def tasks() -> dict[str, Any]:
                return {run.id: partial(self.pilot.run, run) for run in contest.pending(self.results.known)}

            return self.workers.work_off(tasks, on_end, has_time)

    def write_report(self, notes: list[str]) -> bool:
        """Write the report of the finished runs; return whether the report recommends a loss."""
        if self.plan is None:
            print("there is no report, because no run is finished yet")
            return False
        found = report.make_report(
            contests=self.contests(),
            results=self.results.known,
            about=report.About(
                data=without_secrets(self.config.shards),
                model=self.pilot.config.model.name,
                batch=self.pilot.batch,
                num_samples=self.pilot.data.num_samples,
                before=self.plan.before,
                notes=tuple(notes),
                processes=self.config.processes,
            ),
            images=self.pilot.data.test.image_hashes(),
            captions=self.pilot.data.test.captions(),
            command_line=self.command_line,
        )
        content = json_lines.dumps(asdict(found), indent=2) + "\n"
        texts = {"report.json": content, "report.md": report.markdown(found), "report.html": report.page(found)}
        for name, text in texts.items():
            write_text(self.config.folder / name, text)
        print(found.sentence)
        print(f"report: {self.config.folder / 'report.html'}, report.md, report.json")
        return found.recommended is not None

    def command_line(self, row: Mapping[str, Any]) -> str:
        """Return the ``openclip-ext train`` command of a run."""
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for flag in ("--lr", "--epochs", "--warmup", "--reference"):  # removed here, because they are set below
            ours.add_argument(flag)
        own, kept = ours.parse_known_args(list(self.config.training))
        words = ["openclip-ext", "train", "--train-data", self.config.shards]
        words += ["--val-data", self.config.val] if self.config.val else []
        words += [*kept, "--loss", row["family"]]
        if "steer" in row["setting"]["options"]:  # without this check, --reference would also steer the baseline
            words += ["--reference", own.reference]
        for name, value in row["setting"]["options"].items():
            words += option_as_words(OPTIONS[name], value)
        epochs, samples = row["epochs"], row["epoch_samples"]
        warmup = warmup_steps(self.pilot.config.schedule, epochs * (samples // self.pilot.batch))
        words += ["--lr", str(row["lr"]), "--warmup", str(warmup), "--epochs", str(epochs)]
        return shlex.join(without_secrets([*words, "--train-num-samples", str(samples)]))


def read_plan(config: CompareConfig, training: RunPlan) -> Plan | None:
    """Return the plan in the output folder, if any. Raise ValueError if it has other flags."""
    path = config.folder / "plan.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    plan = Plan(**content | {"stages": tuple(planner.Stage(**stage) for stage in content["stages"])})
    if plan.flags != digest_of_flags(config, training):
        raise ValueError(_OTHER.format(config.output, "flags, versions or pretrained weights"))
    return plan


def winners(contest: Contest, results: Results) -> dict[str, list[Run]]:
    """Return the runs whose settings enter the next stage: the best runs of the baseline and of the best other losses."""

    def mean_score(loss: str) -> float:
        return statistics.fmean(score(results[run.id]) for run in contest.best(loss, results))

    baseline, *others = contest.families
    found = {}
    for loss in [baseline, *sorted(others, key=lambda loss: -mean_score(loss))[: planner.CONTENDERS]]:
        first, *rest = contest.ranked(loss, results)[: planner.FINALISTS]
        found[loss] = [first, *(run for run in rest if score(results[run.id]) >= 0)]
    return found


def measured_costs(contest: Contest, losses: Iterable[str], results: Results) -> planner.Costs | None:
    """Measure the costs of losses in their finished runs; return None if a loss has no finished run."""
    rows = [results[run.id] for run in contest.decided(results) if results.get(run.id, {}).get("curve")]
    per_sample = {}
    for loss in losses:
        own = [row for row in rows if row["family"] == loss]
        if not own:
            return None
        per_sample[loss] = sum(row["seconds"] for row in own) / sum(row["curve"][-1][0] for row in own)
    return planner.Costs(per_sample, statistics.fmean(row["all_seconds"] - row["seconds"] for row in rows))


def digest_of_flags(config: CompareConfig, training: RunPlan) -> str:
    """Return a digest of the flags, the pretrained file and the versions that apply to all runs, without the data."""
    names = ("model", "loading", "optimizer", "schedule", "step", "length")
    parts: list[Any] = [asdict(getattr(training, name)) for name in names]
    if (weights := training.model.pretrained) is not None and os.path.isfile(weights):
        parts.append(checksum(Path(weights)))
    return config_digest([parts, versions()])
