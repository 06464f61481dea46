"""Read a run folder ``LOGS/NAME/`` without the training program."""

import json
from pathlib import Path
from typing import Any

import torch

from openclip_ext.checkpoint.format import MIX_SCORES_FILE
from openclip_ext.cli.errors import UsageError
from openclip_ext.files.schema import checked_dict


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's resolved configuration: ``flags``, ``loss``, ``steps``, ``world_size`` and ``versions``.

    Raise UsageError if ``config.json`` is missing or not a configuration.
    """
    path = folder / "config.json"
    try:
        content = checked_dict(json.loads(path.read_text()), "it")
        resolved = checked_dict(content.get("resolved"), "resolved")
        for name in ("flags", "loss"):
            checked_dict(resolved.get(name), name)
        return resolved | {"versions": content.get("versions", {})}
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} has no config.json: expected the folder LOGS/NAME of a training run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a run's configuration: {error}") from error


def chosen_mix(folder: Path) -> dict[str, float]:
    """Return the mix that a fine-tuning chose: its ``α``, the share of the trained weights, and its score for each task.

    Empty if the run has not chosen one. Raise UsageError if the file is corrupt.
    """
    path = folder / MIX_SCORES_FILE
    try:
        content = checked_dict(json.loads(path.read_text()), "it")
        weight = f"{content['chosen']:g}"
        return {"α": content["chosen"]} | {name: found[weight]["value"] for name, found in content["scores"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} has no scores of mixes: {error!r}. Remove the file") from error


def label_of(checkpoint: Path) -> str:
    """Return a checkpoint's stem. Training overwrites best and epoch_latest, so their label is ``epoch_K[_step_S]``."""
    if checkpoint.stem in ("best", "epoch_latest"):
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        if "epoch" in content:
            return f"epoch_{content['epoch']}" + (f"_step_{content['step']}" if "step" in content else "")
    return checkpoint.stem
