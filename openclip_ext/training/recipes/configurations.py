"""Configurations: flags for a task, whose values follow the number of image-text pairs (``--config finetune``).

``--config NAME`` inserts the flags before the user's flags, so the user's flags override the configuration. ``NAME.json``
contains the values, and where they come from.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_ext.cli.options import as_words, nearest

NAMES = ("finetune",)


@dataclass(frozen=True)
class Configuration:
    """The flags of a task, by their names without ``--``. ``by_pairs`` has rows with ``up_to`` (pairs) and ``flags``."""

    about: str
    flags: Mapping[str, Any]
    loss: str
    siglip_loss: str  # for a model that was trained with a bias
    by_pairs: tuple[Mapping[str, Any], ...]
    source: Mapping[str, str]  # where each value comes from

    def loss_for(self, model: str) -> str:
        """Return the loss for a value of ``--model``."""
        return self.siglip_loss if _is_siglip(model) else self.loss

    def argv(self) -> list[str]:
        """Return the flags as arguments, without the loss. Later arguments override these. Sizes are those of few pairs."""
        flags = {**self.flags, **self.by_pairs[0]["flags"]}
        return [word for flag, value in flags.items() for word in as_words(f"--{flag}", value)]

    def sized(self, pairs: int | None = None) -> dict[str, Any]:
        """Return the flags that follow the number of pairs, by their Python names. None (default) means few pairs."""
        rows = self.by_pairs
        row = next((row for row in rows if row["up_to"] is None or (pairs or 0) <= row["up_to"]), rows[-1])
        return {flag.replace("-", "_"): value for flag, value in row["flags"].items()}


def get(name: str) -> Configuration:
    """Return the configuration ``name``. Raise ValueError if it does not exist."""
    if name not in NAMES:
        raise ValueError(f"unknown --config {name}{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
    content = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return Configuration(**{**content, "by_pairs": tuple(content["by_pairs"])})


def words(flags: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the flags ``names`` (Python names) with their values, for messages."""
    return " ".join(f"--{name.replace('_', '-')} {flags[name]}" for name in names)


def _is_siglip(model: str) -> bool:
    """Return whether a model has SigLIP's bias: a folder by its configuration, other models by their name."""
    schema, _, folder = model.partition(":")
    file = Path(folder) / "open_clip_config.json"
    if schema == "local-dir" and file.is_file():
        return json.loads(file.read_text(encoding="utf-8")).get("model_cfg", {}).get("init_logit_bias") is not None
    return "siglip" in model.lower()
