"""Recipes: the settings with which the papers trained their losses.

``--recipe cc3m --loss neuclip-paper`` inserts :meth:`Recipe.argv` before the user's flags, so the user's flags override the
recipe.
``python -m openclip_ext.training.recipes`` lists the recipes. ``recipes.json`` contains the size and the common flags of each
data set. For each loss, it contains the source, options, other flags (null means OpenCLIP's default), results and notes.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openclip_ext.cli.options import as_words, nearest, option_as_words
from openclip_ext.losses.options import OPTIONS

Value = int | float | str | bool | list[float] | dict[str, Any] | None

# Alternative names of losses.
_ALIASES = {"fastclip-v3": "fastclip"}


@dataclass(frozen=True)
class Recipe:
    """The published settings of one loss on one data set, as a command line."""

    dataset: str
    loss: str
    # By name without ``--``. True means no value, a list several values, and a dictionary several NAME=VALUE words.
    openclip_flags: Mapping[str, Value]
    loss_options: Mapping[str, Value]  # options of openclip_ext.create_loss
    gpus: int  # number of GPUs to which ``batch-size`` refers
    dataset_size: int  # image-text pairs in the source's training set
    samples_seen: int  # the source's training budget, in pairs
    source: str  # the papers, tables and released commands with these settings
    results: tuple[str, ...]  # published scores in percent (± their spread over seeds), with their sources
    notes: tuple[str, ...]  # remarks, for example on settings that the source does not specify

    @property
    def global_batch(self) -> int:
        """Number of image-text pairs per optimizer step, over all GPUs."""
        size = self.openclip_flags["batch-size"]
        assert isinstance(size, int), "the batch of a recipe is a number"
        return size * self.gpus

    def argv(self) -> list[str]:
        """Return the recipe as arguments of ``openclip_ext.training.main``. Later arguments override these."""
        words = ["--loss", self.loss]
        for flag, value in self.openclip_flags.items():
            words += as_words(f"--{flag}", value)
        for name, value in self.loss_options.items():
            words += option_as_words(OPTIONS[name], value)
        return words

    def launch_command(self) -> str:
        """Return the command that starts the recipe on one machine with ``gpus`` GPUs."""
        return shlex.join(
            [
                *("torchrun", "--nproc-per-node", str(self.gpus), "-m", "openclip_ext.training.main", "--"),
                *("--recipe", self.dataset, "--loss", self.loss, "--name", f"{self.dataset}-{self.loss}"),
                *("--train-data", f"PATH/TO/{self.dataset}/{{00000..LAST}}.tar"),
            ]
        )

    def __str__(self) -> str:
        budget = f"{self.dataset_size / 1e6:.4g} M pairs, {self.samples_seen / 1e6:.4g} M seen"
        lines = [
            f"{self.dataset}, {self.loss}: {budget}, batch {self.global_batch} on {self.gpus} GPU(s)",
            f"  launch:   {self.launch_command()}",
            f"  sets:     {shlex.join(self.argv())}",
            *(f"  expected: {result}" for result in self.results),
            f"  source:   {self.source}",
            *(f"  note:     {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def names() -> list[str]:
    """Return the data sets with recipes, from small to large."""
    return list(dict.fromkeys(recipe.dataset for recipe in _RECIPES))


def losses(name: str) -> list[str]:
    """Return the losses with published settings on data set ``name``."""
    if name not in names():
        raise ValueError(f"unknown recipe {name!r}{nearest(name, names())}; known: {', '.join(names())}")
    return [recipe.loss for recipe in _RECIPES if recipe.dataset == name]


def get(name: str, loss: str) -> Recipe:
    """Return the recipe of ``loss`` on data set ``name``."""
    known = losses(name)
    for recipe in _RECIPES:
        if (recipe.dataset, recipe.loss) == (name, _ALIASES.get(loss, loss)):
            return replace(recipe, loss=loss)
    raise ValueError(
        f"recipe {name} has no published settings for the loss {loss!r}{nearest(loss, known)}; known: {', '.join(known)}. "
        "Remove --recipe to train with the defaults"
    )


def _load() -> Iterator[Recipe]:
    data = json.loads(Path(__file__).with_name("recipes.json").read_text(encoding="utf-8"))
    for dataset, shared in data.items():
        for loss, own in shared["losses"].items():
            fields = {**shared, **own}
            flags = {**shared["flags"], **own.get("flags", {})}
            yield Recipe(
                dataset=dataset,
                loss=loss,
                openclip_flags={flag: value for flag, value in flags.items() if value is not None},
                loss_options=own.get("options", {}),
                gpus=fields["gpus"],
                dataset_size=fields["dataset_size"],
                samples_seen=fields["samples_seen"],
                source=own["source"],
                results=tuple(
                    f"{metric} {_percent(score)} ({table})"
                    for table, columns in own.get("results", {}).items()
                    for metric, score in columns.items()
                ),
                notes=tuple(own.get("notes", ())),
            )


def _percent(score: float | list[float]) -> str:
    """Format a score, or a list of a score and its spread over seeds, with two decimals."""
    return " ± ".join(f"{number:.2f}" for number in (score if isinstance(score, list) else [score]))


_RECIPES = tuple(_load())
