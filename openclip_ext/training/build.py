"""Build a training run in the order of the data flow: index of the data, model, loader, loss, optimizer, evaluations."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.format import MIX_SCORES_FILE, Position, RunIdentity, checksum
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.similarities import chunk_bytes
from openclip_ext.data.loader.build import build_loader, build_source
from openclip_ext.data.reference import START, EmbeddingStore
from openclip_ext.data.sources.source import Source
from openclip_ext.losses import registry
from openclip_ext.training import model as models
from openclip_ext.training import parallel
from openclip_ext.training.checkpoint import restoring, saving
from openclip_ext.training.checkpoint.finding import Start
from openclip_ext.training.checks import check_combination, doubtful_settings, other_batch, slow_precision
from openclip_ext.training.config import Config, RunPlan
from openclip_ext.training.optimizer import create_optimizer, create_schedule, full_name
from openclip_ext.training.runtime import run_folder
from openclip_ext.training.runtime.batch_report import MEASURED_STEPS, BatchReport
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.step import StepSettings, TrainStep, gradient_scaler
from openclip_ext.training.trainer import Trainer, stateful_parts

if TYPE_CHECKING:
    from openclip_ext.data.loader.rehearsal import RehearsalLoader
    from openclip_ext.data.loader.single_source import AnyTrainLoader
    from openclip_ext.training.validation import Scheduled

logger = get_logger(__name__)


def build(
    config: Config,
    plan: RunPlan,
    device: torch.device,
    folder: Path | None,
    start: Start,
    source: Source | None = None,
    built: models.BuiltModel | None = None,
) -> Trainer:
    """Build a training run, restore it from the checkpoint of ``start``, if any, and write the run's settings to ``folder``.

    A program that performs many runs can give their data ``source`` and the ``built`` model. On the meta device, one process
    builds a run of any number of processes, without weights and embeddings of the data. Collective: all ranks call it. Raise
    UsageError for mistakes that only the parts can find.
    """
    assert plan.data is not None, "a run without training data only evaluates"
    has_values = device.type != "meta"
    weights = plan.model.weights if has_values else None
    source = build_source(plan.data) if source is None else source
    built = models.build_model(plan.model, device, plan.loading.seed) if built is None else built
    # A pretrained tag can change the preprocessing. Evaluations and exports use the flags in the run folder.
    flags = plan.stored_flags | compat.changed_preprocessing(built.model)
    loader = _loader(plan, built, source, folder, has_values)
    reference = source.reference
    steps_per_epoch = loader.batches_per_epoch // plan.length.accum_freq
    steps = steps_per_epoch * plan.length.epochs
    options = models.loss_options(plan.loss, steps, plan.model.is_pretrained, reference)
    loss = models.build_loss(plan.loss, plan.model.name, built.model, loader.num_samples, device, reference, options)
    check_combination(plan, loss, plan.world_size, compat.is_captioner(built.model))
    models.initialize(built.model, loss, weights, is_fresh=start.checkpoint is None)
    step = _train_step(plan, built, loss, device)

    settings = run_folder.settings(flags, options) | {"reference_weights": reference and reference.about.get("weights")}
    settings["pretrained_weights"] = _pretrained_weights(weights if folder else None, start)
    identity = _identity(plan, loader, settings)
    position = restoring.restore(start.checkpoint, identity, steps_per_epoch, step, stateful_parts(step, loader))
    # After a resume, an epoch may have fewer steps than the run has already completed in it.
    steps_left = steps_per_epoch * (plan.length.epochs - position.epoch) - min(position.step_in_epoch, steps_per_epoch)
    if distributed.is_rank0():
        _log_settings(plan, options, start, identity, steps_left, device, reference.warning if reference else None)
        _log_sizes(plan, identity, built.model, loss, steps_per_epoch, source.num_samples)
    if folder is not None:
        if reference is not None:
            flags |= {"reference": str(reference.folder)}  # programs that read the run do not know ``start``
        values = config.words, flags, plan.loss.name, options, position.step + steps_left
        content = run_folder.Settings(*values, settings["pretrained_weights"])
        is_new = steps_left > 0 or start.checkpoint is None  # a run that is finished already keeps its settings
        distributed.on_rank0(lambda: _begin_folder(plan, folder, position, start, content if is_new else None))
    tasks: Sequence[Scheduled] = ()
    if plan.evaluation.frequencies:
        from openclip_ext.training.validation import build_tasks

        tasks = build_tasks(plan.evaluation, built, plan.step, getattr(loader, "held_out", None))
    measured = min(MEASURED_STEPS, steps_per_epoch), plan.loss.options.get("equal_captions"), built.padding
    reporting = plan.reporting, position.step, steps_left, steps_per_epoch, flags, loss.steers
    return Trainer(
        step=step,
        loader=loader,
        schedule=create_schedule(plan.schedule, step.optimizer, steps_per_epoch, loss.logit_scale_lr),
        length=plan.length,
        policy=plan.saving,
        identity=identity,
        reporter=Reporter(folder, *reporting),
        tasks=tasks,
        position=position,
        batch_report=BatchReport(*measured) if position.step == 0 else None,
    )


def _loader(
    plan: RunPlan, built: models.BuiltModel, source: Source, folder: Path | None, has_values: bool
) -> "AnyTrainLoader | RehearsalLoader":
    """Return the loader of the training data, after what the run embeds first: image features and ``--reference start``."""
    assert plan.data is not None, "a run without training data only evaluates"
    if plan.model.image_features is not None:
        _store_image_features(plan, built, source, Path(plan.model.image_features), has_values)
    if plan.data.reference == START:
        assert folder is not None, "checked with the flags"
        source.reference = _embedded(plan, built, built.model, source, folder / "reference", "--reference")
    return build_loader(
        plan.data,
        plan.loading,
        plan.keep,
        preprocess=built.images.transform,
        tokenizer=built.tokenizer,
        decoder=built.images.decode,
        source=source,
    )


def _train_step(plan: RunPlan, built: models.BuiltModel, loss: ContrastiveLoss, device: torch.device) -> TrainStep:
    """Return the training step of the distributed model, with its optimizer and average of weights."""
    model = parallel.distribute(built.model, plan.parallel, device, keep_whole=plan.evaluation.is_wanted)
    optimizer = create_optimizer(model, plan.optimizer, loss.logit_scale_lr, loss.model_head())
    ema = None
    if plan.step.model_ema_decay is not None:
        from openclip_ext.training.ema import ModelEma

        ema = ModelEma(model, plan.step.model_ema_decay)
    if plan.parallel.compile_loss:
        loss.compile()
    return TrainStep(
        parallel.compiled(model, plan.parallel),
        loss,
        optimizer,
        StepSettings.of(plan.step, device, built.images.normalize),
        gradient_scaler(plan.step.precision, device),
        ema,
    )


def _store_image_features(
    plan: RunPlan, built: models.BuiltModel, source: Source, output: Path, has_values: bool
) -> None:
    """Let a source give features of the frozen part of the image tower instead of images, and the model take them."""
    from openclip_ext.training.image_features import FrozenTower, accept_features

    tower = FrozenTower(built.model, compat.embedding_dim(plan.model.name, built.model))
    if has_values:
        of_tower = replace(built, model=tower)
        source.image_features = _embedded(plan, of_tower, tower.frozen, source, output, "--image-features")
    if tower.projection is not None:
        accept_features(built.model.visual)


def _embedded(
    plan: RunPlan, built: models.BuiltModel, weights: nn.Module, source: Source, output: Path, flag: str
) -> EmbeddingStore:
    """Embed the training data with the model as it starts, if ``output`` does not have these embeddings.

    ``weights`` has the weights that identify them, and ``flag`` set ``output``. Raise UsageError if ``output`` has
    embeddings of different weights.
    """
    from openclip_ext.evaluation.embed import write_embeddings
    from openclip_ext.evaluation.encoder import Encoder
    from openclip_ext.evaluation.models import weights_digest
    from openclip_ext.evaluation.results import config_digest

    assert plan.data is not None
    spec = replace(plan.data, reference=None)
    # Flags such as --force-quick-gelu change neither the weights nor the architecture's file.
    layers = sorted({type(layer).__name__ for layer in weights.modules()})
    of_model = {
        "model": plan.model.name,
        "pretrained": plan.model.weights,
        "weights": weights_digest(weights),
        "config": config_digest([compat.architecture(plan.model.name, plan.model.cache_dir), layers]),
        "preprocess": str(built.preprocess_val),
    }
    built.model.eval()
    parts = built.model, built.preprocess_val, built.tokenizer, built.device, plan.step.precision
    encoder = Encoder(*parts, batch_size=plan.loading.batch_size, workers=plan.loading.workers)
    write_embeddings(encoder, source, spec, output, of_model, flag)
    distributed.barrier()
    return EmbeddingStore.open(output, source.num_samples, source.index_digest, **spec.keys)


def _identity(plan: RunPlan, loader: "AnyTrainLoader | RehearsalLoader", settings: dict[str, object]) -> RunIdentity:
    lora, optimizer = plan.model.lora, plan.optimizer
    # A checkpoint stores the optimizer's state by position, and these patterns determine the order of the parameters.
    excluded = [f"--wd-exclude {glob}" for glob in sorted(optimizer.decay_excluded)]
    return RunIdentity(
        model=plan.model.name,
        loss=plan.loss.name,
        num_samples=loader.num_samples,
        global_batch=plan.loading.batch_size * plan.loading.accum_freq * plan.world_size,
        seed=plan.loading.seed,
        optimizer=" ".join([full_name(optimizer), *optimizer.kwargs, *excluded]),
        data=getattr(loader, "index_digest", loader.source.index_digest),  # with rehearsal, of both data sets
        lora=f"rank {lora.rank}, alpha {lora.scale:g}, targets {lora.targets}" if lora.rank else None,
        settings=settings,
    )


def _pretrained_weights(weights: str | None, start: Start) -> str | None:
    """Return the SHA-256 of the file from which the run started, also if a resumed run's file has changed since."""
    checkpoint = start.checkpoint
    if checkpoint is not None and checkpoint.shared is not None:
        return checkpoint.shared["identity"]["settings"].get("pretrained_weights")
    is_file = checkpoint is None and weights is not None and os.path.isfile(weights)
    return distributed.on_rank0(lambda: checksum(Path(weights)) if is_file and weights else None)


def _log_settings(
    plan: RunPlan,
    options: dict[str, object],
    start: Start,
    identity: RunIdentity,
    steps_left: int,
    device: torch.device,
    of_reference: str | None,
) -> None:
    """Log the loss's defaults, and warn about settings that are probably a mistake."""
    usual = registry.run_defaults(plan.loss.name, plan.loss.given) | dict(plan.loss.given)
    of_run = {name: plan.flags[name] for name in options if name in plan.flags}
    if defaults := dict(options.items() - usual.items() - of_run.items()):
        logger.info(f"Defaults of the loss in this run: {defaults}.")
    if steps_left <= 0:
        logger.info("Nothing is left to train: the checkpoint is at its last epoch. To continue, raise --epochs.")
    changed = restoring.changed_settings(start.checkpoint, identity)
    warnings = (
        changed and f"The run continues with changed settings: {'; '.join(changed)}.",
        other_batch(plan, identity.global_batch, plan.world_size),
        *doubtful_settings(plan),
        slow_precision(plan, device),
        of_reference,
    )
    for warning in filter(None, warnings):
        logger.warning(warning)


def _log_sizes(
    plan: RunPlan, identity: RunIdentity, model: nn.Module, loss: ContrastiveLoss, steps: int, own: int
) -> None:
    batch, epochs = identity.global_batch, plan.length.epochs
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = sum(loss.state_size()) / 2**20
    similarities = chunk_bytes(loss.views * (batch // plan.world_size), loss.views * batch) / 2**20
    logger.debug(f"Model:\n{model}")
    logger.info(f"Model {identity.model}: {parameters / 1e6:.1f} M parameters")
    general = f" and {identity.num_samples - own} general pairs" if identity.num_samples > own else ""
    logger.info(f"Data: {own} samples{general}, {steps} steps of {batch} per epoch, {epochs} epochs")
    logger.info(f"Loss {identity.loss}: state {state:.1f} MiB per rank, similarities {similarities:.1f} MiB per step")


def _begin_folder(
    plan: RunPlan, folder: Path, position: Position, start: Start, settings: run_folder.Settings | None
) -> None:
    """Remove files and log entries that were written after the run's position. Write the run's settings, if any.

    Raise UsageError if a file cannot be written. This file then stays unchanged.
    """
    checkpoints = folder / "checkpoints"
    try:
        restoring.cut_logs(folder, position)
        if settings is not None:
            run_folder.write_settings(folder, settings)
            models.write_model_config(plan.model, folder)
            (folder / MIX_SCORES_FILE).unlink(missing_ok=True)  # of an earlier end of the run
        if start.checkpoint is None:
            (folder / run_folder.SAVED).unlink(missing_ok=True)
        for unreadable in start.unreadable:
            saving.set_aside(unreadable)
        saving.remove_leftovers(checkpoints)
        if start.checkpoint is not None:
            # The run may have been killed between a save and the removal of older checkpoints.
            saving.remove_older_mid_epoch(checkpoints, kept=start.checkpoint.path)
        if plan.copy_codebase:
            run_folder.copy_codebase(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write to the run folder {folder} ({error}): free disk space, or make the folder writable"
        ) from error
