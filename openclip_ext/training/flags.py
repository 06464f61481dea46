"""From a command line to the configuration of a training. Nothing here imports torch, so a mistake is told at once."""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import OptionError, check_flags, nearest, with_flags
from openclip_ext.files.writing import refuse_url
from openclip_ext.losses.options import OPTIONS, REFERENCE_OPTIONS, SUMMARIES, refuse_unknown_loss
from openclip_ext.training import recipes
from openclip_ext.training.config import FLAG_GROUPS, LossConfig, TrainingConfig, training_config, writes_nothing
from openclip_ext.training.help import asks_for_help, chosen_loss, print_help
from openclip_ext.training.parser import Parser, build_parser, own_flags, take_loss_options
from openclip_ext.training.slips import refuse_expanded_pattern, refuse_slips

PARTS = ("normalizer", "temperature_scheme", "views")
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)e[+-]?\d+", re.IGNORECASE)
_NAMES_OF_MAIN = {"--text-key": "--caption-key", "--visual-layer-decay": "--image-layer-decay"}
_NOTHING_TO_DO = "nothing to do: give --train-data to train, or --val-data, --imagenet-val or --eval-suite to evaluate"


def parse(argv: list[str]) -> TrainingConfig:
    """Return the configuration that a command line asks for, with OpenCLIP's flags and ours.

    Raises:
        UsageError: flags that nobody knows, that are out of range or contradict each other; or nothing to do.
        SystemExit: ``--help``.
    """
    if argv[:1] == ["--"]:
        # From ``torchrun ... -m openclip_ext.training.main -- --logs DIR``: without it torchrun refuses ``--logs``.
        argv = argv[1:]
    if asks_for_help(argv):
        print_help(argv)
        raise SystemExit(0)
    for word in argv:
        if not word.isprintable() and (found := word.encode(errors="backslashreplace").decode()) != word:
            raise UsageError(f"{found!r} is not UTF-8, which logs and checkpoints need: rename the file or folder")
    try:
        flags, loss = _parse(argv)
        for part in itertools.chain(*FLAG_GROUPS.values()):
            check_flags(part, flags)
    except OptionError as error:
        raise UsageError(with_flags(str(error), OPTIONS)) from error
    _check_together(argparse.Namespace(**flags))
    config = training_config(flags, loss)
    if config.data is None and not config.evaluation.is_asked_for:
        raise UsageError(_NOTHING_TO_DO)
    return config


def _parse(argv: list[str]) -> tuple[dict[str, Any], LossConfig]:
    """Return OpenCLIP's and our flags of a run by their Python names, and the loss."""
    name = chosen_loss(argv)
    if name is not None:
        _know_loss(name)
    parser = build_parser()
    refuse_slips(argv, {*parser.flags, *own_flags()})
    argv = list(_with_our_names(argv))
    refuse_contradictions(argv)
    refuse_shortened(argv, parser.flags)
    args = _parsed(parser, argv)
    if args.recipe is not None:
        # In front of the user's flags, of which argparse takes the last.
        args = _parsed(parser, [*_recipe_argv(args), *argv])
    compat.set_openclip_defaults(args)
    reconcile_siglip(args)
    flags = vars(args)
    options = take_loss_options(flags)
    if args.reference is not None:
        options.setdefault("steer", True)
    elif given := sorted(REFERENCE_OPTIONS & options.keys()):
        raise OptionError(given[0], f"{given[0]}=: needs --reference FOLDER, which openclip-ext embed writes")
    return flags, LossConfig(args.loss, options)


def _know_loss(name: str) -> None:
    """Raise OptionError for an unknown loss; make the options of one's own loss flags."""
    if ":" in name or (name not in SUMMARIES and "openclip_ext.losses.registry" in sys.modules):
        from openclip_ext.losses import registry  # imports torch, as one's own loss does

        registry.find_method(name)
    else:
        refuse_unknown_loss(name, SUMMARIES)


def _parsed(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags; raise UsageError, with a known flag that is like an unknown one."""
    try:
        return parser.parse_args(argv)
    except UsageError as error:
        unknown = str(error).partition("unrecognized arguments: ")[2].split()
        refuse_expanded_pattern(unknown)
        hint = nearest(unknown[0].partition("=")[0], [*parser.flags, *own_flags()]) if unknown else ""
        raise UsageError(f"{error}{hint}; --help lists the flags") from None
    except ValueError as error:
        raise UsageError(f"--aug-cfg: expected NAME=VALUE, such as color_jitter_prob=0.8 ({error})") from error


def refuse_shortened(argv: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for a shortened flag of ours; OpenCLIP's, ``known``, may be shortened as there."""
    ours = own_flags()
    for flag in (word.partition("=")[0] for word in argv if len(word) > 2 and word.startswith("--")):
        meant = [other for other in ours if other.startswith(flag)]
        if meant and flag not in (*known, *ours):
            raise UsageError(
                f"{flag} is none of OpenCLIP's flags and the beginning of {', '.join(meant)}: write it out"
            )


def _with_our_names(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with our names for the flags that OpenCLIP's main branch has under another one."""
    words = iter(_with_joined_numbers(argv))
    for word in words:
        flag, _, value = word.partition("=")
        if flag == "--json-text-key":
            entries = (value or next(words, "")).split(";")
            yield f"--caption-key={';'.join(f'json:{entry}' for entry in entries)}"
        else:
            yield _NAMES_OF_MAIN.get(flag, flag) + word[len(flag) :]


def _with_joined_numbers(argv: Sequence[str]) -> list[str]:
    """Return the words with ``--lr -1e-3`` as ``--lr=-1e-3``: argparse takes a negative number with an exponent for a flag."""
    joined: list[str] = []
    for word in argv:
        if _NEGATIVE.fullmatch(word) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def refuse_contradictions(argv: Sequence[str]) -> None:
    """Raise UsageError for two flags of one option, of which argparse would take the last."""
    if {"--rho", "--hard-share"} <= {word.partition("=")[0] for word in argv}:
        raise UsageError("--rho and --hard-share say the same: give one of them")


def reconcile_siglip(args: argparse.Namespace) -> None:
    """Let ``--siglip`` and ``--loss siglip`` say the same."""
    if args.loss is None:
        args.loss = "siglip" if args.siglip else compat.OPENCLIP_LOSSES[0]
    elif args.siglip and args.loss != "siglip":
        raise UsageError(f"--siglip and --loss {args.loss} contradict each other; give one of them")
    args.siglip = args.loss == "siglip"


def _recipe_argv(args: argparse.Namespace) -> list[str]:
    """Return the recipe's flags for the loss that the command line names."""
    loss = args.loss or ("siglip" if args.siglip else "openclip")
    try:
        recipe = recipes.get(args.recipe, loss)
    except ValueError as error:
        raise UsageError(str(error)) from error
    views = recipe.loss_options.get("views", 1)
    if getattr(args, "views", views) != views:
        kind = "images alone" if views == 2 else "images with texts"
        raise UsageError(
            f"recipe {args.recipe} is for {kind}, not for --views {args.views}; leave out --recipe, or --views"
        )
    if given := {part: vars(args)[part] for part in PARTS if part in args}:
        # A part given explicitly brings other options: the recipe's for the part it replaces mean nothing then.
        from openclip_ext.losses import registry  # imports torch

        used = registry.options_used_by(loss, **{"views": recipe.loss_options.get("views")} | given)
        options = {name: value for name, value in recipe.loss_options.items() if name in used}
        recipe = replace(recipe, loss_options=options)
    return recipe.argv()


def _check_lora(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that ``--lora-rank`` does not go together with."""
    if args.lora_rank is None:
        return
    towers = ("image", "text") if args.lora_targets == "both" else (args.lora_targets,)
    reasons = {
        "--fsdp": "it spreads the weights over the processes, and adapters are small",
        "--lock-image-unlocked-groups": "it freezes all weights but its adapters",
        "--lock-text-unlocked-layers": "it freezes all weights but its adapters",
        **{f"--lock-{tower}": f"--lora-targets {args.lora_targets} trains adapters of this tower" for tower in towers},
    }
    for flag, reason in reasons.items():
        if getattr(args, flag[2:].replace("-", "_")):
            raise UsageError(f"{flag} does not work with --lora-rank: {reason}. Leave out one of them")
    if not args.train_data and args.dataset_type != "synthetic":
        raise UsageError(
            "--lora-rank is for training: the files of such a run are plain models. Leave it out to evaluate"
        )


def _check_together(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that are not supported, or right by themselves but not together."""
    nowhere = writes_nothing(args.logs)
    saving = ("save_most_recent", "delete_previous_checkpoint", "copy_codebase", "remote_sync")
    written = [f"--{name.replace('_', '-')}" for name in saving if getattr(args, name)]
    if args.save_every_steps and args.recipe is None:  # a recipe's is no wish
        written.append("--save-every-steps")
    refuse_url(args.logs, f"--logs takes a local one, and --remote-sync {args.logs} copies the run folder there")
    refuse_url(args.cache_dir, "--cache-dir takes a folder of this machine")
    cooldown, ema = args.epochs_cooldown, args.model_ema_decay is not None
    _check_lora(args)
    refused: dict[str, Any] = {
        "--horovod is not supported; start with torchrun instead": args.horovod,
        "--use-bnb-linear is not supported: bitsandbytes no longer has such layers": args.use_bnb_linear,
        "distillation (--distill-model) is not supported; use open_clip_train.main for it": (
            args.distill_model is not None or args.distill_pretrained is not None
        ),
        f"--opt {args.opt} needs --lr: OpenCLIP has a default for its own AdamW only": args.lr is None,
        f"{written and written[0]} needs a folder, and --logs none has none": nowhere and written,
        f"--dataset-type synthetic reads no files, not those of --val-data {args.val_data} either": (
            args.dataset_type == "synthetic" and args.val_data
        ),
        "--trace is for evaluation only; leave it out to train": args.trace and args.train_data,
        "--name is empty: leave it out, or give the run a name": args.name == "",
        f"--name {args.name} is a path: expected a name; --logs says where the run's folder is made": (
            args.name is not None and (os.path.isabs(args.name) or os.pardir in Path(args.name).parts)
        ),
        f"--resume {args.resume} does not exist; did you mean --resume latest?": (
            args.resume in ("last", "auto", "true", "True", "newest") and not os.path.exists(args.resume)
        ),
        f"--lr {args.lr} is too high for AdamW: expected at most 1; 5e-4 is usual": (
            args.lr is not None and args.opt == "adamw" and args.lr > 1
        ),
        f"--resume {args.resume} is no file of this machine: copy the checkpoint and its .state folder, or give --remote-sync "
        "and --resume latest": "://" in (args.resume or ""),
        "--resume latest needs --name: without it every start makes a new run folder": (
            args.resume == "latest" and args.name is None
        ),
        "--epochs-cooldown needs --lr-scheduler const-cooldown, and the other way round": (
            (cooldown is not None) != (args.lr_scheduler == "const-cooldown")
        ),
        "--lr-min is where --lr-scheduler cosine ends, at most at --lr": (
            args.lr_min and (args.lr_scheduler != "cosine" or args.lr_min > args.lr)
        ),
        f"--epochs-cooldown is {cooldown}, more than --epochs {args.epochs}": (cooldown or 0) > args.epochs,
        "--model-ema-decay averages whole weights, which --fsdp does not keep; give one of them": ema and args.fsdp,
        "--ddp-static-graph is for DistributedDataParallel, which --fsdp replaces; give one of them": (
            args.fsdp and args.ddp_static_graph
        ),
        f"--ddp-static-graph and --accum-freq {args.accum_freq}: PyTorch's static graph averages the gradients of each "
        "micro-batch, and accumulation those of the last; give one of them": (
            args.ddp_static_graph and args.accum_freq > 1
        ),
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise UsageError(reason)
