"""Derive the plan of a run from what the user asked for, once, before anything is built."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo
from openclip_ext.cli.options import OptionError, from_flags, with_flags
from openclip_ext.data.loader.build import number_of_pairs
from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS, PARTS
from openclip_ext.training.config import (
    Config,
    EvaluationConfig,
    FineTuningConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportingConfig,
    RunFolderConfig,
    RunLength,
    RunPlan,
    SavePolicy,
    ScheduleConfig,
    StepConfig,
    model_config,
    reporting_destinations,
    writes_nothing,
)
from openclip_ext.training.recipes import configurations
from openclip_ext.training.runtime.batch_report import MEASURED_STEPS

ONE_PROCESS = {"rank": 0, "local_rank": 0, "world_size": 1, "distributed": False}


def plan_run(config: Config, processes: Mapping[str, Any], date: str = "now") -> RunPlan:
    """Return the plan of a run; with ``--config``, for the number of its training pairs. Collective: all ranks call it.

    If the data cannot be read, the plan is for few pairs, and the checks of the run report the mistake.
    """
    plan = resolve(config, processes, date)
    if not config.by_pairs or plan.data is None:
        return plan
    try:
        pairs = number_of_pairs(plan.data)
    except (ValueError, OSError):
        return plan
    plan = resolve(config, processes, date, pairs)
    if distributed.is_rank0():
        of_loss = [name for name in ("equal_captions",) if name in config.loss_options]
        values = configurations.words({**plan.flags, **config.loss_options}, ["loss", *of_loss, *config.by_pairs])
        echo(f"--config {config.flags['config']} for {pairs:,} pairs: {values}", sys.stderr)
    return plan


def resolve(
    config: Config, processes: Mapping[str, Any] = ONE_PROCESS, date: str = "now", pairs: int | None = None
) -> RunPlan:
    """Return the plan of a run on one of its processes.

    Args:
        processes: The flags that OpenCLIP sets when it connects the processes. The default is a single process.
        date: Part of the run's default name.
        pairs: Number of training pairs, for ``--config``. None (default) means few pairs.

    Raises:
        UsageError: An option of the loss is wrong, or ``--global-batch`` does not fit the number of processes.
    """
    flags = {**config.flags, **processes}
    if config.by_pairs:
        values = configurations.get(flags["config"]).sized(pairs)
        flags |= {name: values[name] for name in config.by_pairs}
    if flags["json_text_key_probs"]:
        flags["draw_captions"] = True
    if flags["dry_run"]:  # it reads no checkpoint, and saves none
        flags |= {"logs": "none", "report_to": "", "resume": None, "keep_best": None}
    # The validation loss depends on the evaluation's batch size, which must not depend on the number of processes.
    evaluation_batch = flags["batch_size"]
    flags |= _shared_batch(flags)
    if flags["name"] is None:
        settings = f"lr_{flags['lr']}-b_{flags['batch_size']}-j_{flags['workers']}-p_{flags['precision']}"
        flags["name"] = f"{date}-model_{flags['model'].replace('/', '-')}-{settings}"
    folder = from_flags(
        RunFolderConfig,
        flags,
        logs=None if writes_nothing(flags["logs"]) else Path(flags["logs"]),
        name=flags["name"],
        resume_latest=flags["resume"] == "latest",
        log_local_rank=flags["local_rank"] if flags["log_local"] else None,
        rank=flags["rank"],
    )
    model, parallel = model_config(flags), from_flags(ParallelConfig, flags)
    loss = _loss(config, flags, model.is_pretrained)
    has_data = flags["train_data"] or flags["dataset_type"] == "synthetic"
    return from_flags(
        RunPlan,
        flags,
        model=model,
        data=from_flags(DataSpec, flags) if has_data else None,
        keep=from_flags(KeepConfig, flags),
        loading=_loading(flags, loss, parallel),
        loss=loss,
        optimizer=from_flags(OptimizerConfig, flags),
        schedule=from_flags(ScheduleConfig, flags),
        step=from_flags(StepConfig, flags),
        parallel=parallel,
        length=from_flags(RunLength, flags),
        saving=from_flags(SavePolicy, flags, folder=folder.folder and folder.folder / "checkpoints", name=folder.name),
        evaluation=_evaluation(flags, evaluation_batch),
        tuning=from_flags(FineTuningConfig, flags),
        folder=folder,
        reporting=from_flags(
            ReportingConfig,
            flags,
            destinations=reporting_destinations(flags["report_to"]),
            name=folder.name,
            resumes=flags["resume"] is not None,
        ),
        flags=flags,
    )


def _shared_batch(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return ``batch_size`` and ``accum_freq`` for ``--global-batch``. Use as few micro-batches as possible."""
    total, world_size = flags["global_batch"], flags["world_size"]
    if total is None:
        return {}
    for size in range(flags["batch_size"], 0, -1):
        accum_freq, rest = divmod(total, size * world_size)
        if rest == 0 and accum_freq >= flags["accum_freq"]:
            return {"batch_size": size, "accum_freq": accum_freq}
    raise UsageError(f"--global-batch {total}: expected a multiple of the number of processes, {world_size}")


def _loss(config: Config, flags: Mapping[str, Any], is_pretrained: bool) -> LossConfig:
    """Return the loss with all its options: given options, else OpenCLIP's flags, else defaults."""
    try:
        used = registry.run_defaults(config.loss, config.loss_options, pretrained=is_pretrained)
        parts = {name: used[name] for name in PARTS if name in used}
        registry.check_options(config.loss, **parts | dict(config.loss_options))
    except OptionError as error:
        raise UsageError(with_flags(str(error), OPTIONS)) from error
    of_run = {name: flags[name] for name, option in OPTIONS.items() if option.openclip_flag}
    options = used | {name: value for name, value in of_run.items() if name in used} | dict(config.loss_options)
    # ``seed`` and ``epochs`` always have an effect, because other parts of the run also use them.
    unused = of_run.keys() - used.keys() - {"seed", "epochs"}
    without_effect = sorted(OPTIONS[name].flag for name in unused if of_run[name] != OPTIONS[name].default)
    return LossConfig(config.loss, config.loss_options, options, tuple(without_effect))


def _loading(flags: Mapping[str, Any], loss: LossConfig, parallel: ParallelConfig) -> TrainLoaderConfig:
    views = loss.options.get("views", 1)
    return from_flags(
        TrainLoaderConfig,
        flags,
        patience=flags["rank_patience"],
        pin_memory=(flags["device"] or "").startswith("cuda"),
        views=views,
        caption_hash=loss.options.get("equal_captions", "negative") != "negative",
        hashed_steps=MEASURED_STEPS if views == 1 else 0,
        **(text_groups(flags["text_groups"], parallel) if views == 1 else {}),
    )


def text_groups(number: int, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings of the loader for ``--text-groups``."""
    if number > 1 and parallel.fsdp:
        # A sharded block is gathered for each group: as often on all ranks, and once to limit the communication.
        number = 1
    elif number == 1:
        number = 0
    return {"text_groups": number, "equal_text_groups": parallel.compile}


def _evaluation(flags: Mapping[str, Any], batch_size: int) -> EvaluationConfig:
    def data(name: str) -> DataSpec | None:
        return DataSpec.of_validation({**flags, "val_data": flags[name]}) if flags[name] else None

    return from_flags(
        EvaluationConfig,
        flags,
        val_data=data("val_data"),
        class_data=data("val_classes"),
        scores_kept=flags["keep_data"] is not None,
        kept_tasks=tuple((flags["keep_tasks"] or "").split("::")) if flags["keep_tasks"] else (),
        batch_size=batch_size,
    )
