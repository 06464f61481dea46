"""A run of the training program. This file assembles the parts, in the order of the data flow; the parts do the work."""

import contextlib
import logging
import sys
from dataclasses import replace
from pathlib import Path

from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import say
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.loader.build import build_train_loader
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.losses.heads import read_heads, with_heads
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import checkpoint as ckpt
from openclip_ext.training.checkpoint import resume
from openclip_ext.training.checkpoint.checkpoint import Checkpoint, Position, RunIdentity
from openclip_ext.training.checkpoint.resume import Start
from openclip_ext.training.checks import check, check_combination, check_device, other_batch
from openclip_ext.training.config import TrainingConfig, training_config
from openclip_ext.training.flags import parse
from openclip_ext.training.model import (
    BuiltModel,
    build_loss,
    build_model,
    for_training,
    load_pretrained_heads,
    loading_line,
    prepare_for,
    write_model_config,
)
from openclip_ext.training.optimizer import create_optimizer, create_schedule, full_name, logit_scale_lr
from openclip_ext.training.runtime import heartbeat, run_folder, signals
from openclip_ext.training.runtime.reporting import Reporter, announce
from openclip_ext.training.step import TrainStep
from openclip_ext.training.trainer import SaveFailed, Trainer, TrainingDiverged
from openclip_ext.training.validation import build_evaluators, run_evaluators


def run(argv: list[str]) -> None:
    """Do what :func:`openclip_ext.training.main.main` documents; importing this file takes seconds."""
    add_model_configs()
    args, choice = parse(argv)
    signals.end_with_torchrun()
    compat.set_backends()
    check_device(args.device, is_given=any(word.partition("=")[0] == "--device" for word in argv))
    device = compat.init_device(args)
    distributed.set_patience(distributed.START_PATIENCE)
    handlers = list(logging.root.handlers)
    try:
        config = training_config(args, choice, device)
        check(config)
        with (
            heartbeat.watched(config.rank_patience),
            run_folder.opened(config.folder) as folder,
            run_folder.synchronised(config.folder),
        ):
            start = resume.find_start(config.resume, config.folder)
            built = build_model(config.model, device, config.loading.seed)
            if config.data is None:
                _evaluate_only(config, built, folder, start.checkpoint)
            else:
                _train(config, built, folder, start)
    except SystemExit:
        distributed.barrier()  # a launcher ends all processes when one has left, and the master may have files to copy
        raise
    except Exception as error:
        _log_failure(error, keep=handlers)
        raise
    finally:
        _close_log(keep=handlers)
        distributed.shutdown()


def _train(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> None:
    assert config.data is not None
    loader = build_train_loader(
        config.data,
        config.loading,
        preprocess=built.images.transform,
        tokenizer=built.tokenizer,
        decoder=built.images.decode,
    )
    steps_per_epoch = loader.batches_per_epoch // config.length.accum_freq
    steps = steps_per_epoch * config.length.epochs
    loss_config = for_training(config.loss, steps, bool(config.model.weights))
    suited = dict(loss_config.options.items() - config.loss.options.items())
    if suited and distributed.is_master():
        logging.info(f"Defaults of the loss in this training: {suited}.")
    config = replace(config, loss=loss_config)
    loss = build_loss(config.loss, config.model.name, built.model, loader.num_samples, built.device)
    check_combination(config, loss, distributed.world_size())
    model = _prepare_model(config, built, loss, is_fresh=start.checkpoint is None)
    temperature_lr = _temperature_lr(config, loss, steps)
    optimizer = create_optimizer(model, config.optimizer, temperature_lr, loss.model_head())
    scaler = config.step.scaler(built.device)
    identity = RunIdentity(
        model=config.model.name,
        loss=config.loss.name,
        num_samples=loader.num_samples,
        global_batch=config.global_batch,
        seed=config.loading.seed,
        optimizer=full_name(config.optimizer),
        data=loader.source.index_digest,
        settings=run_folder.settings(config.flags, config.loss.options),
    )
    position = resume.restore(start.checkpoint, identity, steps_per_epoch, model, optimizer, scaler, loss)
    loader.check_progress(position.progress)
    if distributed.is_master() and (changed := ckpt.changed_settings(start.checkpoint, identity)):
        logging.warning(f"The run goes on with other settings: {'; '.join(changed)}.")
    steps_left = steps_per_epoch * (config.length.epochs - position.epoch) - position.step_in_epoch
    if steps_left <= 0 and distributed.is_master():
        logging.info(f"Nothing is left to train: the checkpoint is the end of epoch {position.epoch}, see --epochs.")
    if folder is not None and distributed.is_master():
        _begin_folder(config, folder, position, start, trains=steps_left > 0)
    told = other_batch(config, config.global_batch, distributed.world_size())
    if told is not None and distributed.is_master():
        logging.warning(told)
    announce(identity, built.model, loss, steps_per_epoch, config.length.epochs)
    settings = config.step.settings(built.device, built.images.normalize)
    ema = resume.restore_ema(start.checkpoint, model, config.step.model_ema_decay)
    trainer = Trainer(
        step=TrainStep(parallel.compiled(model, config.parallel), loss, optimizer, settings, scaler, ema),
        loader=loader,
        schedule=create_schedule(config.schedule, optimizer, steps_per_epoch, temperature_lr),
        length=config.length,
        policy=config.saving,
        identity=identity,
        reporter=Reporter(folder, config.reporting, position.step + steps_left, steps_per_epoch),
        evaluators=build_evaluators(config.evaluation, built, config.step),
        position=position,
        unreadable=start.unreadable,
    )
    try:
        trainer.fit(start.checkpoint is not None and resume.lacks_evaluation(folder, position))
    finally:
        trainer.reporter.close()
    if folder is not None and distributed.is_master() and steps_left > 0:
        last = folder / "checkpoints" / f"epoch_{config.length.epochs}.pt"
        line = loading_line(config.model, built.model, folder, last)
        with contextlib.suppress(OSError):  # the run is saved, even if nobody reads this any more
            print(f"To load the model in stock OpenCLIP:\n  {line}", flush=True)  # the log's last words are of the run


def _prepare_model(config: TrainingConfig, built: BuiltModel, loss: ContrastiveLoss, is_fresh: bool) -> nn.Module:
    """Prepare the model for the loss, and wrap it for the processes."""
    weights = config.model.weights
    if is_fresh and weights:
        load_pretrained_heads(loss, weights)
    keeps_own = bool(weights) and "temperature" not in config.loss.given and loss.learns_logit_scale
    prepare_for(loss, built.model, set_logit_scale=is_fresh and not keeps_own)
    return parallel.distribute(built.model, config.parallel, built.device, keep_whole=config.evaluation.is_wanted)


def _temperature_lr(config: TrainingConfig, loss: ContrastiveLoss, steps: int) -> float | None:
    """Return the learning rate of the model's logit scale: as given, or as the length of the run asks for."""
    if "lr_tau" in config.loss.given:
        return loss.logit_scale_lr
    rate = logit_scale_lr(loss.logit_scale_lr, steps)
    if rate != loss.logit_scale_lr:
        logging.info(f"lr_tau is {rate:.3g} instead of {loss.logit_scale_lr:g}, as the run has only {steps:,} steps.")
    return rate


def _begin_folder(config: TrainingConfig, folder: Path, position: Position, start: Start, trains: bool) -> None:
    """Write what the folder says about the run, and bring the rest to where the run goes on."""
    if trains or start.checkpoint is None:  # else the settings are still those of what is there
        run_folder.write_settings(folder, config.flags, config.loss.name, dict(config.loss.options))
        write_model_config(config.model, folder)
    if start.checkpoint is None:
        (folder / run_folder.SAVED).unlink(missing_ok=True)
    resume.cut_logs(folder, position)
    ckpt.remove_leftovers(folder / "checkpoints", spared=start.unreadable)
    if start.checkpoint is not None:
        # The run may have been killed after its last save and before it removed those that the save had overtaken.
        ckpt.remove_older_mid_epoch(folder / "checkpoints", kept=start.checkpoint.path, spared=start.unreadable)
    if config.copy_codebase:
        run_folder.copy_codebase(folder)


def _evaluate_only(
    config: TrainingConfig, built: BuiltModel, folder: Path | None, checkpoint: Checkpoint | None
) -> None:
    """Measure the model (``--pretrained`` or ``--resume``) and end, as OpenCLIP does without training data."""
    evaluators = [item.evaluator for item in build_evaluators(config.evaluation, built, config.step)]
    position = Position()
    weights: str | Path | None = config.model.weights
    if checkpoint is not None:
        ckpt.load_model(built.model, checkpoint.model_file["state_dict"], checkpoint.path)
        position, weights = checkpoint.position, checkpoint.path
    if distributed.is_master():
        heads = read_heads(weights) if weights else None
        if not weights:
            logging.warning("Neither --train-data nor --pretrained nor --resume: this measures an untrained model.")
        metrics = run_evaluators(evaluators, with_heads(built.model, heads), must_succeed=True)
        reporter = Reporter(folder, config.reporting, total_steps=0, steps_per_epoch=0)
        reporter.evaluation(metrics, {"step": position.step, "epoch": position.epoch})
        reporter.close()
    distributed.barrier()


def _log_failure(error: Exception, keep: list[logging.Handler]) -> None:
    """Write into the run's log why it ended; the terminal gets it from whoever catches the error."""
    trace = None if isinstance(error, ValueError) else (type(error), error, error.__traceback__)
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, f"The run ended: {error}", None, trace)
    logging.root.filter(record)
    for handler in logging.root.handlers:
        if handler not in keep and isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _close_log(keep: list[logging.Handler]) -> None:
    """Leave logging as it was, so that ``main`` can be called again in the same process."""
    for handler in [handler for handler in logging.root.handlers if handler not in keep]:
        logging.root.removeHandler(handler)
        handler.close()


def program(argv: list[str]) -> None:
    """Run with messages for errors that a user can mend, not tracebacks; exit status 2 for a wrong command line, else 1."""
    try:
        run(argv)
    except (BadDataError, WorkerError, TrainingDiverged, SaveFailed) as error:
        say(f"error: {error}", sys.stderr)
        raise SystemExit(1) from error
    except RuntimeError as error:
        if not distributed.is_lost_peer(error) or "--debug" in argv:
            raise
        print(
            "error: another rank has ended, and says why; --resume latest goes on from the last checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(1) from error
    except (ValueError, FileNotFoundError) as error:
        if not isinstance(error, UsageError) and "--debug" in argv:
            raise
        say(f"error: {error}", sys.stderr)
        raise SystemExit(2) from error
