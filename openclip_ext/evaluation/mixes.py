"""Mixes of a fine-tuned model with the weights from which its run started, to evaluate or export them."""

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from openclip_ext import compat
from openclip_ext.checkpoint.format import MIX_FILE, MIX_SCORES_FILE, checksum, load_model_file
from openclip_ext.cli.command_line import without_warnings
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.models import OpenedModel, config_of_run, open_model, options_of_run
from openclip_ext.losses.heads import stored_heads

# Key in a model file for the weight of the trained weights.
WEIGHT_KEY = "interpolate"


def share(text: str) -> float:
    """Parse a weight α of the trained weights."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1")


def shares(text: str) -> list[float]:
    """Parse weights α that are separated by commas."""
    return [share(part) for part in text.split(",")]


def chosen_mix(checkpoint: Path, command: str) -> str:
    """Return a sentence with the command for the mix that the run of a trained model chose; empty if it has not chosen one."""
    folder = checkpoint.absolute().parent.parent
    chosen = checkpoint.with_name(Path(MIX_FILE).name)
    # Without the scores, the run was continued after its choice, so the mix is of an earlier epoch.
    if not chosen.is_file() or chosen == checkpoint or not (folder / MIX_SCORES_FILE).is_file():
        return ""
    command = f"openclip-ext {command} {shlex.quote(str(chosen))}"
    return f"This is the trained model. The run chose a mix with the weights before training: {command}"


def mixed(initial: Mapping[str, Tensor], trained: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Return ``(1 − weight) · initial + weight · trained``: parameters and BatchNorm statistics, float32 on the host.

    Tensors of integers are those of ``trained``. For adapters that are merged into ``trained``, ``weight`` multiplies the
    adapters.
    """
    return {
        name: torch.lerp(initial[name].float(), value.cpu().float(), weight) if value.is_floating_point() else value
        for name, value in trained.items()
    }


def refuse_other_weights(pretrained: str | None, expected: str | None) -> None:
    """Raise UsageError if a run's file of initial weights does not have the SHA-256 that the run has stored, if any."""
    if expected is not None and pretrained is not None and checksum(Path(pretrained)) != expected:
        raise UsageError(
            f"{pretrained} has changed since the run started from it, so a mix would be wrong. Restore the file"
        )


def mixes(opened: OpenedModel, weights: Sequence[float]) -> Iterator[OpenedModel]:
    """Yield the model with the weights (1 − α) · initial + α · trained, for each α (WiSE-FT, Wortsman et al. 2022).

    Every model is the same module, whose weights the next one replaces. The initial weights are those of ``--pretrained`` of
    the run that wrote the checkpoint.

    Raises:
        UsageError: The run did not start from pretrained weights, or the checkpoint is a mix already or has projection heads.
    """
    path = Path(opened.checkpoint)
    config = config_of_run(path)
    flags = config.get("flags", {})
    if not flags.get("pretrained") and not flags.get("model", "").startswith(("local-dir:", "hf-hub:")):
        raise UsageError("--interpolate: the run did not start from --pretrained weights. Remove the flag")
    if (chosen := load_model_file(path, mmap=True).get(WEIGHT_KEY)) is not None:
        raise UsageError(f"--interpolate: {path.name} is a mix of weights already (α = {chosen:g}). Remove the flag")
    if stored_heads(path) is not None:
        raise UsageError(f"--interpolate: {path.name} has projection heads, which do not mix. Remove the flag")
    pretrained = flags.get("pretrained") or None
    try:
        with without_warnings():
            start = open_model(pretrained, flags["model"], heads=False, **options_of_run(str(path)))
    except ValueError as error:  # paths in the run's flags are relative to the folder in which it was started
        raise UsageError(
            f"--interpolate needs the run's initial weights, {pretrained or flags['model']}. If their path is relative, start "
            f"the command in the folder in which the run was started ({error})"
        ) from error
    start_file = pretrained or compat.hub_weights(flags["model"], flags.get("cache_dir"))
    refuse_other_weights(start_file, config.get("pretrained_weights"))
    initial = start.model.state_dict()
    trained = {name: value.cpu().clone() for name, value in opened.model.state_dict().items()}
    for weight in weights:
        opened.model.load_state_dict(mixed(initial, trained, weight))
        yield replace(opened)  # a new object, because the digest of the weights is cached
