"""Mixes of a run's initial and trained weights (WiSE-FT, Wortsman et al. 2022), and the choice among them."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import open_clip
import torch

from openclip_ext.checkpoint.format import MIX_FILE, MIX_SCORES_FILE
from openclip_ext.cli import command_line
from openclip_ext.evaluation.mixes import WEIGHT_KEY, mixed
from openclip_ext.files.json_lines import dumps
from openclip_ext.files.writing import write_atomically, write_text
from openclip_ext.training.config import ModelConfig
from openclip_ext.training.validation import Scheduled, Score, ScoredTask

# Weights of the trained weights; 0 means the initial weights.
ALPHAS = tuple(tenths / 10 for tenths in range(11))


def initial_model(settings: ModelConfig) -> Any:
    """Return a model with the weights of a run's ``--pretrained``, in float32 on the host."""
    with command_line.without_warnings():
        initial, *_ = replace(settings, precision="fp32").create(torch.device("cpu"))
    return initial


@dataclass(frozen=True)
class Choice:
    """The chosen weight α of the trained weights, and why."""

    weight: float
    reason: str


def choose(own: Mapping[float, float], kept: Mapping[float, float], at_least: float) -> Choice:
    """Choose α by the scores on validation data: the own score and the kept score for each α, or no own or no kept scores.

    The rule: of all α > 0 that keep at least ``at_least`` of the initial model's kept score, the α with the largest own score
    (of equal scores, the smallest α). If no α keeps this much, the α with the largest kept score. Without own scores, the
    largest α that keeps this much. Without kept scores, the largest own score.
    """
    weights = sorted({*own, *kept} - {0.0})
    needed = at_least * kept.get(0.0, 0.0)
    good = [weight for weight in weights if kept.get(weight, 0.0) >= needed]
    share = f"at least {100 * at_least:.0f} % of the start's kept score"
    if not good:
        return Choice(max(weights, key=lambda weight: kept[weight]), f"no mix has {share}; this one keeps most")
    if not own:
        return Choice(max(good), f"the largest α with {share}")
    best = max(good, key=lambda weight: own[weight])  # the first one, so the smallest α, of equal scores
    advice = ""
    if own[0.0] == 1.0:
        advice = ", but the score before training was 100 %: give harder validation data to see a gain"
    elif own[best] <= own[0.0]:
        advice = ", but not above the score before training: try a different --lr or more --epochs"
    elif kept and best == 1.0:  # all of the training is kept, and more of it would be allowed
        advice = "; the trained weights keep this much, so a larger --lr or more --epochs may gain more"
    return Choice(best, f"the largest own score{f' with {share}' if kept else ''}{advice}")


@dataclass(frozen=True)
class Mixes:
    """The scores of all mixes: for each task, a score for each of :data:`ALPHAS`, and the choice (see :func:`choose`).

    ``entries`` is the content of the chosen model's file.
    """

    scores: Mapping[ScoredTask, Mapping[float, Score]]
    choice: Choice
    at_least: float
    entries: Mapping[str, Any]

    def __str__(self) -> str:
        """A table of the scores in percent, with half the width of their 95 % intervals."""
        names = {0.0: "start", 1.0: "trained, α = 1"}
        rows = [["", *(task.title for task in self.scores)]]
        for weight in ALPHAS:
            chosen = "  <- chosen" if weight == self.choice.weight else ""
            cells = [_percent(found[weight]) for found in self.scores.values()]
            rows.append([names.get(weight, f"mix, α = {weight:g}"), *cells[:-1], cells[-1] + chosen])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        padded = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        counts = ", ".join(f"{next(iter(found.values())).samples:,} of {of.flag}" for of, found in self.scores.items())
        note = f"In percent, with 95 % intervals; samples: {counts}. α is the share of the trained weights."
        return "\n".join([*padded, note, f"Chosen: α = {self.choice.weight:g}, {self.choice.reason}."])

    def save(self, folder: Path) -> None:
        """Write the chosen model and all scores into the run folder. Raise OSError, for example on a full disk."""
        write_atomically(folder / MIX_FILE, lambda file: torch.save(self.entries, file))
        write_text(folder / MIX_SCORES_FILE, self.as_json())  # last, because it shows that the choice is complete

    def as_json(self) -> str:
        """Return the scores and the choice as one JSON text."""
        scores = {
            task.name: {f"{weight:g}": score._asdict() for weight, score in found.items()}
            for task, found in self.scores.items()
        }
        chosen = {"chosen": self.choice.weight, "reason": self.choice.reason, "keep_at_least": self.at_least}
        return dumps({**chosen, "scores": scores}) + "\n"


def _mean(scores: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """Return the mean score for each α; an empty dictionary without scores."""
    return {weight: fmean(found[weight] for found in scores) for weight in ALPHAS} if scores else {}


def _percent(score: Score) -> str:
    half = "" if score.half is None else f" ± {100 * score.half:.1f}"
    return f"{100 * score.value:.1f}{half}"


def score_mixes(
    tasks: Sequence[Scheduled],
    settings: ModelConfig,
    content: Mapping[str, Any],
    at_least: float,
    device: torch.device,
) -> Mixes:
    """Score the mixes of a run's initial and trained weights, and choose one.

    Args:
        tasks: At least one; each is a :class:`ScoredTask`.
        settings: The run's model settings, with its pretrained weights.
        content: The run's model file; its ``state_dict`` has the full model, with merged adapters.
        at_least: See :func:`choose`.
        device: Device of the evaluation.
    """
    trained = {name.removeprefix("module."): value for name, value in content["state_dict"].items()}
    model = initial_model(settings)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    if open_clip.get_input_dtype(settings.precision) is not None:  # weights in half precision
        with command_line.without_warnings():
            model, *_ = settings.create(device)
    model.to(device)
    scores: dict[ScoredTask, dict[float, Score]] = {}
    for weight in ALPHAS:
        model.load_state_dict(mixed(initial, trained, weight))
        model.eval()
        # The first mix has already named the samples that do not decode.
        with command_line.without_warnings() if scores else contextlib.nullcontext():
            for scheduled in tasks:
                assert isinstance(scheduled.task, ScoredTask)
                scores.setdefault(scheduled.task, {})[weight] = scheduled.task.measure(scheduled.encoder(model))[1]
    values = {of: {weight: score.value for weight, score in found.items()} for of, found in scores.items()}
    own = _mean([found for of, found in values.items() if of.is_own])
    choice = choose(own, _mean([found for of, found in values.items() if not of.is_own]), at_least)
    entries = {name: content[name] for name in ("epoch", "name")}
    entries |= {"state_dict": mixed(initial, trained, choice.weight), WEIGHT_KEY: choice.weight}
    return Mixes(scores, choice, at_least, entries)
