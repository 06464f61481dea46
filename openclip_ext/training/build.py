"""Build the trainer of a run from its configuration: the parts, in the order of the data flow."""

import logging
import math
from dataclasses import replace
from pathlib import Path

from torch import nn

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import prepare_for
from openclip_ext.contrastive.similarities import chunk_bytes
from openclip_ext.data.loader.build import build_train_loader
from openclip_ext.data.loader.train_loader import TrainLoader
from openclip_ext.training import checkpoint as ckpt
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import Position, RunIdentity, Start
from openclip_ext.training.checks import check_combination, other_batch
from openclip_ext.training.config import LossConfig, TrainingConfig
from openclip_ext.training.model import (
    BuiltModel,
    build_loss,
    for_training,
    load_pretrained_heads,
    write_model_config,
)
from openclip_ext.training.optimizer import create_optimizer, create_schedule, full_name, logit_scale_lr
from openclip_ext.training.runtime import run_folder
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.step import StepSettings, TrainStep, gradient_scaler
from openclip_ext.training.trainer import Trainer, stateful_parts
from openclip_ext.training.validation import build_evaluators


def build_trainer(config: TrainingConfig, built: BuiltModel, folder: Path | None, start: Start) -> Trainer:
    """Build the parts of a training, restored from the checkpoint that it starts from, and write down what it is.

    Raises:
        UsageError, ValueError: the data, the loss or the checkpoint do not fit the configuration.
    """
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
    config = replace(config, loss=_loss_of_length(config, steps))
    loss = build_loss(
        config.loss, config.model.name, built.model, loader.num_samples, built.device, loader.source.reference
    )
    check_combination(config, loss, distributed.world_size())
    model = _prepare_model(config, built, loss, is_fresh=start.checkpoint is None)
    temperature_lr = _temperature_lr(config, loss, steps)
    optimizer = create_optimizer(model, config.optimizer, temperature_lr, loss.model_head())
    scaler = gradient_scaler(config.step.precision, built.device)
    identity = _identity(config, loader)
    position = ckpt.restore(start.checkpoint, identity, steps_per_epoch, model, optimizer, scaler, loss)
    ema = ckpt.restore_ema(start.checkpoint, model, config.step.model_ema_decay)
    settings = StepSettings.of(config.step, built.device, built.images.normalize)
    step = TrainStep(parallel.compiled(model, config.parallel), loss, optimizer, settings, scaler, ema)
    if start.checkpoint is not None:
        for name, part in stateful_parts(step, loader).items():
            part.load_state_dict(start.checkpoint.parts.get(name, {}))
    steps_left = steps_per_epoch * (config.length.epochs - position.epoch) - position.step_in_epoch
    if distributed.is_master():
        _tell(config, start, identity, position, steps_left)
        if folder is not None:
            _begin_folder(config, folder, position, start, trains=steps_left > 0)
    _announce(identity, built.model, loss, steps_per_epoch, config.length.epochs)
    return Trainer(
        step=step,
        loader=loader,
        schedule=create_schedule(config.schedule, optimizer, steps_per_epoch, temperature_lr),
        length=config.length,
        policy=config.saving,
        identity=identity,
        reporter=Reporter(folder, config.reporting, position.step + steps_left, steps_per_epoch, config.stored_flags),
        evaluators=build_evaluators(config.evaluation, built, config.step),
        position=position,
        unreadable=start.unreadable,
    )


def _loss_of_length(config: TrainingConfig, steps: int) -> LossConfig:
    """Return the loss with the defaults of a training of so many steps."""
    loss = for_training(config.loss, steps, bool(config.model.weights))
    suited = dict(loss.options.items() - config.loss.options.items())
    if suited and distributed.is_master():
        logging.info(f"Defaults of the loss in this training: {suited}.")
    return loss


def _identity(config: TrainingConfig, loader: TrainLoader) -> RunIdentity:
    return RunIdentity(
        model=config.model.name,
        loss=config.loss.name,
        num_samples=loader.num_samples,
        global_batch=config.loading.batch_size * config.loading.accum_freq * distributed.world_size(),
        seed=config.loading.seed,
        optimizer=full_name(config.optimizer),
        data=loader.source.index_digest,
        settings=run_folder.settings(config.stored_flags, config.loss.options),
    )


def _tell(config: TrainingConfig, start: Start, identity: RunIdentity, position: Position, steps_left: int) -> None:
    """Log what a user may not expect of this start."""
    if changed := ckpt.changed_settings(start.checkpoint, identity):
        logging.warning(f"The run goes on with other settings: {'; '.join(changed)}.")
    if steps_left <= 0:
        logging.info(f"Nothing is left to train: the checkpoint is the end of epoch {position.epoch}, see --epochs.")
    if told := other_batch(config, identity.global_batch, distributed.world_size()):
        logging.warning(told)


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
        run_folder.write_settings(folder, config.stored_flags, config.loss.name, dict(config.loss.options))
        write_model_config(config.model, folder)
    if start.checkpoint is None:
        (folder / run_folder.SAVED).unlink(missing_ok=True)
    ckpt.cut_logs(folder, position)
    ckpt.remove_leftovers(folder / "checkpoints", spared=start.unreadable)
    if start.checkpoint is not None:
        # The run may have been killed after its last save and before it removed those that the save had overtaken.
        ckpt.remove_older_mid_epoch(folder / "checkpoints", kept=start.checkpoint.path, spared=start.unreadable)
    if config.copy_codebase:
        run_folder.copy_codebase(folder)


def _announce(
    identity: RunIdentity,
    model: nn.Module,
    loss: ContrastiveLoss,
    steps_per_epoch: int,
    epochs: int,
) -> None:
    """Say what will be trained, on how much, and what the loss will take."""
    if not distributed.is_master():
        return
    global_batch = identity.global_batch
    local_batch = global_batch // distributed.world_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = loss.state_size()
    similarities = chunk_bytes(loss.views * local_batch, loss.views * global_batch)
    candidates = loss.views * (global_batch - 1) + 1
    logging.debug(f"Model:\n{model}")
    logging.info(f"Model {identity.model}: {parameters / 1e6:.1f} M parameters")
    logging.info(
        f"Data: {identity.num_samples} samples, {steps_per_epoch} steps of {global_batch} an epoch, {epochs} epochs"
    )
    logging.info(
        f"Loss {identity.loss}: state {sum(state) / 2**20:.1f} MiB on this rank, "
        f"similarities {similarities / 2**20:.1f} MiB a step"
    )
    logging.info(f"InfoNCE at chance is ln {candidates} = {math.log(candidates):.4f}")
