"""Recipes: the papers' settings as data.

``--recipe cc3m --loss neuclip`` puts :meth:`Recipe.argv` in front of the user's own flags, which therefore win.
``python -m openclip_ext.training.recipes`` lists them. ``recipes.json`` holds them: for each data set its size and the
common flags, and for each loss the source, its options, the flags that differ (null: OpenCLIP's default), the published
results by table, and notes on what the source leaves open. Reading recipes needs no torch.
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

# Losses with two names.
_ALIASES = {"fastclip-v3": "fastclip"}
_KEYS = ("about", "dataset_size", "samples_seen", "gpus", "flags", "options", "source", "results", "notes", "losses")


@dataclass(frozen=True)
class Result:
    """A published number.

    Attributes:
        metric: what was measured, as the table's column calls it.
        value: in percent.
        source: paper and table.
        spread: standard deviation over the paper's runs with different seeds, or None for a single run.
    """

    metric: str
    value: float
    source: str
    spread: float | None = None

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return f"{self.metric} {self.value:.2f}{spread} ({self.source})"


@dataclass(frozen=True)
class Recipe:
    """The published settings of one loss on one data set, as a command line.

    Attributes:
        dataset: the name ``--recipe`` takes.
        loss: the name ``--loss`` takes.
        openclip_flags: OpenCLIP's flags without the leading hyphens; True stands for a flag without a value, a list for
            several values, a dictionary for several of NAME=VALUE.
        loss_options: options of ``openclip_ext.create_loss``.
        gpus: number of GPUs that ``batch-size``, which is per GPU, belongs to.
        dataset_size: image-text pairs the source trained on.
        samples_seen: the source's training budget, in pairs.
        source: papers, tables and released commands the values come from.
        results: what the source reports.
        notes: what the source leaves open, and what stands here instead.
    """

    dataset: str
    loss: str
    openclip_flags: Mapping[str, Value]
    loss_options: Mapping[str, Value]
    gpus: int
    dataset_size: int
    samples_seen: int
    source: str
    results: tuple[Result, ...]
    notes: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """Pairs in one optimizer step, over all GPUs."""
        size = self.openclip_flags["batch-size"]
        assert isinstance(size, int), "the batch of a recipe is a number"
        return size * self.gpus

    def batch_size(self, gpus: int) -> int:
        """Return the batch per GPU that makes the recipe's global batch on another number of GPUs."""
        if self.global_batch % gpus:
            raise ValueError(
                f"the recipe's batch of {self.global_batch} cannot be shared by {gpus} GPUs; ask for a number that divides it"
            )
        return self.global_batch // gpus

    def argv(self) -> list[str]:
        """Return the recipe as arguments of ``openclip_ext.training.main``; what follows them on a command line wins."""
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
            *(f"  open:     {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def names() -> list[str]:
    """Return the data sets that have recipes, from small to large."""
    return list(dict.fromkeys(recipe.dataset for recipe in _RECIPES))


def losses(name: str) -> list[str]:
    """Return the losses with published settings on data set ``name``."""
    if name not in names():
        raise ValueError(f"unknown recipe {name!r}{nearest(name, names())}; there are: {', '.join(names())}")
    return [recipe.loss for recipe in _RECIPES if recipe.dataset == name]


def get(name: str, loss: str) -> Recipe:
    """Return the recipe of ``loss`` on data set ``name``."""
    known = losses(name)
    for recipe in _RECIPES:
        if (recipe.dataset, recipe.loss) == (name, _ALIASES.get(loss, loss)):
            return replace(recipe, loss=loss)
    raise ValueError(
        f"recipe {name} has no published settings for the loss {loss!r}{nearest(loss, known)}; it has them for: "
        f"{', '.join(known)}. Leave out --recipe to train with the defaults"
    )


def _load() -> Iterator[Recipe]:
    data = json.loads(Path(__file__).with_name("recipes.json").read_text(encoding="utf-8"))
    for dataset, shared in data.items():
        for loss, own in shared["losses"].items():
            fields = {**shared, **own}
            if unknown := fields.keys() - _KEYS:
                raise ValueError(
                    f"recipes.json: {dataset}, {loss}: unknown {', '.join(unknown)}; expected some of {_KEYS}"
                )
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
                results=tuple(_results(own.get("results", {}))),
                notes=tuple(own.get("notes", ())),
            )


def _results(tables: dict[str, dict[str, Any]]) -> Iterator[Result]:
    for source, columns in tables.items():
        for metric, score in columns.items():
            value, spread = score if isinstance(score, list) else (score, None)
            yield Result(metric, value, source, spread)


_RECIPES = tuple(_load())
