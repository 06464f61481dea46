"""Train CLIP: ``torchrun --nproc-per-node N -m openclip_ext.training.main --loss NAME ...``.

This file assembles the parts, in the order of the data flow; the parts do the work.
"""

import argparse
import json
import logging
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.similarities import chunk_bytes
from openclip_ext.data.loader import build_eval_loader, build_train_loader
from openclip_ext.heads import read_heads, with_heads
from openclip_ext.losses import registry
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import checkpoint as ckpt
from openclip_ext.training import parallel, remote, run_folder
from openclip_ext.training.checkpoint import Checkpoint, Position, RunIdentity
from openclip_ext.training.errors import UsageError
from openclip_ext.training.evaluation import ImageNetZeroShot, ScheduledEvaluator, Validation, run_evaluators
from openclip_ext.training.flags import LossChoice, loss_options, parse, views
from openclip_ext.training.optimizer import create_optimizer, create_schedule
from openclip_ext.training.reporting import Reporter
from openclip_ext.training.step import StepSettings, TrainStep
from openclip_ext.training.trainer import RunLength, SavePolicy, Trainer
from openclip_ext.training.views import train_image_tower_only


@dataclass(frozen=True)
class Parts:
    """What both training and a mere evaluation need."""

    model: nn.Module
    preprocess_train: Callable
    preprocess_val: Callable
    tokenizer: Callable
    device: torch.device


def main(argv: list[str]) -> None:
    """Run a training (or, without training data, an evaluation) command line.

    Args:
        argv: the arguments after the program's name; OpenCLIP's flags and ours.

    Raises:
        UsageError: a wrong command line, or data or a checkpoint that does not fit it.
        SystemExit: after ``--help``, argparse's errors, and a run that SIGTERM has stopped.
    """
    add_model_configs()
    args, choice = parse(argv)
    args.reports = _reports(args.report_to)
    compat.set_backends()
    device = compat.init_device(args)
    handlers = list(logging.root.handlers)
    try:
        _run(args, choice, device)
    except Exception as error:
        _log_failure(error, keep=handlers)
        raise
    finally:
        _close_log(keep=handlers)
        distributed.shutdown()


def _run(args: argparse.Namespace, choice: LossChoice, device: torch.device) -> None:
    if args.name is None:
        args.name = run_folder.default_name(args)
    folder = run_folder.prepare(args)
    with remote.synchronised(args, folder):
        checkpoint = _find_checkpoint(args, folder)
        parts = _build_parts(args, device)
        if args.train_data or args.dataset_type == "synthetic":
            _train(args, choice, parts, folder, checkpoint)
        else:
            _evaluate_only(args, parts, folder, checkpoint)


# --- training --------------------------------------------------------------------------------------------------------


def _train(
    args: argparse.Namespace, choice: LossChoice, parts: Parts, folder: Path | None, checkpoint: Checkpoint | None
) -> None:
    loader = _train_loader(args, parts, views(choice))
    options = loss_options(args, choice)
    loss = _build_loss(args, choice, options, parts, loader.num_samples)
    _refuse_resampling(args, loss)
    _check_fsdp(args, loss)
    if checkpoint is None and args.pretrained:
        _load_pretrained_heads(loss, args.pretrained)
    model = _prepare_model(args, parts, loss, choice, is_fresh=checkpoint is None)
    optimizer = create_optimizer(model, args, loss.logit_scale_lr, loss.model_head())
    scaler = torch.amp.GradScaler(device=parts.device.type) if args.precision == "amp" else None
    identity = RunIdentity(
        model=args.model,
        loss=choice.name,
        num_samples=loader.num_samples,
        global_batch=args.batch_size * args.accum_freq * args.world_size,
        seed=args.seed,
    )
    steps_per_epoch = loader.batches_per_epoch // args.accum_freq
    position = _resume(checkpoint, identity, steps_per_epoch, model, optimizer, scaler, loss)
    if folder is not None and distributed.is_master():
        run_folder.write_settings(folder, args, choice, options)
        _cut_logs(folder, position)
    if args.copy_codebase and folder is not None and distributed.is_master():
        run_folder.copy_codebase(folder)
    _announce(args, choice, parts.model, loss, loader, steps_per_epoch)
    trainer = Trainer(
        step=TrainStep(_compiled(args, model), loss, optimizer, _step_settings(args, parts.device), scaler),
        loader=loader,
        schedule=create_schedule(args, optimizer, steps_per_epoch, loss.logit_scale_lr),
        length=RunLength(args.epochs, args.accum_freq, args.log_every_n_steps),
        policy=_save_policy(args, folder),
        identity=identity,
        reporter=Reporter(folder, args, total_steps=steps_per_epoch * args.epochs, steps_per_epoch=steps_per_epoch),
        evaluators=_evaluators(args, parts),
        position=position,
    )
    # As the master sees its files: ranks that disagreed would wait for each other in different places.
    evaluate_first = distributed.broadcast_object(checkpoint is not None and _lacks_evaluation(folder, position))
    try:
        trainer.fit(evaluate_first)
    finally:
        trainer.reporter.close()


def _train_loader(args: argparse.Namespace, parts: Parts, image_views: int) -> Any:
    return build_train_loader(
        args.train_data,
        dataset_type=args.dataset_type,
        preprocess=parts.preprocess_train,
        tokenizer=parts.tokenizer,
        batch_size=args.batch_size,
        accum_freq=args.accum_freq,
        workers=args.workers,
        seed=args.seed,
        epoch_samples=args.train_num_samples,
        manifest=args.manifest,
        image_key=args.image_key,
        caption_key=args.caption_key,
        csv_separator=args.csv_separator,
        csv_image_key=args.csv_img_key,
        csv_caption_key=args.csv_caption_key,
        max_bad_fraction=args.max_bad_fraction,
        resampled=args.dataset_resampled,
        upsampling_factors=args.train_data_upsampling_factors,
        caption_aware_flip=args.caption_aware_flip,
        views=image_views,
        pin_memory=parts.device.type == "cuda",
    )


def _build_loss(
    args: argparse.Namespace, choice: LossChoice, options: dict[str, Any], parts: Parts, num_samples: int
) -> nn.Module:
    own_loss = choice.name not in compat.OPENCLIP_LOSSES
    if own_loss and "coca" in args.model.lower():
        raise UsageError(
            f"{args.model} trains a captioner, too, which --loss {choice.name} would ignore; use --loss openclip"
        )
    if own_loss and (args.local_loss or args.gather_with_grad):
        logging.info(f"--local-loss and --gather-with-grad have no effect: --loss {choice.name} is always exact.")
    width = compat.embedding_dim(args.model, parts.model)
    loss = registry.create_loss(choice.name, embed_dim=width, num_samples=num_samples, **options)
    return loss.to(parts.device)


def _load_pretrained_heads(loss: nn.Module, pretrained: str) -> None:
    """Start the modules that the loss trains with the model from the checkpoint that the model starts from."""
    heads, own = read_heads(pretrained), loss.model_head()
    if heads is None:
        return
    if own is None:
        logging.warning(f"{pretrained} holds heads of the kind {heads.kind!r}, which this loss leaves out.")
    elif (own.kind, own.config) != (heads.kind, heads.config):
        raise UsageError(
            f"{pretrained} holds heads {heads.kind} {heads.config}, this run's are {own.kind} {own.config}: give the same "
            "options, or start from another model"
        )
    else:
        own.load_state_dict(heads.state_dict())


def _refuse_resampling(args: argparse.Namespace, loss: nn.Module) -> None:
    if args.dataset_resampled and loss.needs_index:
        raise UsageError(
            f"--dataset-resampled draws samples with replacement, and --loss {args.loss} keeps a state for every "
            "sample that needs each of them once an epoch. Leave out --dataset-resampled"
        )


def _check_fsdp(args: argparse.Namespace, loss: nn.Module) -> None:
    if args.fsdp and not args.distributed:
        logging.warning("--fsdp does nothing in a single process: there is nobody to share the model with.")
    elif args.fsdp:
        parallel.check_shardable(args.opt, args.precision == "amp", loss.model_head() is not None)


def _prepare_model(
    args: argparse.Namespace, parts: Parts, loss: nn.Module, choice: LossChoice, is_fresh: bool
) -> nn.Module:
    """Set the temperature's start, freeze what is locked, and wrap the model for several processes."""
    model = parts.model
    keeps_own = bool(args.pretrained) and "temperature" not in choice.options and loss.learns_logit_scale
    if is_fresh and loss.initial_logit_scale is not None and not keeps_own:
        with torch.no_grad():
            model.logit_scale.fill_(loss.initial_logit_scale)
    if not loss.learns_logit_scale:
        # DDP fails on a parameter that never receives a gradient.
        model.logit_scale.requires_grad_(False)
    if loss.views > 1:
        train_image_tower_only(model)
    if not args.distributed:
        return model
    if args.use_bn_sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not args.fsdp:
        return parallel.replicate(model, parts.device, static_graph=args.ddp_static_graph)
    return parallel.ShardedDataParallel(
        model,
        parts.device,
        reshard_after_forward=not args.fsdp_no_reshard_after_forward,
        compile_blocks=args.torchcompile,
        keep_whole=_evaluates(args),
    )


def _compiled(args: argparse.Namespace, model: nn.Module) -> nn.Module:
    if not args.torchcompile or isinstance(model, parallel.ShardedDataParallel):  # which has compiled its blocks
        return model
    if args.grad_checkpointing and args.distributed:
        # Dynamo's DDP optimizer does not work together with gradient checkpointing (OpenCLIP does the same).
        torch._dynamo.config.optimize_ddp = False
    return torch.compile(model)


def _step_settings(args: argparse.Namespace, device: torch.device) -> StepSettings:
    return StepSettings(
        device=device,
        input_dtype=open_clip.get_input_dtype(args.precision),
        autocast=compat.autocast_context(args.precision, device),
        grad_clip_norm=args.grad_clip_norm,
    )


def _save_policy(args: argparse.Namespace, folder: Path | None) -> SavePolicy:
    return SavePolicy(
        folder=None if folder is None else folder / "checkpoints",
        name=args.name,
        every_epochs=args.save_frequency,
        every_steps=args.save_every_steps,
        most_recent=args.save_most_recent,
        delete_previous=args.delete_previous_checkpoint,
    )


def _announce(
    args: argparse.Namespace, choice: LossChoice, model: nn.Module, loss: nn.Module, loader: Any, steps_per_epoch: int
) -> None:
    """Say what will be trained, on how much, and what the loss will take."""
    if not distributed.is_master():
        return
    global_batch = args.batch_size * args.accum_freq * args.world_size
    local_batch = args.batch_size * args.accum_freq
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = loss.state_size()
    similarities = chunk_bytes(loss.views * local_batch, loss.views * global_batch)
    candidates = loss.views * (global_batch - 1) + 1
    logging.debug(f"Model:\n{model}")
    logging.info(f"Model {args.model}: {parameters / 1e6:.1f} M parameters")
    logging.info(
        f"Data: {loader.num_samples} samples, {steps_per_epoch} steps of {global_batch} an epoch, {args.epochs} epochs"
    )
    logging.info(
        f"Loss {choice.name}: state {(state.replicated + state.with_model) / 2**20:.1f} MiB on this rank, "
        f"similarities {similarities / 2**20:.1f} MiB a step"
    )
    if state.on_host:
        folder = choice.options.get("state_dir")
        place = f"a file in {folder}" if folder else "the host's memory"
        logging.info(f"State of each sample: {state.on_host / 2**20:.1f} MiB of this rank, in {place}")
    logging.info(f"InfoNCE at chance is ln {candidates} = {math.log(candidates):.4f}")


# --- model and evaluation --------------------------------------------------------------------------------------------


def _build_parts(args: argparse.Namespace, device: torch.device) -> Parts:
    """Build the model as OpenCLIP does, from the same random numbers on all ranks; then each rank draws its own."""
    _seed(args.seed)
    model, preprocess_train, preprocess_val = compat.create_model(args, device)
    if args.use_bnb_linear is not None:
        model = compat.replace_linear_layers(model, args.use_bnb_linear, device)
    _seed(args.seed + args.rank)
    if args.trace:
        if args.train_data:
            raise UsageError("--trace is for evaluation only; leave it out to train")
        model = open_clip.trace_model(model, batch_size=args.batch_size, device=device)
    if args.lock_image:
        model.lock_image_tower(
            unlocked_groups=args.lock_image_unlocked_groups, freeze_bn_stats=args.lock_image_freeze_bn_stats
        )
    if args.lock_text:
        model.lock_text_tower(
            unlocked_layers=args.lock_text_unlocked_layers, freeze_layer_norm=args.lock_text_freeze_layer_norm
        )
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    tokenizer = open_clip.get_tokenizer(args.model, cache_dir=args.cache_dir, context_length=args.force_context_length)
    return Parts(model, preprocess_train, preprocess_val, tokenizer, device)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _evaluators(args: argparse.Namespace, parts: Parts) -> list[ScheduledEvaluator]:
    """What the flags ask to be measured, in OpenCLIP's order; only the master builds (and runs) any."""
    if not distributed.is_master():
        return []
    evaluators = []
    imagenet = {"imagenet-val": (args.imagenet_val, "val"), "imagenet-v2": (args.imagenet_v2, "v2")}
    loaders = {
        name: compat.imagenet_loader(args, parts.preprocess_val, split)
        for name, (path, split) in imagenet.items()
        if path is not None
    }
    if loaders:
        evaluators.append(ScheduledEvaluator(ImageNetZeroShot(loaders, args, parts.tokenizer), args.zeroshot_frequency))
    if args.val_data:
        evaluators.append(ScheduledEvaluator(_validation(args, parts), args.val_frequency))
    if args.eval_suite is not None:
        evaluators += [ScheduledEvaluator(item, args.eval_frequency) for item in _datacomp_suite(args, parts)]
    return evaluators


def _evaluates(args: argparse.Namespace) -> bool:
    """Whether the flags ask for any evaluation."""
    return any(value is not None for value in (args.val_data, args.imagenet_val, args.imagenet_v2, args.eval_suite))


def _validation(args: argparse.Namespace, parts: Parts) -> Validation:
    loader = build_eval_loader(
        args.val_data,
        dataset_type=args.dataset_type,
        preprocess=parts.preprocess_val,
        tokenizer=parts.tokenizer,
        batch_size=args.batch_size,
        workers=args.workers,
        image_key=args.image_key,
        caption_key=args.caption_key,
        csv_separator=args.csv_separator,
        csv_image_key=args.csv_img_key,
        csv_caption_key=args.csv_caption_key,
        num_samples=args.val_num_samples,
    )
    settings = _step_settings(args, parts.device)
    return Validation(loader, settings.device, settings.input_dtype, settings.autocast)


def _datacomp_suite(args: argparse.Namespace, parts: Parts) -> list[Any]:
    try:
        from eval.suite import build_suite
    except ImportError as error:
        raise UsageError(
            "--eval-suite needs the folder eval/ of the source: start the training from the clone"
        ) from error
    return build_suite(
        args.eval_suite,
        args.eval_data_dir,
        preprocess=parts.preprocess_val,
        tokenizer=parts.tokenizer,
        device=parts.device,
        batch_size=args.batch_size,
        workers=args.workers,
    )


def _evaluate_only(args: argparse.Namespace, parts: Parts, folder: Path | None, checkpoint: Checkpoint | None) -> None:
    """Without training data: measure the model (``--pretrained`` or ``--resume``) and end, as OpenCLIP does."""
    evaluators = [item.evaluator for item in _evaluators(args, parts)]
    if not distributed.broadcast_object(len(evaluators)):
        raise UsageError(
            "nothing to do: give --train-data to train, or --val-data, --imagenet-val or --eval-suite to evaluate"
        )
    position = Position()
    weights = args.pretrained
    if checkpoint is not None:
        ckpt.load_model(parts.model, checkpoint.model_file["state_dict"])
        position, weights = checkpoint.position, checkpoint.path
    if distributed.is_master():
        heads = read_heads(weights) if weights else None
        metrics = run_evaluators(evaluators, with_heads(parts.model, heads))
        reporter = Reporter(folder, args, total_steps=0, steps_per_epoch=0)
        reporter.evaluation(metrics, {"step": position.step, "epoch": position.epoch})
        reporter.close()
    distributed.barrier()


# --- resuming --------------------------------------------------------------------------------------------------------


def _find_checkpoint(args: argparse.Namespace, folder: Path | None) -> Checkpoint | None:
    """Read the checkpoint that ``--resume`` names; all ranks read the one that the master found."""
    if args.resume is None:
        return None
    if args.resume != "latest":
        return ckpt.read(Path(args.resume))
    if folder is None:
        raise UsageError("--resume latest needs a run folder, and --logs none has none")
    if distributed.is_master():
        remote.fetch_checkpoints(args, folder)
    path = distributed.broadcast_object(ckpt.find_latest(folder / "checkpoints") if distributed.is_master() else None)
    if distributed.is_master():
        logging.info(f"Resuming from {path}." if path else f"No checkpoint in {folder} yet: starting afresh.")
    return None if path is None else ckpt.read(path)


def _resume(
    checkpoint: Checkpoint | None,
    identity: RunIdentity,
    steps_per_epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    loss: nn.Module,
) -> Position:
    if checkpoint is None:
        return Position()
    ckpt.check_identity(checkpoint, identity)
    content = checkpoint.model_file
    ckpt.load_model(model, content["state_dict"])
    try:
        parallel.load_optimizer_state_dict(model, optimizer, content["optimizer"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"the optimizer state in {checkpoint.path} does not fit this run: {error}") from error
    if scaler is not None and "scaler" in content:
        scaler.load_state_dict(content["scaler"])
    ckpt.restore_loss(checkpoint, loss)
    if checkpoint.shared is None:
        return Position(epoch=content["epoch"], step=content["epoch"] * steps_per_epoch)
    return checkpoint.position


def _cut_logs(folder: Path, position: Position) -> None:
    """Remove what was logged beyond the checkpoint: those steps come again."""
    ckpt.truncate_jsonl(
        folder / "metrics.jsonl",
        lambda line: line["step"] < position.step + ("evaluation" in line),
    )
    ckpt.truncate_jsonl(folder / "checkpoints" / "results.jsonl", lambda line: line.get("epoch", 0) <= position.epoch)


def _lacks_evaluation(folder: Path | None, position: Position) -> bool:
    """Whether the run was stopped between an epoch's checkpoint and its evaluation."""
    if folder is None or position.step_in_epoch > 0 or position.epoch == 0:
        return False
    results = folder / "checkpoints" / "results.jsonl"
    lines = results.read_text().splitlines() if results.is_file() else []
    return all(json.loads(line).get("epoch") != position.epoch for line in lines)


# --- small things ----------------------------------------------------------------------------------------------------


def _reports(report_to: str) -> set[str]:
    """The destinations that ``--report-to`` names."""
    known = {"wandb", "tensorboard"}
    asked = {name.strip() for name in report_to.split(",") if name.strip()}
    if not asked <= known | {"all"}:
        raise UsageError(f"--report-to {report_to}: known are wandb, tensorboard, all")
    return known if "all" in asked else asked


def _log_failure(error: Exception, keep: list[logging.Handler]) -> None:
    """Write into the run's log why it ended; the terminal gets it from whoever catches the error."""
    trace = None if isinstance(error, ValueError) else (type(error), error, error.__traceback__)
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, f"The run ended: {error}", None, trace)
    for handler in logging.root.handlers:
        if handler not in keep and isinstance(handler, logging.FileHandler):
            handler.handle(record)


def _close_log(keep: list[logging.Handler]) -> None:
    """Leave logging as it was, so that ``main`` can be called again in the same process."""
    for handler in [handler for handler in logging.root.handlers if handler not in keep]:
        logging.root.removeHandler(handler)
        handler.close()


def cli() -> None:
    """The program: a user's mistake is a message and exit status 2, not a traceback."""
    try:
        main(sys.argv[1:])
    except ValueError as error:
        if not isinstance(error, UsageError) and "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    cli()
