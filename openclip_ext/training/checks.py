"""Check a configuration before anything is built or written."""

import argparse
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import open_clip
import torch

from openclip_ext import compat, distributed
from openclip_ext.checkpoint.finding import checkpoint_file
from openclip_ext.checkpoint.format import MIX_FILE, MIX_SCORES_FILE
from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import nearest
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.loader.build import check_csv, refuse_unusable_rows, table_source, with_own_columns
from openclip_ext.data.processes import check_main_program
from openclip_ext.data.reference import ABOUT, START
from openclip_ext.data.shards.shardlist import expand_components
from openclip_ext.data.sources.keys import parse_keys
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.storage import is_local, local_path
from openclip_ext.training import parallel, recipes
from openclip_ext.training.config import EvaluationConfig, ModelConfig, RunPlan
from openclip_ext.training.optimizer import check_optimizer, full_name

# Above this learning rate, AdamW destroys pretrained weights within a few steps.
_HIGHEST_FINE_TUNING_LR = 1e-3
# With bfloat16 weights, ten AdamW steps of demo-vit change 95 % of the weights at a learning rate of 5e-4, 59 % at 2e-4, 31 %
# at 1e-4 and 0.5 % at 1e-6.
_LOWEST_BFLOAT16_LR = 2e-4


def check(plan: RunPlan) -> None:
    """Raise UsageError for the first mistake in a configuration. The message contains a fix."""
    check_main_program(plan.loading.workers)
    weights, data = plan.model.pretrained, plan.data
    if weights and os.path.isdir(os.path.join(weights, "checkpoints")):
        newest = distributed.on_rank0(lambda: checkpoint_file(Path(weights)))
        has_mix = os.path.isfile(os.path.join(weights, MIX_SCORES_FILE))
        other = f", or {os.path.join(weights, MIX_FILE)}, the mix that the run chose" if has_mix else ""
        raise UsageError(
            f"--pretrained {weights} is a run folder: expected a file of weights. Give --pretrained {newest}{other}"
        )
    if weights and os.path.isdir(weights):
        raise UsageError(
            f"--pretrained {weights} is a folder: expected a file of weights, such as {weights}/epoch_32.pt. If the folder "
            f"has an open_clip_config.json, use --model local-dir:{weights}"
        )
    if weights and os.path.isfile(weights):
        distributed.on_rank0(lambda: checkpoint_file(Path(weights)))
    _check_model(plan.model)
    _check_pixels(plan.model)
    _check_evaluation(plan.evaluation)
    if plan.model.image_features is not None and plan.loading.views > 1:
        raise UsageError("--image-features does not work with --views, which needs pixels. Remove one of the two flags")
    if data is not None:
        _check_embeddings(plan, data)
    if plan.parallel.static_graph and plan.length.accum_freq > 1:  # --global-batch may set --accum-freq
        raise UsageError(
            "--ddp-static-graph does not work with --accum-freq: remove one of them, or raise --batch-size"
        )
    if data is not None:
        check_optimizer(plan.optimizer)
        data.check_type()
    if data is not None and data.resolved_type != "synthetic":
        parse_keys(data.image_key, allow_json=False)
        parse_keys(data.caption_key, allow_json=True)
        if data.hard_negative_key is not None and data.resolved_type == "webdataset":
            parse_keys(data.hard_negative_key, allow_json=True)
        if data.manifest is not None and not os.path.isfile(data.manifest):
            raise UsageError(f"--manifest {data.manifest} not found. Remove the flag to find or create a manifest")
        files = _local_files(data)
        if files and not any(map(os.path.isfile, files)):  # if only some files are missing, their samples count as bad
            raise UsageError(f"--train-data: none of the {len(files)} files exists, the first is {files[0]}")
        _check_table("--train-data", data)
        if plan.keep.source is not None:
            _check_other_data("--keep-data", plan.keep.spec(data))
            plan.keep.shared(plan.loading.batch_size)
    if "wandb" in plan.reporting.destinations and importlib.util.find_spec("wandb") is None:
        raise UsageError("--report-to wandb needs the package wandb: pip install wandb")
    if plan.model.lora.rank is not None and importlib.util.find_spec("peft") is None:
        raise UsageError("--lora-rank needs the package peft: pip install 'peft>=0.21'")


def _check_embeddings(plan: RunPlan, data: DataSpec) -> None:
    """Raise UsageError if the embeddings that the run needs first cannot be written."""
    features = plan.model.image_features
    if plan.dry_run and features is not None and not (Path(features) / ABOUT).is_file():
        raise UsageError(
            f"--dry-run writes nothing, but --image-features {features} is not written yet: remove one flag"
        )
    if data.reference != START:
        return
    if not plan.model.weights:
        raise UsageError("--reference start needs a pretrained model: give --pretrained")
    if plan.saving.folder is None:
        flag = "--dry-run" if plan.dry_run else "--logs none"
        raise UsageError(f"--reference start writes embeddings into the run folder: remove {flag}")


def other_batch(plan: RunPlan, global_batch: int, world_size: int) -> str | None:
    """Return a warning if a run's global batch size differs from its recipe's, else None."""
    name = plan.flags["recipe"]
    wanted = global_batch if name is None else recipes.get(name, plan.loss.name).global_batch
    if wanted == global_batch:
        return None
    fix = f"give --batch-size {wanted / (world_size * plan.loading.accum_freq):g}"
    return f"--recipe {name} is for a global batch of {wanted:,}, but this run has {global_batch:,}: {fix}"


def slow_precision(plan: RunPlan, device: torch.device) -> str | None:
    """Return a warning if the run has 16-bit precision on a CPU, else None. OpenCLIP's default is ``amp`` on all devices."""
    precision = plan.step.precision
    if device.type != "cpu" or precision == "fp32":
        return None
    return f"--precision {precision} is slow on many CPUs: --precision fp32 may be much faster."


def doubtful_settings(plan: RunPlan) -> Iterator[str]:
    """Yield a warning for each setting of a training run that is legal, but probably a mistake."""
    model, optimizer, precision = plan.model, plan.optimizer, plan.step.precision
    rate = max(filter(None, (optimizer.lr, optimizer.lr_image, optimizer.lr_text)))
    is_bfloat16, adapts = precision in ("bf16", "pure_bf16"), model.lora.rank is not None  # adapters are in float32
    if rate < _LOWEST_BFLOAT16_LR and is_bfloat16 and not adapts:
        fix = f"use --precision amp_bf16, or --lr {_LOWEST_BFLOAT16_LR:g} or more"
        yield f"--precision {precision}: bfloat16 weights round most updates at --lr {rate:g} to zero; {fix}"
    if rate > _HIGHEST_FINE_TUNING_LR and model.weights and optimizer.name == "adamw" and not adapts:
        yield (
            f"--lr {rate:g} destroys pretrained weights: a tenth to a hundredth of pretraining's 5e-4 is usual, such as "
            "--lr 1e-5"
        )
    has_images, has_texts = bool(model.weights or model.pretrained_image), bool(model.weights)
    if model.lock_text and not has_texts:
        # OpenCLIP loads the weights of a text tower from Hugging Face.
        settings = compat.architecture(model.name, model.cache_dir) or {}
        has_texts = "hf_model_name" in settings.get("text_cfg", {})
    frozen = {"--lora-rank": adapts and not has_images, "--lock-image": model.lock_image and not has_images}
    for flag, is_random in (frozen | {"--lock-text": model.lock_text and not has_texts}).items():
        if is_random:
            yield f"{flag} freezes random weights here: add --pretrained"
    evaluation = plan.evaluation
    other_data = {"--val-data": evaluation.val_data, "--val-classes": evaluation.class_data, "--keep-data": plan.keep}
    for flag, spec in other_data.items():
        source = spec.source if spec is not None else ""
        trained = {"the training data": plan.data, "--keep-data": plan.keep if flag != "--keep-data" else None}
        same = [name for name, other in trained.items() if other is not None and source and source == other.source]
        if same:
            yield f"{flag} is {same[0]}: its scores do not show what other data would have. Give held-out data"
    for flag, data, every in (
        ("--val-data", evaluation.val_data, "--val-frequency"),
        ("--val-classes", evaluation.class_data, "--val-frequency"),
        ("--keep-tasks", evaluation.kept_tasks or None, "--val-frequency"),
        ("--imagenet-val", evaluation.imagenet_val or evaluation.imagenet_v2, "--zeroshot-frequency"),
        ("--eval-suite", evaluation.suite, "--eval-frequency"),
    ):
        if data is not None and plan.flags[every[2:].replace("-", "_")] == 0:
            yield f"{flag} is never evaluated, because {every} is 0: give {every} 1, or remove {flag}"


def check_combination(plan: RunPlan, loss: ContrastiveLoss, world_size: int, is_captioner: bool) -> None:
    """Raise UsageError for flags that the loss, the model or the number of processes does not support."""
    assert plan.data is not None
    name, has_head = plan.loss.name, loss.model_head() is not None
    batch = plan.loading.batch_size * plan.loading.accum_freq * world_size
    # Only OpenCLIP's own loss also learns from the captions or the hard negative of a single pair.
    has_other_terms = loss.trains_captions and (plan.data.hard_negative_key is not None or is_captioner)
    if batch < loss.smallest_batch and not has_other_terms:
        raise UsageError(
            f"--loss {name} learns nothing from a global batch of {batch} pair, which has no negatives: raise --batch-size or "
            "--accum-freq"
        )
    if plan.data.resampled and loss.needs_index:
        raise UsageError(f"--dataset-resampled: --loss {name} needs each sample once per epoch. Remove the flag")
    if plan.data.hard_negative_key is not None and not loss.accepts_hard_negatives:
        fix = "use a different --loss"
        if loss.steers:
            fix = "remove --reference or give --no-steer"
        elif plan.loss.options.get("local_loss"):
            fix = "add --gather-with-grad"
        raise UsageError(
            f"--hard-negative-key: --loss {name} with these options uses no hard negatives. Remove the flag, or {fix}"
        )
    if plan.data.hard_negative_key is not None and is_captioner:
        raise UsageError(
            "--hard-negative-key does not support models that generate captions, such as CoCa: remove the flag"
        )
    if plan.model.image_features is not None and is_captioner:
        raise UsageError("--image-features does not support models that generate captions: remove the flag")
    if plan.step.model_ema_decay is not None and has_head:
        raise UsageError(f"--model-ema-decay would not average the projection heads of --loss {name}: remove the flag")
    if plan.saving.best_metric is not None and (plan.saving.folder is None or not plan.evaluation.is_wanted):
        raise UsageError("--keep-best needs --logs, and an evaluation, such as --val-data with --val-frequency 1")
    if (metric := plan.saving.best_metric) is not None:
        from openclip_ext.training.validation import metric_names

        known = metric_names(plan.evaluation, is_captioner)
        if metric not in known:
            raise UsageError(f"--keep-best {metric}: no such metric{nearest(metric, known)}; found: {', '.join(known)}")
    if plan.parallel.fsdp and world_size > 1:
        parallel.check_shardable(full_name(plan.optimizer), plan.step.precision == "amp", has_head)


def _check_model(config: ModelConfig) -> None:
    try:
        compat.check_augmentation(config.aug_cfg)
    except ValueError as error:
        raise UsageError(str(error)) from error
    name, tag = config.file_name, config.pretrained
    if config.is_folder:  # OpenCLIP reports an error if the folder does not exist
        if tag and config.name.startswith("local-dir:") and not config.own_weights:
            raise UsageError(
                f"--pretrained {tag}: OpenCLIP reads the weights of --model {config.name} only from its folder, which has "
                "none. Copy the file there as open_clip_pytorch_model.bin (or .safetensors), and remove --pretrained"
            )
        if tag:
            raise UsageError(f"--pretrained {tag}: --model {config.name} has its own weights. Remove --pretrained")
        return
    known = open_clip.list_models()
    if name not in known:
        raise UsageError(
            f"unknown model --model {config.name}{nearest(name, known)}; known: open_clip.list_models(), or local-dir:FOLDER "
            "with the open_clip_config.json of your own model"
        )
    if not tag or os.path.exists(tag) or open_clip.is_pretrained_cfg(name, tag):
        return
    tags = open_clip.list_pretrained_tags_by_model(name)
    known_tags = f"tags of {name}: {', '.join(tags) or 'none'}"
    raise UsageError(f"--pretrained {tag} is neither a file nor a tag of {name}{nearest(tag, tags)}; {known_tags}")


def _check_pixels(config: ModelConfig) -> None:
    size, deviations = config.force_image_size, config.image_std
    sides = (size,) if isinstance(size, int) else size
    if sides is not None and not (len(sides) in (1, 2) and min(sides) > 0):
        raise UsageError(f"--force-image-size {size}: expected one positive number, or the height and the width")
    for flag, values in (("--image-mean", config.image_mean), ("--image-std", deviations)):
        if values is not None and len(values) != 3:
            raise UsageError(f"{flag} {values}: expected three numbers, for red, green and blue")
    if deviations is not None and min(deviations) <= 0:
        raise UsageError(f"--image-std {deviations}: expected positive numbers")


def check_device(name: str | None) -> None:
    """Raise UsageError if PyTorch does not support a device, or if this machine does not have it. None means the default."""
    try:
        command_line.device(name or "cpu")
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--device {error}") from error


def _check_evaluation(config: EvaluationConfig) -> None:
    for flag, folder in (("--imagenet-val", config.imagenet_val), ("--imagenet-v2", config.imagenet_v2)):
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(f"{flag} {folder} is not a folder: expected an existing folder")
    if config.val_data is not None:
        _check_other_data("--val-data", config.val_data)
    if config.class_data is not None:
        _check_other_data("--val-classes", config.class_data)
    names: dict[str, str] = {}
    for path in config.kept_tasks:
        from openclip_ext.training.validation import kept_task

        try:
            name = kept_task(path).task.name
        except ValueError as error:
            raise UsageError(f"--keep-tasks: {error}") from error
        if name in names:  # one score would replace the other
            raise UsageError(f"--keep-tasks: {names[name]} and {path} have the same name, {name}. Rename one of them")
        names[name] = path


def _check_other_data(flag: str, spec: DataSpec) -> None:
    """Raise UsageError if files of validation data or of ``--keep-data`` are missing, or if a table cannot be used."""
    if flag == "--val-classes":
        from openclip_ext.training.validation import class_task

        try:
            class_task(spec).read()
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from error
        return
    try:
        files = _local_files(spec)
    except ValueError as error:  # the kind of the data is unknown
        raise UsageError(f"{flag}: {error}") from error
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise UsageError(f"{flag}: {len(missing)} of {len(files)} files not found, the first is {missing[0]}")
    _check_table(flag, spec)


def _check_table(flag: str, spec: DataSpec) -> None:
    """Raise UsageError if the header or the first rows of a CSV file or another table cannot be used."""

    def check() -> None:
        read_with = with_own_columns if flag != "--train-data" else lambda spec, read: read(spec)
        if spec.resolved_type == "csv":
            read_with(spec, check_csv)
        elif spec.resolved_type == "table":
            source = read_with(spec, table_source)
            refuse_unusable_rows(source)
            if flag == "--keep-data":
                from openclip_ext.data.loader.rehearsal import split

                split(source)

    try:
        # The first rank also converts a table to files that the other ranks map.
        distributed.on_rank0(check)
    except (ValueError, OSError) as error:
        raise UsageError(f"{flag}: {str(error).removeprefix(f'{flag}: ')}") from error


def _local_files(spec: DataSpec) -> list[str]:
    assert spec.source is not None, "a data set that is not synthetic has a source"
    if spec.resolved_type == "table":
        return []
    if spec.resolved_type == "csv":
        paths = [spec.source] if isinstance(spec.source, str) else spec.source
        return [local_path(path) if is_local(path) else path for path in paths]
    # Only expand the names. Rank 0 later rejects a shard that is given twice, because this needs access to every file.
    return [local_path(url) for urls in expand_components(spec.source) for url in urls if is_local(url)]
