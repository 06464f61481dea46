"""A run of the training program: connect the processes, build all parts in the order of the data flow, and train."""

import argparse
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.format import Position, RunIdentity
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.messages import get_logger, say
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.similarities import chunk_bytes
from openclip_ext.data.loader.rehearsal import RehearsalLoader, build_loader
from openclip_ext.data.loader.single_source import AnyTrainLoader
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.losses.heads import read_heads, with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import model as models
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import restoring, saving
from openclip_ext.training.checkpoint.finding import Start, find_start
from openclip_ext.training.checks import check, check_combination, check_device, doubtful_settings, other_batch
from openclip_ext.training.config import TrainingConfig, for_processes
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.interpolation import MODEL_FILE, SCORES_FILE, Mixes, score_mixes
from openclip_ext.training.model import BuiltModel
from openclip_ext.training.optimizer import create_optimizer, create_schedule, full_name, logit_scale_lr
from openclip_ext.training.recipes import by_pairs
from openclip_ext.training.runtime import heartbeat, run_folder, signals
from openclip_ext.training.runtime.repeats import MEASURED_STEPS
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.step import StepSettings, TrainStep, gradient_scaler
from openclip_ext.training.trainer import SaveFailed, Trainer, TrainingDiverged, stateful_parts
from openclip_ext.training.validation import ScoredTask, build_tasks, run_tasks

logger = get_logger(__name__)

# Flags that may differ between the ranks.
_DIFFERING_FLAGS = {"rank", "local_rank", "device", "logs", "debug"}
# Flags with paths, which may differ between nodes.
_PATH_FLAGS = {
    *(
        "train_data",
        "val_data",
        "keep_data",
        "val_classes",
        "keep_tasks",
        "imagenet_val",
        "imagenet_v2",
        "eval_data_dir",
    ),
    *("manifest", "reference", "cache_dir"),
    *("resume", "log_path", "checkpoint_path", "tensorboard_path"),
}


def run(config: TrainingConfig) -> None:
    """Run a configuration. For errors, see :func:`openclip_ext.training.main.main`."""
    add_model_configs()
    signals.end_with_torchrun()
    compat.set_backends()
    check_device(config.device)
    number = 1 if config.flags.get("dist_url") else distributed.check_launcher()
    if number > 1 and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0":
        say(f"Waiting for {number} processes to connect to {os.environ['MASTER_ADDR']} ...", sys.stderr)
    processes = argparse.Namespace(**{**config.flags, "device": config.device or "cuda"})
    device = _connect(processes)
    distributed.set_patience(distributed.START_PATIENCE)
    handlers = list(logging.root.handlers)
    try:
        date = distributed.broadcast_object(datetime.now().strftime("%Y_%m_%d-%H_%M_%S"))
        connected = {name: value for name, value in vars(processes).items() if value != config.flags.get(name)}
        config = models.with_loss_options(for_processes(by_pairs.resolve(config), date, **connected))
        hashed_steps = MEASURED_STEPS if config.loading.views == 1 else 0
        loading = replace(config.loading, pin_memory=device.type == "cuda", hashed_steps=hashed_steps)
        config = replace(config, loading=loading)
        _refuse_other_flags({**config.stored_flags, **config.loss.options})
        with heartbeat.watched(config.rank_patience):
            check(config)
            with run_folder.opened(config.folder) as folder, run_folder.synchronized(config.folder):
                start = find_start(config.resume, config.folder)
                built = models.build_model(config.model, device, config.loading.seed)
                if config.data is None:
                    _evaluate_only(config, built, folder, start)
                else:
                    _train(config, built, folder, start)
    except SystemExit:
        distributed.barrier()  # when one process exits, launchers kill all processes, but rank 0 may still be copying files
        raise
    except Exception as error:
        _log_failure(error, keep=handlers)
        raise
    finally:
        # Remove this run's handlers, because ``main`` may be called again in the same process.
        for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
            logging.root.removeHandler(handler)
            handler.close()
        distributed.shutdown()


def _connect(processes: argparse.Namespace) -> torch.device:
    """Connect the processes and return the device. Raise UsageError if the port is in use, or the ranks do not connect."""
    try:
        return compat.init_device(processes)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise UsageError(f"MASTER_PORT {port} is in use: set another port, the same for all ranks") from error
        raise UsageError(
            f"the ranks do not connect to MASTER_ADDR {address}, MASTER_PORT {port} ({one_line(error)}): check both, and "
            "start WORLD_SIZE ranks"
        ) from error


def _refuse_other_flags(own: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks if a rank's flags differ from rank 0's. Paths may differ between nodes. Collective."""
    compared = {name: _compared(name, value) for name, value in sorted(own.items()) if name not in _DIFFERING_FLAGS}
    first, *others = distributed.all_gather_object(compared)
    for rank, flags in enumerate(others, start=1):
        differing = [f"{name} {flags.get(name)} ({first[name]})" for name in first if flags.get(name) != first[name]]
        if differing:
            raise UsageError(f"rank {rank} must have the flags of rank 0 (in parentheses): {', '.join(differing)}")


def _compared(name: str, value: Any) -> Any:
    """Return what must be equal on all ranks: a flag's value, or PATH if the value is a path."""
    is_path = name in _PATH_FLAGS and value not in (None, "", "latest")
    is_file = name == "pretrained" and os.path.exists(value or "")  # otherwise it is a tag
    is_folder = name == "model" and value.startswith("local-dir:")
    return "PATH" if is_path or is_file or is_folder else value


def _train(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> None:
    # A pretrained tag can change the preprocessing. Evaluations and exports use the flags in the run folder.
    config = replace(config, flags={**config.flags, **compat.changed_preprocessing(built.model)})
    trainer = build_trainer(config, built, folder, start)
    has_steps_left = trainer.position.epoch < config.length.epochs
    is_mixed = _is_mixed(config, trainer)
    try:
        lacks = distributed.on_master(lambda: restoring.lacks_evaluation(folder, trainer.position))
        # A pretrained model is also scored before the first step.
        is_due = is_mixed if trainer.position.epoch == 0 else start.checkpoint is not None
        trainer.fit(evaluate_first=is_due and lacks)
        lacks_mix = distributed.on_master(lambda: folder is not None and not (folder / SCORES_FILE).exists())
        mixes = _mix(config, trainer, folder) if is_mixed and (has_steps_left or lacks_mix) else None
    finally:
        trainer.reporter.close()
    if folder is not None and distributed.is_master() and (has_steps_left or mixes is not None):
        last = folder / "checkpoints" / f"epoch_{config.length.epochs}.pt"
        chosen = last if mixes is None else folder / MODEL_FILE
        line = models.loading_line(config.model, built.model, folder, chosen)
        exporting = (
            f"openclip-ext export {shlex.quote(str(chosen))} --output {shlex.quote(f'{config.folder.name}-exported')}"
        )
        with contextlib.suppress(OSError):  # the user may have closed the terminal
            print(f"To load the model in stock OpenCLIP:\n  {line}", flush=True)
            if mixes is not None:
                print(f"To export it:\n  {exporting}", flush=True)


def _is_mixed(config: TrainingConfig, trainer: Trainer) -> bool:
    """Return whether the run compares and mixes its weights with pretrained weights."""
    evaluation = config.evaluation
    is_scored = evaluation.val_data or evaluation.class_data or evaluation.scores_kept or evaluation.kept_tasks
    is_wanted = config.tuning.is_compared and bool(config.model.weights and is_scored) and evaluation.val_every > 0
    return is_wanted and trainer.loss.model_head() is None  # heads have no initial weights


def _mix(config: TrainingConfig, trainer: Trainer, folder: Path | None) -> Mixes | None:
    """Choose the mix of pretrained and trained weights on rank 0, and log the scores. Collective: all ranks call it.

    If this fails, log the error and return None, because the trained model is already saved.
    """
    mixes = None
    content = trainer.model_file()
    if distributed.is_master():
        tasks = [scheduled for scheduled in trainer.tasks if isinstance(scheduled.task, ScoredTask)]
        logger.info("Scoring mixes of the pretrained and the trained weights ...")
        try:
            device = trainer.step.settings.device
            mixes = score_mixes(tasks, config.model, content, config.tuning.keep_at_least, device, folder)
            logger.info(f"Before and after:\n{mixes}")
        except Exception:
            logger.exception("The mixes of weights could not be scored; the trained model is saved.")
    distributed.barrier()
    return mixes


def build_trainer(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> Trainer:
    """Build the parts of a training run, restore them from ``start``'s checkpoint, if any, and write the run's settings."""
    assert config.data is not None
    loader = build_loader(
        config.data,
        config.loading,
        config.keep,
        preprocess=built.images.transform,
        tokenizer=built.tokenizer,
        decoder=built.images.decode,
    )
    steps_per_epoch = loader.batches_per_epoch // config.length.accum_freq
    steps = steps_per_epoch * config.length.epochs
    loss_config = models.for_training(config.loss, steps, bool(config.model.weights), loader.source.reference)
    defaults = dict(loss_config.options.items() - config.loss.options.items())
    if defaults and distributed.is_master():
        logger.info(f"Defaults of the loss in this run: {defaults}.")
    config = replace(config, loss=loss_config)
    step, temperature_lr = _build_step(config, built, loader, steps, is_fresh=start.checkpoint is None)
    identity = _identity(config, loader)
    position = restoring.restore(start.checkpoint, identity, steps_per_epoch, step, stateful_parts(step, loader))
    reference = loader.source.reference
    # After a resume, an epoch may have fewer steps than the run has already completed in it.
    steps_left = steps_per_epoch * (config.length.epochs - position.epoch) - min(
        position.step_in_epoch, steps_per_epoch
    )
    if distributed.is_master():
        if steps_left <= 0:
            logger.info(
                f"Nothing is left to train: the checkpoint is at epoch {position.epoch}. To continue, raise --epochs."
            )
        changed = restoring.changed_settings(start.checkpoint, identity)
        settings_warning = changed and f"The run continues with changed settings: {'; '.join(changed)}."
        batch_warning = other_batch(config, identity.global_batch, distributed.world_size())
        warnings = (settings_warning, batch_warning, *doubtful_settings(config), reference and reference.warning)
        for warning in filter(None, warnings):
            logger.warning(warning)
        _log_sizes(identity, built.model, step.loss, steps_per_epoch, config.length.epochs)
    held_out = loader.held_out if isinstance(loader, RehearsalLoader) else None
    if folder is not None:
        distributed.on_master(lambda: _begin_folder(config, folder, position, start, steps_left))
    return Trainer(
        step=step,
        loader=loader,
        schedule=create_schedule(config.schedule, step.optimizer, steps_per_epoch, temperature_lr),
        length=config.length,
        policy=config.saving,
        identity=identity,
        reporter=Reporter(
            folder, config.reporting, position.step, steps_left, steps_per_epoch, config.stored_flags, step.loss.steers
        ),
        tasks=build_tasks(config.evaluation, built, config.step, held_out),
        position=position,
    )


def _build_step(
    config: TrainingConfig, built: BuiltModel, loader: AnyTrainLoader | RehearsalLoader, steps: int, is_fresh: bool
) -> tuple[TrainStep, float | None]:
    """Build the loss and the optimizer around the model. Return the training step and the temperature's learning rate."""
    number, device, reference = loader.num_samples, built.device, loader.source.reference
    loss = models.build_loss(config.loss, config.model.name, built.model, number, device, reference)
    check_combination(config, loss, distributed.world_size(), compat.is_captioner(built.model))
    models.initialize(built.model, loss, config.model.weights, is_fresh)
    model = parallel.distribute(built.model, config.parallel, device, keep_whole=config.evaluation.is_wanted)
    temperature_lr = _temperature_lr(config, loss, steps)
    optimizer = create_optimizer(model, config.optimizer, temperature_lr, loss.model_head())
    ema = None if config.step.model_ema_decay is None else ModelEma(model, config.step.model_ema_decay)
    settings = StepSettings.of(config.step, device, built.images.normalize)
    if device.type == "cpu" and config.step.precision != "fp32":
        logger.warning(
            f"--precision {config.step.precision} is slow on many CPUs: --precision fp32 may be much faster."
        )
    if config.parallel.compile_loss:
        loss.compile()
    scaler = gradient_scaler(config.step.precision, device)
    return TrainStep(parallel.compiled(model, config.parallel), loss, optimizer, settings, scaler, ema), temperature_lr


def _temperature_lr(config: TrainingConfig, loss: ContrastiveLoss, steps: int) -> float | None:
    """Return the temperature's learning rate. If the user did not set it, it is larger in a short run."""
    if "lr_tau" in config.loss.given:
        return loss.logit_scale_lr
    rate = logit_scale_lr(loss.logit_scale_lr, steps)
    if rate != loss.logit_scale_lr:
        logger.info(
            f"lr_tau is {rate:.3g} instead of {loss.logit_scale_lr:g}, because the run has only {steps:,} steps."
        )
    return rate


def _identity(config: TrainingConfig, loader: AnyTrainLoader | RehearsalLoader) -> RunIdentity:
    lora, reference, optimizer = config.model.lora, loader.source.reference, config.optimizer
    data = loader.index_digest if isinstance(loader, RehearsalLoader) else loader.source.index_digest
    # A checkpoint stores the optimizer's state by position, and these patterns determine the order of the parameters.
    excluded = [f"--wd-exclude {glob}" for glob in sorted(optimizer.decay_excluded)]
    return RunIdentity(
        model=config.model.name,
        loss=config.loss.name,
        num_samples=loader.num_samples,
        global_batch=config.loading.batch_size * config.loading.accum_freq * distributed.world_size(),
        seed=config.loading.seed,
        optimizer=" ".join([full_name(optimizer), *optimizer.kwargs, *excluded]),
        data=data,
        lora=f"rank {lora.rank}, alpha {lora.scale:g}, targets {lora.targets}" if lora.rank else None,
        settings=run_folder.settings(config.stored_flags, config.loss.options)
        | {"reference_weights": reference and reference.about.get("weights")},
    )


def _begin_folder(config: TrainingConfig, folder: Path, position: Position, start: Start, steps_left: int) -> None:
    """Remove files and log entries that were written after the run's position. Write the run's settings.

    Raise UsageError if a file cannot be written. This file then stays unchanged.
    """
    checkpoints = folder / "checkpoints"
    try:
        restoring.cut_logs(folder, position)
        if steps_left > 0 or start.checkpoint is None:
            loss, steps = config.loss, position.step + steps_left
            run_folder.write_settings(folder, config.stored_flags, loss.name, dict(loss.options), steps)
            models.write_model_config(config.model, folder)
            (folder / SCORES_FILE).unlink(missing_ok=True)  # of an earlier end of the run
        if start.checkpoint is None:
            (folder / run_folder.SAVED).unlink(missing_ok=True)
        for unreadable in start.unreadable:
            saving.set_aside(unreadable)
        saving.remove_leftovers(checkpoints)
        if start.checkpoint is not None:
            # The run may have been killed between a save and the removal of older checkpoints.
            saving.remove_older_mid_epoch(checkpoints, kept=start.checkpoint.path)
        if config.copy_codebase:
            run_folder.copy_codebase(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write to the run folder {folder} ({error}): free disk space, or make the folder writable"
        ) from error


def _log_sizes(identity: RunIdentity, model: nn.Module, loss: ContrastiveLoss, steps: int, epochs: int) -> None:
    batch = identity.global_batch
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = sum(loss.state_size()) / 2**20
    similarities = chunk_bytes(loss.views * (batch // distributed.world_size()), loss.views * batch) / 2**20
    logger.debug(f"Model:\n{model}")
    logger.info(f"Model {identity.model}: {parameters / 1e6:.1f} M parameters")
    logger.info(f"Data: {identity.num_samples} samples, {steps} steps of {batch} per epoch, {epochs} epochs")
    logger.info(f"Loss {identity.loss}: state {state:.1f} MiB per rank, similarities {similarities:.1f} MiB per step")


def _evaluate_only(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> None:
    """Evaluate the model of ``--pretrained`` or ``--resume``, because there is no training data. OpenCLIP does the same."""
    tasks = build_tasks(config.evaluation, built, config.step)
    position = Position()
    weights: str | Path | None = config.model.weights
    if (checkpoint := start.checkpoint) is not None:
        restoring.load_model(built.model, checkpoint.model_file["state_dict"], checkpoint.path)
        position, weights = checkpoint.position, checkpoint.path
    if distributed.is_master():
        heads = read_heads(weights) if weights else None
        if not weights:
            logger.warning("The evaluated model is untrained: give its weights with --pretrained or --resume.")
        metrics = run_tasks(tasks, with_heads(built.model, heads), must_succeed=True)
        reporter = Reporter(folder, config.reporting, position.step, 0, 0, config.stored_flags)
        reporter.evaluation(metrics, {"step": position.step, "epoch": position.epoch})
        reporter.close()
    distributed.barrier()


def _log_failure(error: Exception, keep: list[logging.Handler]) -> None:
    """Write an error only to the run's log file, because the caller prints it to the terminal."""
    trace = None if isinstance(error, ValueError) else (type(error), error, error.__traceback__)
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, f"The run ended: {error}", None, trace)
    for handler in logging.root.handlers:
        if handler not in keep and isinstance(handler, logging.FileHandler):
            handler.handle(record)


def program(config: TrainingConfig) -> None:
    """Run a configuration. For errors that the user can fix, print a message instead of a traceback.

    The exit status is 2 for errors of the command line and its files, and 1 for errors during training.
    """
    try:
        run(config)
    except (BadDataError, WorkerError, TrainingDiverged, SaveFailed) as error:
        say(f"error: {error}", sys.stderr)
        raise SystemExit(1) from error
    except RuntimeError as error:
        if not distributed.is_lost_peer(error) or config.folder.debug:
            raise
        say("error: another rank failed; see its error. --resume latest continues from the last checkpoint", sys.stderr)
        raise SystemExit(1) from error
    except (ValueError, FileNotFoundError) as error:
        if not isinstance(error, UsageError) and config.folder.debug:
            raise
        say(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
