"""Parse the command line of a training run. Torch is imported only if necessary: the import takes seconds."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError, check_words
from openclip_ext.cli.messages import without_secrets
from openclip_ext.cli.options import OptionError, check_flags, nearest, with_flags
from openclip_ext.cli.words import refuse_files, refuse_foreign_words
from openclip_ext.files.writing import check_output_path
from openclip_ext.losses.options import OPTIONS, PARTS, REFERENCE_OPTIONS, SUMMARIES, refuse_unknown_loss
from openclip_ext.training import parser as parsing
from openclip_ext.training import recipes
from openclip_ext.training.config import FLAG_GROUPS, Config, FineTuningConfig, reporting_destinations, writes_nothing
from openclip_ext.training.recipes import configurations

_NAMES_OF_MAIN = {"--text-key": "--caption-key", "--visual-layer-decay": "--image-layer-decay"}
# Flags that ``--config FILE`` does not repeat.
_NOT_REPEATED = ("--name", "--logs", "--resume", "--dist-url")


def parse(argv: list[str]) -> Config:
    """Return what a command line asks for. It may have OpenCLIP's flags and ours.

    Raise UsageError for unknown, wrong or contradictory flags, or if there is nothing to do. Raise SystemExit after
    ``--help``.
    """
    if argv[:1] == ["--"]:
        # torchrun rejects ``--logs``, except after ``--``: ``torchrun ... -m openclip_ext.training.main -- --logs DIR``.
        argv = argv[1:]
    if parsing.print_help(argv):
        raise SystemExit(0)
    check_words(argv)
    try:
        config = _parse(_with_config_file(argv))
        for part in itertools.chain(*FLAG_GROUPS.values()):
            check_flags(part, config.flags)
    except OptionError as error:
        raise UsageError(with_flags(str(error), OPTIONS)) from error
    _check_together(argparse.Namespace(**config.flags))
    return config


def _with_config_file(argv: list[str]) -> list[str]:
    """Return the arguments, with those of an earlier run first if ``--config`` names the run's ``config.json``."""
    path = parsing.chosen(argv, "--config")
    if path is None or path in configurations.NAMES or not path.endswith(".json"):
        return argv
    words = configurations.words_of_run(path, {word.partition("=")[0] for word in argv})
    rest = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    rest.add_argument("--config")
    return [*words, *rest.parse_known_args(argv)[1]]


def _repeatable(argv: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that another run can use: without flags of the run's name, folder, checkpoint and network.

    ``known`` has OpenCLIP's flags, which may be abbreviated.
    """
    words: list[str] = []
    values = iter(argv)
    for word in values:
        flag, _, value = word.partition("=")
        meant = [flag] if flag in known else [name for name in known if name.startswith(flag)]
        if not flag.startswith("--") or meant[0:1] == [] or meant[0] not in _NOT_REPEATED:
            words.append(without_secrets(word))
        elif not value:
            next(values, None)
    return tuple(words)


def _parse(argv: list[str]) -> Config:
    """Return the flags of a run, those of its recipe, and the options of its loss."""
    name = parsing.chosen(argv, "--loss")
    if name is not None and (":" in name or (name not in SUMMARIES and "openclip_ext.losses.registry" in sys.modules)):
        from openclip_ext.losses import registry  # imported late: only custom losses need torch here

        registry.find_method(name)
    elif name is not None:
        refuse_unknown_loss(name, SUMMARIES)
    parser = parsing.build_parser()
    refuse_foreign_words(argv, {*parser.flags, *parsing.own_flags()})
    typed = argv
    argv = list(_with_our_names(argv))
    refuse_shortened(argv, parser.flags)
    args = _parsed(parser, argv)
    by_pairs: tuple[str, ...] = ()
    if args.recipe is not None:
        if args.config is not None:
            raise UsageError("--config and --recipe set the same flags: give one of them")
        # The recipe's flags come first: argparse uses the last value of a flag, so the user's flags override the recipe.
        args = _parsed(parser, [*_recipe_argv(args), *argv])
    elif args.config is not None:
        args, by_pairs = _configured(parser, args, argv)
    compat.set_openclip_defaults(args)
    flags = vars(args)
    options = parsing.take_loss_options(flags)
    if args.reference is not None:
        used = options.setdefault("steer", True) or options.get("distill") or options.get("mask_margin") is not None
        if not used:
            raise OptionError("distill", "steer=False: --reference then has no effect without distill= or mask_margin=")
        if options["steer"] and args.keep_data is not None:  # a steered loss masks samples without reference embeddings
            raise UsageError(
                "--keep-data: steering would leave out the general pairs, because they have no reference embeddings. Give "
                "--no-steer with --distill or --mask-margin, or remove --keep-data"
            )
    elif given := sorted(REFERENCE_OPTIONS & options.keys()):
        raise OptionError(given[0], f"{given[0]}=: needs --reference FOLDER, which openclip-ext embed writes")
    return Config(_repeatable(typed, parser.flags), flags, args.loss, options, by_pairs)


def _parsed(parser: parsing.Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags, with ``loss`` set. For an unknown flag, raise UsageError with a similar known flag."""
    try:
        args = parser.parse_args(argv)
    except UsageError as error:
        unknown = str(error).partition("unrecognized arguments: ")[2].split()
        refuse_files(unknown, "--train-data" in argv)
        hint = nearest(unknown[0].partition("=")[0], [*parser.flags, *parsing.own_flags()]) if unknown else ""
        raise UsageError(f"{error}{hint}; --help lists the flags") from None
    except ValueError as error:
        raise UsageError(f"--aug-cfg: expected NAME=VALUE, such as color_jitter_prob=0.8 ({error})") from error
    reconcile_siglip(args)
    return args


def _configured(
    parser: parsing.Parser, args: argparse.Namespace, argv: Sequence[str]
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return the parsed flags with those of ``--config``, and the flags whose values follow the number of pairs."""
    try:
        configuration = configurations.get(args.config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not args.pretrained and ":" not in args.model:
        raise UsageError(f"--config {args.config} starts from a pretrained model: give --pretrained, a tag or a file")
    has_loss = parsing.chosen(argv, "--loss") is not None or args.siglip
    options = parsing.take_loss_options({**vars(args)})
    parts = {name: options[name] for name in (*PARTS, "views") if name in options}
    loss = configuration.loss_argv(args.model, args.pretrained, args.loss if has_loss else None, **parts)
    # argparse keeps existing values of flags that are not given.
    given = parser.parse_args([*argv], argparse.Namespace(**dict.fromkeys(configuration.sized())))
    args = _parsed(parser, [*loss, *configuration.argv(), *argv])
    return args, tuple(name for name in configuration.sized() if getattr(given, name) is None)


def refuse_shortened(argv: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for an abbreviation of one of our flags. OpenCLIP's flags (``known``) may be abbreviated."""
    ours = parsing.own_flags()
    for flag in (word.partition("=")[0] for word in argv if len(word) > 2 and word.startswith("--")):
        meant = [other for other in ours if other.startswith(flag)]
        if meant and flag not in (*known, *ours):
            raise UsageError(f"{flag}: abbreviations are not accepted; write it out: {', '.join(meant)}")


def _with_our_names(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with flag names of OpenCLIP's main branch replaced by our names."""
    words = iter(argv)
    for word in words:
        flag, _, value = word.partition("=")
        if flag == "--torchcompile-strategy":
            strategy = value or next(words, "")
            if strategy not in ("model", "task"):
                raise UsageError(
                    f"--torchcompile-strategy {strategy}: expected model, or task for the model and the loss"
                )
            yield from ["--compile-loss"] * (strategy == "task")
        elif flag == "--json-text-key":
            entries = (value or next(words, "")).split(";")
            yield f"--caption-key={';'.join(f'json:{entry}' for entry in entries)}"
        else:
            yield _NAMES_OF_MAIN.get(flag, flag) + word[len(flag) :]


def reconcile_siglip(args: argparse.Namespace) -> None:
    """Make ``--siglip`` and ``--loss siglip`` agree if one is given. Raise UsageError if they contradict each other."""
    if args.loss is None:
        args.loss = "siglip" if args.siglip else compat.OPENCLIP_LOSSES[0]
    elif args.siglip and args.loss != "siglip":
        raise UsageError(f"--siglip and --loss {args.loss} contradict each other: give one of them")
    args.siglip = args.loss == "siglip"


def _recipe_argv(args: argparse.Namespace) -> list[str]:
    """Return the flags that ``--recipe`` sets for the loss on the command line."""
    try:
        recipe = recipes.get(args.recipe, args.loss)
    except ValueError as error:
        raise UsageError(str(error)) from error
    options = parsing.take_loss_options({**vars(args)})
    views = recipe.loss_options.get("views", 1)
    if options.get("views", views) != views:
        kind = "images alone" if views == 2 else "images with texts"
        raise UsageError(f"recipe {args.recipe} is for {kind}, not for --views {options['views']}: remove one of them")
    if given := {part: options[part] for part in (*PARTS, "views") if part in options}:
        # The user replaces a part of the loss, so the recipe's options for this part do not apply.
        from openclip_ext.losses import registry  # imported late, because it imports torch

        used = registry.options_used_by(args.loss, **{"views": recipe.loss_options.get("views")} | given)
        kept = {name: value for name, value in recipe.loss_options.items() if name in used}
        recipe = replace(recipe, loss_options=kept)
    others = {name: value for name, value in recipe.loss_options.items() if name not in options}
    return replace(recipe, loss_options=others).argv()


def _check_together(args: argparse.Namespace) -> None:
    """Raise UsageError for a flag, or a combination of flags, that is not supported."""
    saving = ("save_most_recent", "delete_previous_checkpoint", "copy_codebase", "remote_sync")
    written = [f"--{name.replace('_', '-')}" for name in saving if getattr(args, name)]
    if args.save_every_steps and args.recipe is None:  # with a recipe, the value may be the recipe's, not the user's
        written.append("--save-every-steps")
    if args.resume == "latest":
        written.append("--resume latest")
    check_output_path(args.logs, f"Use a local --logs; --remote-sync {args.logs} copies the run folder there")
    check_output_path(args.cache_dir, "Use a local folder for --cache-dir")
    name, resume, lr, opt, cooldown = args.name, args.resume, args.lr, args.opt.lower(), args.epochs_cooldown
    has_cooldown, is_cosine = args.lr_scheduler == "const-cooldown", args.lr_scheduler == "cosine"
    is_synthetic, is_static = args.dataset_type == "synthetic", args.ddp_static_graph
    trains = bool(args.train_data) or is_synthetic
    distills = args.distill_model is not None or args.distill_pretrained is not None
    is_path = name is not None and (os.path.isabs(name) or os.pardir in Path(name).parts or not Path(name).parts)
    reporting_destinations(args.report_to)
    evaluated = ("val_data", "val_classes", "keep_data", "keep_tasks", "imagenet_val", "imagenet_v2", "eval_suite")
    measures_kept = args.keep_data or args.keep_tasks
    is_misspelled = resume in ("last", "auto", "true", "True", "newest") and not os.path.exists(resume)
    refused: dict[str, Any] = {
        "nothing to do: give --train-data, or evaluate with --val-data, --val-classes, --keep-tasks, --imagenet-val or "
        "--eval-suite": not trains and not any(getattr(args, name) for name in evaluated),
        "--horovod is not supported: start with torchrun": args.horovod,
        "--use-bnb-linear is not supported: bitsandbytes no longer has such layers": args.use_bnb_linear,
        "--distill-model: give --reference FOLDER --distill WEIGHT; openclip-ext embed writes the folder": distills,
        f"--opt {args.opt}: expected adamw, lamb or timm/NAME": not (
            opt in ("adamw", "lamb") or opt.startswith("timm/")
        ),
        f"--opt {args.opt} needs both --beta1 and --beta2, or neither": (args.beta1 is None) != (args.beta2 is None),
        "--lock-image-freeze-bn-stats needs --lock-image": args.lock_image_freeze_bn_stats and not args.lock_image,
        "--lookahead-steps needs --opt timm/lookahead_NAME": args.lookahead_steps and "lookahead" not in opt,
        f"--opt {args.opt} needs --lr: OpenCLIP has a default only for its own AdamW": lr is None,
        f"{written and written[0]} needs a run folder: remove --logs none": writes_nothing(args.logs) and written,
        f"--dataset-type synthetic reads no files: remove --val-data {args.val_data}": is_synthetic and args.val_data,
        "--keep-data does not work with --single-source-batches: remove one": args.keep_data
        and args.single_source_batches,
        "--keep-data does not work with --hard-negative-key: remove one": args.keep_data and args.hard_negative_key,
        "--keep-at-least needs --keep-data or --keep-tasks, which measure what is kept": not measures_kept
        and args.keep_at_least != FineTuningConfig.keep_at_least,
        "--image-features needs all of the image tower locked: remove --lock-image-unlocked-groups": args.image_features
        and args.lock_image_unlocked_groups,
        "--image-features has no pixels to mirror: remove --caption-aware-flip": args.image_features
        and args.caption_aware_flip,
        "--image-features does not work with --keep-data: remove one": args.image_features and args.keep_data,
        "--trace is for evaluation only: remove it to train": args.trace and trains,
        "--torchscript cannot train: remove it, or use --torchcompile for speed": args.torchscript and trains,
        f"--name {name} is a path: expected a name. --logs sets the folder": is_path,
        f"--resume {resume} does not exist; did you mean --resume latest?": is_misspelled,
        f"--lr {lr} is too high for AdamW: expected at most 1; 5e-4 is usual": lr and args.opt == "adamw" and lr > 1,
        f"--resume {resume} is a URL: copy the checkpoint and its .state folder here": "://" in (resume or ""),
        "--resume latest needs --name: otherwise each launch has a new folder": resume == "latest" and name is None,
        "--epochs-cooldown and --lr-scheduler const-cooldown need each other": (cooldown is not None) != has_cooldown,
        "--lr-min needs --lr-scheduler cosine": args.lr_min and not is_cosine,
        f"--lr-min {args.lr_min}: expected at most --lr {lr}": args.lr_min and lr and args.lr_min > lr,
        f"--epochs-cooldown is {cooldown}, more than --epochs {args.epochs}": (cooldown or 0) > args.epochs,
        "--model-ema-decay does not work with --fsdp: remove one of them": args.model_ema_decay is not None
        and args.fsdp,
        "--ddp-static-graph does not work with --fsdp: remove one of them": is_static and args.fsdp,
    }
    if args.lora_rank is not None:
        towers = ("image", "text") if args.lora_targets == "both" else (args.lora_targets,)
        frozen = ("lock_image_unlocked_groups", "lock_text_unlocked_layers")
        for name in ("fsdp", *frozen, *(f"lock_{tower}" for tower in towers)):
            flag = f"--{name.replace('_', '-')}"
            adapted = f" --lora-targets {args.lora_targets}" if name in ("lock_image", "lock_text") else ""
            refused[f"{flag} does not work with --lora-rank{adapted}: remove {flag}"] = getattr(args, name)
        refused["--lora-rank is for training: remove it to evaluate (checkpoints contain merged weights)"] = not trains
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise UsageError(reason)
