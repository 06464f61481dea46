"""Find words on a command line that cannot be meant: words of other programs, and characters of word processors."""

import itertools
import re
from collections.abc import Collection, Sequence

# Characters that word processors and web pages insert instead of ' " and -.
_QUOTES, _DASHES = "\u2018\u2019\u201c\u201d\u00ab\u00bb", "\u2010\u2011\u2012\u2013\u2014\u2212"
_FREE_TEXT = ("--wandb-notes",)  # flags whose values may contain anything, also nothing
_LAUNCHER = "torchrun --nproc-per-node N -m openclip_ext.training.main -- ..."
# Frequent words of transformers, Lightning, other trainers of CLIP, and older versions of OpenCLIP, with ours.
_FLAGS = {
    "--gpus": _LAUNCHER,
    "--gpu": "--device cuda:N",
    "--world-size": _LAUNCHER,
    "--nproc-per-node": _LAUNCHER,
    "--data": "--train-data",
    "--train-file": "--train-data",
    "--dataset-name": "--train-data, with local files",
    "--learning-rate": "--lr",
    "--weight-decay": "--wd",
    "--optimizer": "--opt adamw or --opt timm/NAME",
    "--num-train-epochs": "--epochs",
    "--per-device-train-batch-size": "--batch-size",
    "--warmup-steps": "--warmup",
    "--output-dir": "--logs FOLDER --name NAME",
    "--wandb": "--report-to wandb",
    "--checkpoint": "--pretrained FILE, or --resume latest",
    "--norm-gradient-clip": "--grad-clip-norm",
    "--fastclip": "--loss fastclip",
    "--data-size": "no flag: the manifest counts the samples",
}
COMMANDS = {
    "finetune": "train --config finetune --pretrained TAG_OR_FILE",
    "fine-tune": "train --config finetune --pretrained TAG_OR_FILE",
    "eval": "evaluate",
    "test": "evaluate",
    "plot": "report",
    "resume": "train --resume latest --name NAME",
}
LOSSES = {"clip": "openclip", "infonce": "openclip", "cliploss": "openclip", "sigmoid": "siglip"}


def refuse_foreign_words(argv: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError for the first word of another program or word processor. ``known`` contains all our flags."""
    if argv[:1] == ["help"]:
        raise ValueError("help: --help lists the flags")
    for before, word in itertools.pairwise(["", *argv]):
        if before not in _FREE_TEXT and (problem := _problem(word, known)):
            raise ValueError(f"{word}: {problem}")


def _problem(word: str, known: Collection[str]) -> str | None:
    if word[:1] in tuple(_DASHES) or (word.startswith("-") and word.lstrip("-")[:1] in tuple(_DASHES)):
        return "this word starts with a typographic dash: type - or --"
    if word[:1] in tuple(_QUOTES) or word[-1:] in tuple(_QUOTES):
        return "this word has typographic quotes: type ' or \""
    if word in ("-help", "-?"):
        return "--help lists the flags"
    flag = word.partition("=")[0]
    if not word.startswith("--") or flag in known:
        return None
    plain = flag.replace("_", "-").lower()
    if plain in _FLAGS and plain not in known:
        return f"unknown flag; here: {_FLAGS[plain]}"
    return f"unknown flag; did you mean {plain}?" if plain in known else None


def may_be_empty(flag: str) -> bool:
    """Return whether the value of a flag may be an empty text."""
    return flag in _FREE_TEXT


def refuse_files(unknown: Sequence[str], has_data: bool) -> None:
    """Raise ValueError if the words that belong to no flag are files of data."""
    if not unknown or not all(re.search(r"\.(tar(\.\w+)?|tgz|csv|tsv|parquet)$", word) for word in unknown):
        return
    found = f"{unknown[0]} and {len(unknown) - 1} more words belong" if unknown[1:] else f"{unknown[0]} belongs"
    if has_data:
        raise ValueError(
            f"{found} to no flag: --train-data takes one word. Quote a pattern, such as "
            "'data/{00000..00331}.tar', and join sources with ::"
        )
    raise ValueError(f"{found} to no flag: give the data with --train-data, and quote a pattern")
