"""The command line, and what it does in order: data, pace, plan, search, final runs, report."""

import argparse
import hashlib
import itertools
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from openclip_ext.data.build import build_train_loader
from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.source import BadDataError
from openclip_ext.data.spec import DataSpec
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.compare import design as designs
from openclip_ext.diagnostics.compare import page, report, space
from openclip_ext.diagnostics.compare import pilot as pilots
from openclip_ext.diagnostics.compare.design import Costs, Design, Run, Schedule
from openclip_ext.diagnostics.compare.pilot import Pilot
from openclip_ext.diagnostics.compare.samples import (
    Cache,
    DoesNotFit,
    PilotData,
    Tokens,
    divide,
    remove_others,
    write_cache,
)
from openclip_ext.diagnostics.compare.space import BASELINE
from openclip_ext.diagnostics.compare.workers import Deadline, ResultsFile, Workers, default_processes
from openclip_ext.losses import registry, table
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import flags
from openclip_ext.training.checks import check
from openclip_ext.training.config import TrainingConfig, training_config
from openclip_ext.training.errors import UsageError
from openclip_ext.training.parser import add_loss_flags

# Of --minutes: kept for runs that are slower than their pace was, used to measure the pace, and the most for one loss.
_RESERVE, _PACE_SHARE, _PACE_SECONDS = 0.1, 0.05, 6.0
_REPORT_SECONDS = 2.0
_HELD_OUT, _MOST_VALIDATION = 0.1, 5_000
# Training flags, by their Python names, that mean the same here; others are refused.
_USED_FLAGS = """
    train_data model pretrained pretrained_image precision force_quick_gelu force_custom_text force_patch_dropout
    force_image_size force_context_length image_mean image_std image_interpolation image_resize_mode aug_cfg cache_dir
    lock_image lock_image_unlocked_groups lock_image_freeze_bn_stats lock_text lock_text_unlocked_layers
    lock_text_freeze_layer_norm grad_checkpointing use_bnb_linear dataset_type csv_separator csv_img_key csv_caption_key
    image_key caption_key manifest max_bad_fraction caption_aware_flip batch_size accum_freq workers epochs opt lr wd beta1
    beta2 eps momentum lookahead_steps lr_scheduler warmup epochs_cooldown lr_cooldown_power lr_cooldown_end grad_clip_norm
    max_skipped_steps
"""
# What the final command line says itself.
_REPLACED_FLAGS = ("--lr", "--epochs", "--warmup")


@dataclass(frozen=True)
class CompareConfig:
    """What ``openclip-ext compare`` was asked.

    Attributes:
        shards: training data.
        val: validation data, or None to hold out a part of the training data.
        classes: file with the names of the classes, one a line, or None.
        losses: candidates.
        minutes: wall-clock time for this call.
        output: folder of the results.
        processes: runs at a time.
        cache: GiB that decoded images may take.
        anchors, population: samples whose normalizers are compared, and over which.
        training: the training flags, as given.
    """

    shards: str
    val: str | None
    classes: Path | None
    losses: tuple[str, ...]
    minutes: float
    output: Path
    processes: int
    cache: float
    anchors: int
    population: int
    training: tuple[str, ...]


def main(argv: list[str]) -> None:
    """Compare losses and write the report.

    Raises:
        ValueError: a wrong command line, or data that do not fit it.
        SystemExit: with 130 after a signal and a report of what is finished.
    """
    started = time.monotonic()
    config, training, loss_options = parse(argv)
    deadline = Deadline(config.minutes, started)
    results = ResultsFile(config.output / "runs.jsonl")  # first: nobody else may write to the cache, either
    try:
        pilot, notes = _prepare(config, training, loss_options)
        comparison = _Comparison(config, pilot, notes, results, deadline)
        stopped = comparison.run()
        comparison.write_report()
    except (BadDataError, DoesNotFit) as error:
        raise ValueError(str(error)) from error
    finally:
        results.close()
    if stopped:
        print("stopped; the same command goes on from here")
        raise SystemExit(130)


def parse(argv: list[str]) -> tuple[CompareConfig, TrainingConfig, dict[str, Any]]:
    """The comparison, the training's configuration, and the options given for all losses.

    Raises:
        UsageError: flags that mean nothing here.
    """
    add_model_configs()
    args, rest = _parser().parse_known_args(argv)
    options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    losses = tuple(dict.fromkeys(loss.strip() for loss in args.losses.split(",")))
    _check(args, losses, options)
    namespace, choice = flags.parse(["--train-data", args.shards, *rest])
    defaults, _ = flags.parse(["--train-data", args.shards])
    for name, value in vars(namespace).items():
        if name not in _USED_FLAGS.split() and value != getattr(defaults, name, None):
            raise UsageError(f"--{name.replace('_', '-')} has no effect on compare; leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if namespace.batch_size < 2:
        raise UsageError(f"--batch-size is {namespace.batch_size}, must be at least 2")
    if not 0 < namespace.lr < math.inf:
        raise UsageError(f"--lr is {namespace.lr:g}, must be positive")
    training = training_config(namespace, choice, device)
    check(training)
    if device.type == "cpu":
        training = replace(training, loading=replace(training.loading, workers=0))
    config = CompareConfig(
        args.shards,
        args.val,
        args.classes,
        losses,
        args.minutes,
        args.output,
        args.processes or default_processes(),
        args.cache,
        args.anchors,
        args.population,
        tuple(rest),
    )
    return config, training, options


def _check(args: argparse.Namespace, losses: tuple[str, ...], options: Mapping[str, Any]) -> None:
    if args.loss is not None:
        raise UsageError("--loss chooses one loss; --losses says which to compare")
    if BASELINE not in losses or len(losses) < 2:
        raise UsageError(f"--losses {args.losses}: expected {BASELINE} and at least one other, separated by commas")
    for loss in losses:
        takes_views = "views" in options and "views" in registry.options_used_by(loss)
        views = {"views": options["views"]} if takes_views else {}
        if registry.create_loss(loss, embed_dim=8, num_samples=8, **views).views > 1:
            raise UsageError(f"--losses: {loss} compares two views of an image, and cannot be scored by retrieval")
    for name in options:
        if name == "normalizer":
            raise UsageError("--normalizer makes one loss of those that are compared; leave it out")
        if name in space.SEARCHED_OPTIONS:
            raise UsageError(f"{OPTIONS[name].flag} has no effect on compare, which searches over it; leave it out")
        if not any(name in registry.options_used_by(loss) for loss in losses):
            raise UsageError(f"{OPTIONS[name].flag} is not used by any of --losses {args.losses}")
    for name in ("minutes", "cache", "anchors"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name} is {getattr(args, name):g}, must be positive")
    if args.population < 2 or args.processes < 0:
        raise UsageError(f"--population {args.population}, --processes {args.processes}: expected at least 2 and 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openclip-ext compare",
        allow_abbrev=False,
        description="Which loss brings the most on your data, model and batch size? Takes the flags of training, too.",
    )
    parser.add_argument("shards", metavar="SHARDS", help="training data, as --train-data takes them")
    parser.add_argument("--val", metavar="SHARDS", help="validation data (default: a tenth of SHARDS is held out)")
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="names of classes, one a line; the samples' member cls has the line's number, from 0",
    )
    parser.add_argument(
        "--losses", default=",".join(space.DEFAULT_LOSSES), help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time for this call (default: %(default)g)")
    parser.add_argument("--output", type=Path, default=Path("compare"), help="folder of the results (default: compare)")
    parser.add_argument("--processes", type=int, default=0, help="runs at a time (default: one a GPU, or one a core)")
    parser.add_argument(
        "--cache", type=float, default=8.0, metavar="GIB", help="of decoded images, on disk (default: %(default)g)"
    )
    parser.add_argument("--anchors", type=int, default=1000, help="whose normalizers are judged (default: %(default)s)")
    parser.add_argument(
        "--population", type=int, default=10_000, help="training samples that they are judged by (default: %(default)s)"
    )
    group = parser.add_argument_group("options of the losses, for all that use them")
    add_loss_flags(group, table.from_registry(), hidden={"loss", "normalizer", "views", *space.SEARCHED_OPTIONS})
    return parser


# --- data ------------------------------------------------------------------------------------------------------------


def _prepare(config: CompareConfig, training: TrainingConfig, options: dict[str, Any]) -> tuple[Pilot, list[str]]:
    """The data, decoded, and what to say about them."""
    assert training.data is not None
    names = _class_names(config.classes)
    size = _image_size(training)
    write = partial(
        write_cache,
        image_size=size,
        limit=config.cache * 2**30,
        progress=partial(command_line.progress_bar, desc="decoding", unit="sample", leave=False),
    )
    classes = len(names) or None
    train: Cache | DataSpec
    cached = [config.output / "cache" / _cache_name(training.data, size, classes if config.val is None else None)]
    try:
        train = write(training.data, cached[0], classes=classes if config.val is None else None)
    except DoesNotFit as error:
        if config.val is None:
            raise ValueError(f"{error}; give more, or validation data with --val") from None
        train = training.data
    notes = []
    if config.val is not None:
        spec = replace(training.data, source=config.val, manifest=None, num_samples=None)
        cached.append(config.output / "cache" / _cache_name(spec, size, classes))
        held_out = write(spec, cached[1], classes=classes)
        count = len(held_out.rows)
        held_out = held_out.part(divide(count, 1.0, _MOST_VALIDATION)[0])
        notes.append(f"{len(held_out.rows):,} validation samples of {config.val}")
    else:
        assert isinstance(train, Cache)
        held, rest = divide(len(train.rows), _HELD_OUT, _MOST_VALIDATION)
        held_out, train = train.part(held), train.part(rest)
        notes.append(
            f"{len(held):,} samples drawn from {config.shards} and not trained on; with near-duplicates among the training "
            "samples the scores are too high for all losses"
        )
    remove_others(config.output / "cache", cached)
    choice, verdict = divide(len(held_out.rows), 0.5, _MOST_VALIDATION)
    if len(set(held_out.part(verdict).captions())) < 2:
        raise ValueError(
            "the validation samples have one caption only, so that nothing can be retrieved: give others with --val"
        )
    if isinstance(train, Cache):
        num_samples, digest = len(train.rows), train.digest
    else:
        loader = build_train_loader(train, training.loading, preprocess=str, tokenizer=str)  # type: ignore[arg-type]
        num_samples, digest = loader.num_samples, loader.source.digest
        if loader.source.num_kept < num_samples:
            raise ValueError(
                f"the manifest leaves samples out, and the others do not fit into --cache {config.cache:g}: give more"
            )
        notes.append("the training images are larger than --cache and are decoded again for each run")
    tokens = None
    if isinstance(train, Cache):
        texts = itertools.chain(train.captions(), held_out.captions(), names)
        tokens = Tokens.of(texts, training.model.tokenizer())
    batch = training.loading.batch_size * training.loading.accum_freq
    if num_samples < 2 * batch:
        raise ValueError(f"{num_samples:,} training samples are too few for batches of {batch}: lower --batch-size")
    data = PilotData(
        train,
        num_samples,
        held_out.part(choice),
        held_out.part(verdict),
        tuple(names),
        tokens,
        _digest([digest, held_out.digest, names]),
    )
    return Pilot(training, options, data, config.population, config.anchors), notes


def _cache_name(spec: DataSpec, size: int, classes: int | None) -> str:
    """Another one for whatever makes other samples: flags, and local files by size and time of change."""
    assert spec.source is not None
    files = [
        *(expand_shards(spec.source) if spec.resolved_type == "webdataset" else [spec.source]),
        spec.manifest or "",
    ]
    stats = [Path(file).stat() if Path(file).is_file() else None for file in map(str, files)]
    return _digest([asdict(spec), files, [stat and (stat.st_size, stat.st_mtime_ns) for stat in stats], size, classes])


def _class_names(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--classes {path} cannot be read: {error}") from error
    if len(names) < 2:
        raise ValueError(f"--classes {path} has {len(names)} lines: expected the name of a class on each of at least 2")
    return names


def _image_size(training: TrainingConfig) -> int:
    with command_line.without_warnings():
        model, _, _ = replace(training.model, pretrained=None, pretrained_image=False).create(torch.device("cpu"))
    size = model.visual.image_size
    return max(size) if isinstance(size, tuple | list) else size


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- the comparison --------------------------------------------------------------------------------------------------


class _Comparison:
    """The comparison of one output folder."""

    def __init__(
        self, config: CompareConfig, pilot: Pilot, notes: list[str], results: ResultsFile, deadline: Deadline
    ) -> None:
        self.config, self.pilot, self.notes, self.results, self.deadline = config, pilot, notes, results, deadline
        self.context = _context(config, pilot)
        self.candidates = {loss: space.configurations(loss, pilot.loss_options) for loss in config.losses}
        self.workers = Workers(config.processes, __name__)
        self.failed: dict[str, dict[str, Any]] = {}
        self.plan_path = config.output / "plan.json"
        self.plan = self._read_plan()

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

    def _known(self) -> dict[str, dict[str, Any]]:
        return {**self.results.lines, **self.failed}

    # --- planning ---------------------------------------------------------------------------------------------------

    def _read_plan(self) -> dict[str, Any] | None:
        if not self.plan_path.exists():
            return None
        try:
            plan = json.loads(self.plan_path.read_text())
        except ValueError as error:
            raise ValueError(f"{self.plan_path} is damaged ({error}): remove it to plan anew") from error
        if plan["context"] != self.context:
            raise ValueError(
                f"{self.config.output} holds a comparison with other data, flags or versions: give another --output, or "
                "remove it"
            )
        return plan

    def _write_plan(self, **content: Any) -> None:
        self.plan = {**(self.plan or {}), **content}
        partial_path = self.plan_path.with_suffix(".partial")
        partial_path.write_text(json.dumps(self.plan, indent=2) + "\n")
        partial_path.rename(self.plan_path)

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
        search = [line for line in self.results.lines.values() if not line["final"]]
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
        for line in self.results.lines.values():
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
        before = sum(line["samples"] for line in self.results.lines.values()) - self.workers.samples
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
                bar.set_postfix_str(f"{len(self.results.lines)} runs finished", refresh=False)
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


def _context(config: CompareConfig, pilot: Pilot) -> str:
    training = pilot.config
    shared: list[Any] = [
        training.model,
        training.loading,
        training.optimizer,
        training.schedule,
        training.step,
        training.length,
    ]
    about = [pilot.data.digest, [asdict(part) for part in shared], dict(pilot.loss_options), config.losses]
    return _digest([*about, config.anchors, config.population, pilots.versions()])


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
