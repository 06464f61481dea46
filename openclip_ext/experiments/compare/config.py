"""The command line of ``openclip-ext compare``."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openclip_ext.experiments.compare import space
from openclip_ext.experiments.compare.space import BASELINE
from openclip_ext.experiments.workers import default_processes
from openclip_ext.losses import registry
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import flag_table, flags
from openclip_ext.training.checks import check
from openclip_ext.training.config import TrainingConfig, training_config
from openclip_ext.training.errors import UsageError
from openclip_ext.training.parser import add_loss_flags

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
_DEFAULT = " (default: %(default)s)"


@dataclass(frozen=True)
class CompareConfig:
    """What ``openclip-ext compare`` was asked; the fields are its flags, but two.

    Attributes:
        loss_options: given for all losses that use them.
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
    loss_options: Mapping[str, Any]
    training: tuple[str, ...]


def parse(argv: list[str]) -> tuple[CompareConfig, TrainingConfig]:
    """Return the comparison and the training's configuration.

    Raises:
        UsageError: flags that mean nothing here.
    """
    add_model_configs()
    parser = _parser()
    args, training = parser.parse_known_args(argv)
    # Of ``--model ViT-B-32 SHARDS`` the parser, which does not know ``--model``, takes the model for SHARDS.
    _, unknown = parser.parse_known_args([*argv[: argv.index(args.shards)], args.shards])
    if unknown:
        raise UsageError(f"{unknown[0]} stands before SHARDS: give SHARDS first, then the flags of training")
    asked = vars(args)
    options = {name: asked.pop(name) for name in OPTIONS if name in asked}
    # The one to beat comes first.
    losses = [loss.strip() for loss in args.losses.split(",")]
    asked["losses"] = tuple(dict.fromkeys(sorted(losses, key=lambda loss: loss != BASELINE)))
    asked["processes"] = args.processes or default_processes()
    _check(args.loss, asked, options)
    del asked["loss"]
    config = CompareConfig(**asked, loss_options=options, training=tuple(training))
    return config, _training_config(args.shards, training)


def _training_config(shards: str, argv: Sequence[str]) -> TrainingConfig:
    """Return what the flags of training say, where they mean the same here."""
    if any(word.split("=")[0] == "--recipe" for word in argv):
        raise UsageError("--recipe has the settings of one loss at the length of a paper's runs; leave it out")
    namespace, choice = flags.parse(["--train-data", shards, *argv])
    defaults, _ = flags.parse(["--train-data", shards])
    for name, value in vars(namespace).items():
        if name not in _USED_FLAGS.split() and value != getattr(defaults, name, None):
            raise UsageError(f"--{name.replace('_', '-')} has no effect on compare; leave it out")
    if namespace.batch_size < 2:
        raise UsageError(f"--batch-size is {namespace.batch_size}, must be at least 2")
    if not 0 < namespace.lr < math.inf:
        raise UsageError(f"--lr is {namespace.lr:g}, must be positive")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = training_config(namespace, choice, device)
    check(training)
    if device.type == "cpu":
        training = replace(training, loading=replace(training.loading, workers=0))
    return training


def _check(loss: str | None, asked: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    losses = asked["losses"]
    if loss is not None:
        raise UsageError("--loss chooses one loss; --losses says which to compare")
    if BASELINE not in losses or len(losses) < 2:
        raise UsageError(
            f"--losses {','.join(losses)}: expected {BASELINE} and at least one other, separated by commas"
        )
    for name in options:
        if name == "normalizer":
            raise UsageError("--normalizer makes one loss of those that are compared; leave it out")
        if name in space.SEARCHED_OPTIONS:
            raise UsageError(f"{OPTIONS[name].flag} has no effect on compare, which searches over it; leave it out")
    used: set[str] = set()
    refusals: list[str] = []
    for name in losses:
        settings, refused = space.settings(name, options)
        used |= {option for setting in settings for option in setting}
        refusals += refused
        if registry.check_options(name, **settings[0]).views > 1:
            raise UsageError(f"--losses: {name} compares two views of an image, and cannot be scored by retrieval")
    unused = [OPTIONS[name].flag for name in options if name not in used]
    if unused:
        raise UsageError(f"{unused[0]}: {[*refusals, 'not used by any of --losses ' + ','.join(losses)][0]}")
    for name in ("minutes", "cache", "anchors"):
        if not asked[name] > 0:
            raise UsageError(f"--{name} is {asked[name]:g}, must be positive")
    if asked["population"] < 2 or asked["processes"] < 0:
        raise UsageError(
            f"--population {asked['population']}, --processes {asked['processes']}: expected at least 2 and 1"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openclip-ext compare",
        allow_abbrev=False,
        description="Which loss brings the most on your data, model and batch size? Takes the flags of training, too.",
    )
    add = parser.add_argument
    add("shards", metavar="SHARDS", help="training data, as --train-data takes them")
    add("--val", metavar="SHARDS", help="validation data (default: a tenth of SHARDS is held out)")
    class_help = "names of classes, one a line; the samples' member cls has the line's number, from 0"
    add("--classes", type=Path, metavar="FILE", help=class_help)
    add("--losses", default=",".join(space.DEFAULT_LOSSES), help=f"separated by commas{_DEFAULT}")
    add("--minutes", type=float, default=30.0, help=f"time for this call{_DEFAULT}")
    add("--output", type=Path, default=Path("compare"), help=f"folder of the results{_DEFAULT}")
    add("--processes", type=int, default=0, help="runs at a time (default: one a GPU, or one a core)")
    add("--cache", type=float, default=8.0, metavar="GIB", help=f"of decoded images, on disk{_DEFAULT}")
    add("--anchors", type=int, default=1000, help=f"whose normalizers are judged{_DEFAULT}")
    add("--population", type=int, default=10_000, help=f"training samples that they are judged by{_DEFAULT}")
    group = parser.add_argument_group("options of the losses, for all that use them")
    add_loss_flags(group, flag_table.of_losses(), hidden={"loss", "normalizer", "views", *space.SEARCHED_OPTIONS})
    return parser
