"""A comparison of one output folder: plan, search, final runs, report."""

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.compare import design as designs
from openclip_ext.diagnostics.compare import page, report, space
from openclip_ext.diagnostics.compare import pilot as pilots
from openclip_ext.diagnostics.compare.config import CompareConfig
from openclip_ext.diagnostics.compare.design import Costs, Design, Run, Schedule
from openclip_ext.diagnostics.compare.pilot import Pilot
from openclip_ext.diagnostics.compare.prepare import digest
from openclip_ext.diagnostics.compare.samples import Cache
from openclip_ext.diagnostics.compare.workers import Deadline, ResultsFile, Workers
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.training.config import TrainingConfig

# Of --minutes: kept for runs that are slower than their pace was, used to measure the pace, and the most for one loss.
_RESERVE, _PACE_SHARE, _PACE_SECONDS = 0.1, 0.05, 6.0
_REPORT_SECONDS = 2.0
# What the final command line says itself.
_REPLACED_FLAGS = ("--lr", "--epochs", "--warmup")


class Comparison:
    """The comparison of one output folder.

    Args:
        config: what was asked.
        pilot: what all runs share.
        notes: what to know about the data.
        results: finished runs, of this comparison and of others.
        deadline: when to stop.

    Raises:
        ValueError: the folder holds a comparison with other data.
    """

    def __init__(
        self, config: CompareConfig, pilot: Pilot, notes: Sequence[str], results: ResultsFile, deadline: Deadline
    ) -> None:
        self.config, self.pilot, self.notes, self.results, self.deadline = config, pilot, notes, results, deadline
        self.flags = _digest_of_flags(config, pilot.config, pilot.loss_options)
        self.context = digest([self.flags, pilot.data.digest])
        self.candidates = {loss: space.configurations(loss, pilot.loss_options) for loss in config.losses}
        self.workers = Workers(config.processes, __name__)
        self.failed: dict[str, dict[str, Any]] = {}
        self.plan = _read_plan(config.output)
        if self.plan is not None and self.plan["context"] != self.context:
            raise ValueError(_OTHER.format(config.output, "data"))

    def run(self) -> bool:
        """Work until all is finished, the time is over or a signal comes; returns whether one came."""
        try:
            if self.plan is None:
                self._make_plan()
            assert self.plan is not None
            if not self._work_on(lambda: self.schedule.search(self._known())):
                return False
            if not self.plan["finals_planned"]:
                self._plan_finals()
            more = True
            while more:
                more = self._work_on(lambda: self.schedule.finals(self._known())) and self._add_seed()
        except KeyboardInterrupt:
            return True
        finally:
            self.workers.stop()
        return False

    def write_report(self) -> None:
        """Write the report of what is finished, and say where it is."""
        if self.plan is None:
            print("nothing is finished yet: there is no report")
            return
        about = report.About(
            data=self.config.shards,
            model=self.pilot.config.model.name,
            batch=self.pilot.batch,
            num_samples=self.pilot.data.num_samples,
            notes=tuple(self.notes),
            cpu=not torch.cuda.is_available(),
            processes=self.config.processes,
            minutes=self.plan.get("minutes", self.config.minutes),
            most_epochs=self._most_samples / self.pilot.data.num_samples,
            groups=_caption_groups(self.pilot.data.verdict),
        )
        found = report.make_report(about, self.schedule, self._known(), self.plan, self.command_line)
        (self.config.output / "report.json").write_text(report.to_json(found), encoding="utf-8")
        (self.config.output / "report.md").write_text(report.markdown(found), encoding="utf-8")
        (self.config.output / "report.html").write_text(page.render(found), encoding="utf-8")
        print(found.text_of_judgement)
        print(found.sentence)
        print(f"report: {self.config.output / 'report.html'}, report.md, report.json")

    @property
    def _most_samples(self) -> int:
        """That ``--epochs`` allow: whole batches of each epoch."""
        return self.pilot.config.length.epochs * (self.pilot.data.num_samples // self.pilot.batch * self.pilot.batch)

    @property
    def schedule(self) -> Schedule:
        assert self.plan is not None
        design = Design.of_json(self.plan["design"])
        return Schedule(design, self.candidates, self.context, self.pilot.config.optimizer.lr)

    def _finished(self) -> dict[str, dict[str, Any]]:
        """This comparison's finished runs: without a plan.json the folder may hold runs of another."""
        return {name: line for name, line in self.results.lines.items() if line.get("context") == self.context}

    def _known(self) -> dict[str, dict[str, Any]]:
        return {**self._finished(), **self.failed}

    # --- planning ---------------------------------------------------------------------------------------------------

    def _write_plan(self, **content: Any) -> None:
        self.plan = {**(self.plan or {}), **content}
        path = _plan_path(self.config.output)
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(json.dumps(self.plan, indent=2) + "\n")
        partial_path.rename(path)

    def _make_plan(self) -> None:
        """Measure how wrong a batch is and how fast the runs are, and plan what fits."""
        batch, losses = self.pilot.batch, self.config.losses
        repeats = math.ceil(len(losses) / self.config.processes) * self.config.processes
        turns = [losses[number % len(losses)] for number in range(repeats)]
        seconds = min(_PACE_SECONDS, 60 * self.config.minutes * _PACE_SHARE * self.config.processes / len(turns))
        long = 10_000 * batch
        runs = [Run("", self.candidates[loss][0], self.pilot.config.optimizer.lr, 0, long, False) for loss in turns]
        judge: Any = partial(pilots.judge_batch, self.pilot)
        paced = [partial(pilots.measure_pace, self.pilot, run, seconds) for run in runs]
        judged, *paces = self.workers.run([judge, *paced])
        costs = _costs(losses, paces, judged["seconds"])
        most = self._most_samples
        tried = space.most_configurations(losses, self.pilot.loss_options)
        left = self.deadline.left * (1 - _RESERVE) - _REPORT_SECONDS
        design = designs.plan(losses, costs, left, self.config.processes, batch, most, tried)
        self._write_plan(
            flags=self.flags,
            context=self.context,
            minutes=self.config.minutes,
            design=asdict(design),
            costs=asdict(costs),
            judged=judged,
            finals_planned=False,
        )

    def _plan_finals(self) -> None:
        """Make the final runs as long as the rest of the time allows, if the search has shown the pace."""
        assert self.plan is not None
        if not self.schedule.design.rungs:
            self._write_plan(finals_planned=True)
            return
        costs = Costs(**self.plan["costs"])
        search = [line for line in self._finished().values() if not line["final"]]
        paces = dict(costs.per_sample)
        for loss in self.config.losses:
            own = [line for line in search if line["configuration"]["loss"] == loss]
            if own:
                paces[loss] = sum(line["seconds"] for line in own) / sum(line["samples"] for line in own)
        per_run = statistics.fmean(line["all_seconds"] - line["seconds"] for line in search)
        costs = replace(costs, per_sample=paces, per_run=per_run)
        design = designs.plan_finals(
            self.schedule.design,
            costs,
            self.deadline.left * (1 - _RESERVE / 2) - _REPORT_SECONDS,
            self.config.processes,
            self.pilot.batch,
            self._most_samples,
        )
        self._write_plan(design=asdict(design), finals_planned=True)

    def _add_seed(self) -> bool:
        """Plan another seed, if the time that is left allows it."""
        seconds: dict[str, list[float]] = {loss: [] for loss in self.config.losses}
        for line in self._finished().values():
            if line["final"] and line["configuration"]["loss"] in seconds:
                seconds[line["configuration"]["loss"]].append(line["all_seconds"])
        if not all(seconds.values()):
            return False
        left = self.deadline.left * (1 - _RESERVE) - _REPORT_SECONDS
        means = {loss: statistics.fmean(values) for loss, values in seconds.items()}
        design = designs.add_seed(self.schedule.design, means, left, self.config.processes)
        if design is None:
            return False
        self._write_plan(design=asdict(design))
        return True

    # --- running ----------------------------------------------------------------------------------------------------

    def _work_on(self, all_runs: Callable[[], list[Run]]) -> bool:
        """Run what is left of these; False if the time is over before that."""
        before = sum(line["samples"] for line in self._finished().values()) - self.workers.samples
        total, done = self.schedule.design.samples(), before + self.workers.samples
        with command_line.progress_bar(
            total=total, initial=done, unit="sample", unit_scale=True, smoothing=0.05
        ) as bar:
            while self.deadline.left > _REPORT_SECONDS:
                known = self._known()
                busy = self.workers.under_way
                for run in all_runs():
                    if run.id not in known and run.id not in busy and self.workers.has_room:
                        self.workers.start(run.id, partial(pilots.run_pilot, self.pilot, run))
                        busy = self.workers.under_way
                if not busy:
                    return True
                for name, result, failure in self.workers.finished():
                    if result is not None:
                        self.results.add(result)
                    else:
                        self.failed[name] = {"id": name, "choice": -1.0, "samples": 0, "failed": failure}
                        tqdm.write(f"a run failed: {failure.strip().splitlines()[-1]}")
                bar.set_postfix_str(f"{len(self._finished())} runs finished", refresh=False)
                bar.update(before + self.workers.samples - bar.n)
        return False

    def command_line(self, line: Mapping[str, Any]) -> str:
        """The training command line of a run."""
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for flag in _REPLACED_FLAGS:
            ours.add_argument(flag)
        _, kept = ours.parse_known_args(list(self.config.training))
        words = ["openclip-ext", "train", "--train-data", self.config.shards]
        words += ["--val-data", self.config.val] if self.config.val else []
        words += [*kept, "--loss", line["configuration"]["loss"]]
        for name, value in line["options"].items():
            option = OPTIONS[name]
            if option.type is bool:
                words.append(option.flag if value else option.flag.replace("--", "--no-", 1))
            elif not option.openclip_flag:
                words += [option.flag, "none" if value is None else f"{value}"]
        length = line["length"]
        warmup = pilots.warmup_steps(self.pilot.config.schedule.warmup, line["steps"])
        words += ["--lr", f"{line['lr']:g}", "--warmup", str(warmup), "--epochs", str(length["epochs"])]
        return shlex.join([*words, "--train-num-samples", str(length["epoch_samples"])])


# --- what the folder belongs to --------------------------------------------------------------------------------------

_OTHER = "the folder {} holds a comparison with other {}: give another --output, or remove the folder"


def refuse_other_flags(config: CompareConfig, training: TrainingConfig, loss_options: Mapping[str, Any]) -> None:
    """Raise ValueError if the output folder holds a comparison with other flags; nothing is read or written for that."""
    plan = _read_plan(config.output)
    if plan is not None and plan.get("flags") != _digest_of_flags(config, training, loss_options):
        raise ValueError(_OTHER.format(config.output, "flags or versions"))


def _plan_path(output: Path) -> Path:
    return output / "plan.json"


def _read_plan(output: Path) -> dict[str, Any] | None:
    path = _plan_path(output)
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to plan anew") from error


def _digest_of_flags(config: CompareConfig, training: TrainingConfig, loss_options: Mapping[str, Any]) -> str:
    """Of all that decides the runs but the data."""
    shared: list[Any] = [
        training.model,
        training.loading,
        training.optimizer,
        training.schedule,
        training.step,
        training.length,
    ]
    about = [[asdict(part) for part in shared], dict(loss_options), config.losses]
    return digest([*about, config.anchors, config.population, pilots.versions()])


def _costs(losses: tuple[str, ...], paces: list[dict[str, Any]], judging: float) -> Costs:
    per_sample = {
        loss: statistics.fmean(pace["per_sample"] for pace in paces if pace["loss"] == loss) for loss in losses
    }
    per_run = statistics.fmean(pace["building"] + pace["scoring"] for pace in paces)
    scoring = statistics.fmean(pace["scoring"] for pace in paces)
    # The runs of the first seed, about half of all, have their normalizers measured.
    return Costs(per_sample, per_run, pilots.CURVE_POINTS * scoring + judging / 2)


def _caption_groups(cache: Cache) -> list[int]:
    captions = cache.captions()
    number = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
    return [number[caption] for caption in captions]
