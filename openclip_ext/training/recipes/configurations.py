"""Configurations: flags for a task, whose values follow the number of image-text pairs (``--config finetune``).

``--config NAME`` inserts the flags before the user's flags, so the user's flags override the configuration. ``NAME.json``
contains the values, and where they come from.
"""

import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import MASK
from openclip_ext.cli.options import as_words, nearest

NAMES = ("finetune",)


@dataclass(frozen=True)
class Configuration:
    """The flags of a task, by their names without ``--``. ``by_pairs`` has rows with ``up_to`` (pairs) and ``flags``."""

    about: str
    flags: Mapping[str, Any]
    loss: str
    loss_flags: Mapping[str, Any]  # of losses that take them, not for CoCa models
    siglip_loss: str  # for a model that was trained with a bias
    coca_loss: str  # for a model that also generates captions
    by_pairs: tuple[Mapping[str, Any], ...]
    source: Mapping[str, str]  # where each value comes from

    def loss_argv(self, model: str, pretrained: str | None, loss: str | None = None, **parts: Any) -> list[str]:
        """Return the loss for values of ``--model`` and ``--pretrained``, and the loss's flags, as arguments.

        ``loss`` is the loss that the user chose, and ``parts`` are its parts. None (default) means the configuration's loss.
        """
        from openclip_ext.losses import registry  # imported late, because it imports torch

        kind = _own_kind(model, pretrained)
        loss = loss or {"siglip": self.siglip_loss, "coca": self.coca_loss}.get(kind or "", self.loss)
        taken = set() if kind == "coca" else registry.options_used_by(loss, **parts).keys()
        flags = {flag: value for flag, value in self.loss_flags.items() if flag.replace("-", "_") in taken}
        return ["--loss", loss, *(word for flag, value in flags.items() for word in as_words(f"--{flag}", value))]

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
        raise ValueError(
            f"unknown --config {name}{nearest(name, NAMES)}; known: {', '.join(NAMES)}, or LOGS/NAME/config.json of a run"
        )
    content = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return Configuration(**{**content, "by_pairs": tuple(content["by_pairs"])})


def words_of_run(path: str, given: Collection[str]) -> list[str]:
    """Return the arguments of the run that wrote a ``config.json``.

    Raise UsageError if the file cannot be read, or if an argument had a secret, which the run did not store. The flags in
    ``given`` replace the run's, so their secrets are not needed.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8")).get("typed")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, list):
        raise UsageError(f"--config {path}: expected the config.json of a run")
    for before, word in itertools.pairwise(["", *found]):
        flag = word.partition("=")[0] if word.startswith("--") else before
        if MASK in word and flag not in given:
            raise UsageError(f"--config {path}: the value of {flag} had a secret, which is not stored: give {flag}")
    return found


def words(flags: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the flags ``names`` (Python names) with their values, for messages."""
    return " ".join(f"--{name.replace('_', '-')} {flags[name]}" for name in names)


def _own_kind(model: str, pretrained: str | None) -> str | None:
    """Return ``siglip`` or ``coca`` if the model is of this kind: a folder by its configuration, others by their name.

    Weights with a bias are of the kind ``siglip``: OpenCLIP's ``--siglip`` trains them with any model.
    """
    schema, _, folder = model.partition(":")
    given = [Path(pretrained)] if pretrained else []
    weights = Path(folder).glob("open_clip_*model.*") if schema == "local-dir" else given
    if any(map(compat.has_logit_bias, weights)):
        return "siglip"
    file = Path(folder) / "open_clip_config.json"
    if schema == "local-dir" and file.is_file():
        config = json.loads(file.read_text(encoding="utf-8")).get("model_cfg", {})
        is_kind = {"siglip": config.get("init_logit_bias") is not None, "coca": "multimodal_cfg" in config}
    else:
        is_kind = {kind: kind in model.lower() for kind in ("siglip", "coca")}
    return next((kind for kind, holds in is_kind.items() if holds), None)
