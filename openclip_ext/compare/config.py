"""Read the command line of ``openclip-ext compare``."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import cli_field, from_flags, option_as_words, own_options
from openclip_ext.compare import space
from openclip_ext.compare.space import BASELINE
from openclip_ext.data.processes import available_cores
from openclip_ext.files.writing import check_output_path
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS, REFERENCE_OPTIONS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import flags
from openclip_ext.training.checks import check, check_device
from openclip_ext.training.config import RunPlan
from openclip_ext.training.parser import add_flag, add_loss_flags, chosen, import_losses, take_loss_options
from openclip_ext.training.plan import resolve

# Python names of the training flags that compare accepts with the same meaning. It rejects other training flags.
_USED_FLAGS = """
    model pretrained pretrained_image precision force_quick_gelu force_custom_text force_patch_dropout
    force_image_size force_context_length image_mean image_std image_interpolation image_resize_mode aug_cfg cache_dir
    lock_image lock_image_unlocked_groups lock_image_freeze_bn_stats lock_text lock_text_unlocked_layers
    lock_text_freeze_layer_norm grad_checkpointing dataset_type csv_separator csv_img_key csv_caption_key
    image_key caption_key manifest reference max_bad_fraction max_image_pixels caption_aware_flip
    batch_size accum_freq workers epochs opt lr wd beta1 beta2 eps momentum lookahead_steps
    lr_scheduler lr_min warmup epochs_cooldown lr_cooldown_power lr_cooldown_end grad_clip_norm max_skipped_steps device
"""


@dataclass(frozen=True)
class CompareConfig:
    """Arguments of ``openclip-ext compare``. ``training`` contains the training flags that the user gave."""

    shards: str
    losses: tuple[str, ...]
    loss_options: Mapping[str, Any]
    training: tuple[str, ...]
    val: str | None = cli_field(None, "validation data, in the same form as SHARDS (default: a tenth of SHARDS)")
    classes: str | None = cli_field(
        None, "file with one class name per line; a sample's file .cls contains the line number of its class, from 0"
    )
    minutes: float = cli_field(30.0, "maximum duration of this call in minutes", exclusive_minimum=0)
    output: str = cli_field("compare", "folder of the results")
    processes: int = cli_field(
        0, "number of parallel runs; 0 means one per GPU, or one per core without a GPU", minimum=0
    )
    cache: float = cli_field(8.0, "maximum size of the decoded images on disk in GiB", exclusive_minimum=0)

    @property
    def folder(self) -> Path:
        return Path(self.output)


def parse(argv: list[str]) -> tuple[CompareConfig, RunPlan]:
    add_model_configs()
    import_losses(argv, "--losses")
    parser = _parser()
    args, training = parser.parse_known_args(argv)
    # This parser has no ``--model``, so in ``--model ViT-B-32 SHARDS`` it takes ViT-B-32 for SHARDS. Reject this order.
    _, unknown = parser.parse_known_args([*argv[: argv.index(args.shards)], args.shards])
    if unknown:
        raise UsageError(f"{unknown[0]} before SHARDS: give SHARDS first, then the training flags")
    if args.loss is not None:
        raise UsageError("--loss selects one loss: use --losses to compare several")
    check_output_path(args.output)
    options = take_loss_options(vars(args))
    # The parser of training sets --steer, and checks these options together with --reference.
    about_reference = [option_as_words(OPTIONS[name], options[name]) for name in REFERENCE_OPTIONS & options.keys()]
    found = _training_config(args.shards, [*training, *itertools.chain(*about_reference)])
    options |= found.loss.given
    losses = sorted((loss.strip() for loss in args.losses.split(",")), key=lambda loss: loss != BASELINE)
    config = from_flags(
        CompareConfig,
        vars(args),
        shards=args.shards,
        losses=tuple(dict.fromkeys(losses)),
        loss_options=options,
        training=tuple(training),
        processes=args.processes or _parallel_runs(torch.device(found.device or "cpu")),
    )
    _check(config.losses, options)
    return config, found


def _parallel_runs(device: torch.device) -> int:
    """Return the default of ``--processes``."""
    if device.type == "cpu":
        return available_cores()
    return torch.cuda.device_count() if device.index is None else 1


# Learning rate of --config finetune. The default of --lr is for training from scratch.
_FINE_TUNING_LR = "1e-5"


def _training_config(shards: str, argv: Sequence[str]) -> RunPlan:
    """Return the configuration of the training runs; raise UsageError for flags that compare does not accept."""
    if chosen([*argv], "--recipe") is not None:
        raise UsageError(
            "--recipe is for one loss and a paper's run length, but compare tunes each loss; remove the flag"
        )
    if chosen([*argv], "--pretrained") is not None and chosen([*argv], "--lr") is None:
        argv = ["--lr", _FINE_TUNING_LR, *argv]
    typed, defaults = (flags.parse(["--train-data", shards, *given]) for given in (argv, ()))
    for name, value in typed.flags.items():
        if name not in _USED_FLAGS.split() and value != defaults.flags[name]:
            raise UsageError(f"--{name.replace('_', '-')} has no effect on compare; remove it")
    training = resolve(typed)
    if training.loading.batch_size < 2:  # a run would also refuse it, but only after the data are decoded and embedded
        raise UsageError(f"--batch-size {training.loading.batch_size}: expected at least 2")
    check_device(training.device)
    device = torch.device(training.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    training = replace(training, device=str(device))
    check(training)
    if device.type == "cpu":
        training = replace(training, loading=replace(training.loading, workers=0))
    return training


def _check(losses: Sequence[str], options: Mapping[str, Any]) -> None:
    if BASELINE not in losses or len(losses) < 2:
        raise UsageError(f"--losses {','.join(losses)}: expected {BASELINE} and at least one other loss")
    for name in options:
        if name in ("normalizer", *space.SEARCHED_OPTIONS):
            reason = (
                "would replace the part in which the losses differ" if name == "normalizer" else "is tuned by compare"
            )
            raise UsageError(f"{OPTIONS[name].flag} {reason}; remove it")
    used: set[str] = set()
    refusals: list[str] = []
    for name in losses:
        settings, refused = space.settings(name, options)
        used |= {option for setting in settings for option in setting}
        refusals += refused
        if registry.check_options(name, **settings[0]).views > 1:
            raise UsageError(
                f"--losses: {name} compares two views of an image, which retrieval cannot score; remove {name}"
            )
    unused = [OPTIONS[name].flag for name in options if name not in used]
    if unused:
        raise UsageError(f"{unused[0]}: {[*refusals, 'not used by any of --losses ' + ','.join(losses)][0]}")


def _parser() -> argparse.ArgumentParser:
    description = "Find the best loss for your data, model and batch size. Also accepts the flags of training."
    parser = command_line.Parser(prog="openclip-ext compare", allow_abbrev=False, description=description)
    parser.add_argument("shards", metavar="SHARDS", help="training data, as in --train-data")
    default = ",".join(space.DEFAULT_LOSSES)
    parser.add_argument("--losses", default=default, help=f"losses, separated by commas (default: {default})")
    for option in own_options([CompareConfig]):
        add_flag(parser, option, default=option.default)
    group = parser.add_argument_group("options of the losses; each applies to all losses that use it")
    add_loss_flags(group, hidden={"loss", "normalizer", "views", *space.SEARCHED_OPTIONS})
    return parser
