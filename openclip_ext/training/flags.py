"""The command line: OpenCLIP's training flags, and ours.

Ours are parsed first and without abbreviations (OpenCLIP's parser would take ``--loss`` for ``--loss-dist-impl``); all
that is left goes to OpenCLIP's own parser.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import OptionError, as_words, check_flags, nearest
from openclip_ext.files.writing import refuse_url
from openclip_ext.losses import registry
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.training import flag_table, recipes
from openclip_ext.training.config import FLAG_GROUPS, writes_nothing
from openclip_ext.training.help import (
    asks_for_help,
    chosen_loss,
    is_first_process,
    known_flags,
    openclip_flags,
    print_help,
)
from openclip_ext.training.model import LossConfig
from openclip_ext.training.parser import build_parser
from openclip_ext.training.slips import refuse_expanded_pattern, refuse_slips

T = TypeVar("T")
PARTS = ("normalizer", "temperature_scheme", "views")
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)e[+-]?\d+", re.IGNORECASE)
_NAMES_OF_MAIN = {"--text-key": "--caption-key", "--visual-layer-decay": "--image-layer-decay"}


def parse(argv: list[str]) -> tuple[argparse.Namespace, LossConfig]:
    """Parse a training command line: OpenCLIP's and our run flags in one namespace, and the loss with all its options.

    Raises:
        UsageError: flags that nobody knows or that contradict each other, or a flag that the chosen loss does not use.
        SystemExit: ``--help``.
    """
    if argv[:1] == ["--"]:
        # From ``torchrun ... -m openclip_ext.training.main -- --logs DIR``: without it torchrun refuses ``--logs``.
        argv = argv[1:]
    if asks_for_help(argv):
        print_help(argv)
        raise SystemExit(0)
    refuse_slips(argv, known_flags())
    for word in argv:
        if not word.isprintable() and (found := word.encode(errors="backslashreplace").decode()) != word:
            raise UsageError(f"{found!r} is not UTF-8, which logs and checkpoints need: rename the file or folder")
    try:
        return _parse(argv)
    except OptionError as error:
        raise UsageError(error.with_flags()) from error


def _parse(argv: list[str]) -> tuple[argparse.Namespace, LossConfig]:
    name = chosen_loss(argv)
    if name is not None and ":" in name:
        registry.find_method(name)  # its options are flags then
    parser = build_parser(flag_table.of_training())
    _tell_old_spellings(argv)
    argv = list(_with_our_names(argv))
    refuse_contradictions(argv)
    ours, rest = _without_usage(lambda: parser.parse_known_args(argv))
    if ours.recipe is not None:
        # In front of the user's flags, of which argparse takes the last.
        ours, rest = parser.parse_known_args([*_recipe_argv(ours, rest), *argv])
    refuse_shortened(rest, parser)
    args = _without_usage(lambda: compat.parse_openclip_args(rest), [*parser._option_string_actions, *openclip_flags()])
    given = vars(ours)
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    vars(args).update(given)
    reconcile_siglip(args)
    loss = _loss_config(args, options)
    for config in (config for configs in FLAG_GROUPS.values() for config in configs):
        check_flags(config, vars(args))
    _check_together(args)
    return args, loss


def _loss_config(args: argparse.Namespace, given: dict[str, Any]) -> LossConfig:
    """Return the loss with all its options: those given, the run's where OpenCLIP has the flag (``seed``, ...), defaults."""
    registry.check_options(args.loss, **given)
    used = registry.options_used_by(args.loss, **given)
    of_run = {name: getattr(args, name) for name, option in OPTIONS.items() if option.openclip_flag}
    options = used | {name: value for name, value in of_run.items() if name in used} | given
    # ``seed`` and ``epochs`` are the run's as well.
    unused = of_run.keys() - used.keys() - {"seed", "epochs"}
    without_effect = [OPTIONS[name].flag for name in unused if of_run[name] != OPTIONS[name].default]
    return LossConfig(args.loss, options, frozenset(given), tuple(sorted(without_effect)))


def _without_usage(parse: Callable[[], T], known: Sequence[str] = ()) -> T:
    """Turn what argparse finds wrong into an error: the usage that it prints before is a page long."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse()
    except ValueError as error:
        raise UsageError(f"--aug-cfg: expected NAME=VALUE, such as color_jitter_prob=0.8 ({error})") from error
    except SystemExit:
        message = printed.getvalue().rpartition(" error: ")[2].strip()
        unknown = message.partition("unrecognized arguments: ")[2].split()
        refuse_expanded_pattern(unknown)
        hint = nearest(unknown[0].partition("=")[0], known) if unknown else ""
        raise UsageError(f"{message}{hint}; --help lists the flags") from None


def refuse_shortened(argv: Sequence[str], ours: argparse.ArgumentParser) -> None:
    """Raise UsageError for a shortened flag of ours: OpenCLIP's parser would complete ``--los`` to ``--loss-dist-impl``."""
    theirs = openclip_flags()
    for flag in (word.partition("=")[0] for word in argv if len(word) > 2 and word.startswith("--")):
        meant = [other for other in ours._option_string_actions if other.startswith(flag)]
        if meant and flag not in theirs:
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


def _tell_old_spellings(argv: Sequence[str]) -> None:
    """Say for each flag of an option that only ablations set how it is spelled now."""
    words = {word.partition("=")[0] for word in argv}
    for option in (option for option in OPTIONS.values() if option.ablation):
        if words & {option.flag, *as_words(option.flag, False)} and is_first_process():
            print(
                f"note: {option.flag} is spelled --loss-option {option.name}=VALUE now; the old spelling goes with the "
                "next version",
                file=sys.stderr,
            )


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


def _recipe_argv(ours: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the recipe's flags for the loss that the command line names."""
    loss = ours.loss or ("siglip" if "--siglip" in rest else "openclip")
    try:
        recipe = recipes.get(ours.recipe, loss)
    except ValueError as error:
        raise UsageError(str(error)) from error
    views = recipe.loss_options.get("views", 1)
    if getattr(ours, "views", views) != views:
        kind = "images alone" if views == 2 else "images with texts"
        raise UsageError(
            f"recipe {ours.recipe} is for {kind}, not for --views {ours.views}; leave out --recipe, or --views"
        )
    # A part given explicitly brings other options: the recipe's for the part it replaces mean nothing then.
    parts = dict.fromkeys(PARTS) | {"views": recipe.loss_options.get("views")}
    used = registry.options_used_by(loss, **parts | {part: vars(ours)[part] for part in PARTS if part in ours})
    options = {name: value for name, value in recipe.loss_options.items() if name in used}
    return replace(recipe, loss_options=options).argv()


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
