"""Reject typing mistakes and flags of related programs before argparse, whose messages would not contain a fix."""

import re
from collections.abc import Collection, Sequence

# Characters that word processors and web pages insert instead of ' " and -.
_QUOTES, _DASHES = "\u2018\u2019\u201c\u201d\u00ab\u00bb", "\u2010\u2011\u2012\u2013\u2014\u2212"
# Flags of related programs, by program, with the replacement in this program.
_OTHER_PROGRAMS = {
    "fast_clip": {
        "fastclip": "--loss fastclip (v0 to v3: docs/methods/fastclip.md)",
        "multiply-tau": "--loss fastclip (without --multiply-tau: fastclip-v0)",
        "lr-tau-scheduler": "not needed (the loss decides)",
        "fastclip-eps": "--loss-eps",
        "nu-update": "--loss scent, with --kappa instead of --gamma",
        "data-size": "not needed (the manifest counts the samples)",
        "optimizer": "--opt adamw or --opt timm/lamb",
    },
    "AmorLIP": {
        "lambda-lr": "--normalizer-lr",
        "lambda-update-frequency": "--normalizer-updates",
        "update-lambda-every-n-steps": "--fit-every",
        "update-ema-mlps-every-n-steps": "--loss-option target_every=N",
        "model-ema-beta": "--loss-option ema_decay=VALUE",
        "z-beta-max": "--loss-option previous_weight=VALUE",
        "div-reg-coef": "--loss-option l2_log_weight=VALUE",
        "pos-coef": "not needed (the positive pair is part of the mean, as in the paper)",
        "lambda-tolerance": "not needed",
        "adaptive-tau": "--temperature-scheme",
        "kl-div-sym": "not needed",
    },
    "OpenCLIP 2": {
        "norm-gradient-clip": "--grad-clip-norm",
        "openai-pretrained": "--pretrained openai",
        "multigpu": "torchrun --nproc-per-node N",
        "dp": "torchrun --nproc-per-node N",
        "gpu": "--device cuda:N",
        "skip-aggregate": "not needed (the losses gather as in the papers)",
    },
}
_OURS = {flag: (program, ours) for program, flags in _OTHER_PROGRAMS.items() for flag, ours in flags.items()}


def refuse_slips(argv: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError for the first word with a typing mistake. ``known`` contains all flags of the program."""
    if argv[:1] == ["help"]:
        raise ValueError("help: --help lists the flags")
    for word in argv:
        if problem := _slip(word, known):
            raise ValueError(f"{word}: {problem}")


def _slip(word: str, known: Collection[str]) -> str | None:
    if word[:1] in tuple(_DASHES) or (word.startswith("-") and word.lstrip("-")[:1] in tuple(_DASHES)):
        return "this word starts with a typographic dash: type - or --"
    if word[:1] in tuple(_QUOTES) or word[-1:] in tuple(_QUOTES):
        return "this word has typographic quotes: type ' or \""
    if word in ("-help", "-?"):
        return "--help lists the flags"
    flag = word.partition("=")[0]
    if not word.startswith("--") or flag in known:
        return None
    plain = flag[2:].replace("_", "-").lower()
    if plain in _OURS:
        program, ours = _OURS[plain]
        return f"this is a flag of {program}; here: {ours}"
    return f"unknown flag; did you mean --{plain}?" if f"--{plain}" in known else None


def refuse_expanded_pattern(unknown: Sequence[str]) -> None:
    """Raise ValueError if the unknown words are files, because the shell has expanded an unquoted pattern."""
    if unknown and all(re.search(r"\.(tar(\.\w+)?|tgz|csv|tsv)$", word) for word in unknown):
        raise ValueError(
            f"{unknown[0]} and {len(unknown) - 1} more words belong to no flag: the shell has expanded a pattern. Quote it, "
            "such as --train-data 'data/{00000..00331}.tar'"
        )
