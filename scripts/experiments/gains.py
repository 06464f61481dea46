"""Compute README's table and curve, and the figure of ``docs/results.md``, from published results: R@1 of two losses.

    python -m scripts.experiments.gains docs/benchmarks/icons/*.jsonl --figure docs/images/gains.png \\
        --curve docs/images/equal-epochs.png

For ``openclip``, the best of two to six temperatures was chosen on the validation sets, with the first seed. ``queueclip``
has the training program's defaults: its initial temperature is 0.1 in runs of fewer than 700 steps, and 0.07 in longer runs.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from openclip_ext.cli import command_line
from openclip_ext.compare.trials import read_results
from openclip_ext.evaluation.statistics import seeds_interval
from openclip_ext.files.writing import output_path
from openclip_ext.pages.charts import PALETTE
from openclip_ext.pages.rendering import markdown_table
from scripts.experiments.tables import recall, with_interval

_ICONS, _ICONS_100K, _CLIP_ARTS = "cb7b4f085c80", "66898dd414fb", "4be2078349f2"
_LEARNED = {"loss": "openclip", "temperature": 0.03}


def _constant(temperature: float) -> dict[str, Any]:
    return {"loss": "openclip", "temperature": temperature, "lr_tau": 0}


def _solved(temperature: float | None) -> dict[str, Any]:
    options = {"temperature_scheme": "solved", "rho": 4.0, "temperature": temperature}
    return {"loss": "queueclip", "options": options}


def _queueclip_constant(temperature: float) -> dict[str, Any]:
    return {"loss": "queueclip", "options": {"temperature_scheme": "constant", "temperature": temperature}}


@dataclass(frozen=True)
class Pairing:
    """Pairs of runs that have equal seeds and differ only in the setting (the loss and its options).

    Attributes:
        label: Label of the row in the table or figure.
        data: Digest of the data set.
        tuned: Setting of ``openclip``.
        untuned: Setting of ``queueclip``.
        best: The setting of ``queueclip`` that was best on the validation sets, of as many as for ``openclip``; or None.
    """

    label: str
    data: str
    batch_size: int
    epochs: int
    tuned: Mapping[str, Any]
    untuned: Mapping[str, Any]
    seeds: Sequence[int]
    model: str = "demo-resnet"
    lr: float = 0.001
    best: Mapping[str, Any] | None = None


_SIX = range(6)
# The rows of README's table.
BATCHES = (
    Pairing("8, 4", _ICONS, 8, 4, _LEARNED, _solved(0.07), _SIX, lr=0.00025),
    # None means the model's initial temperature, which is also 0.07.
    Pairing("32, 16", _ICONS, 32, 16, _LEARNED, _solved(None), (10, 11, 12)),
    Pairing("64, 30", _ICONS, 64, 30, _LEARNED, _solved(0.07), range(3)),
    Pairing("128, 16", _ICONS, 128, 16, _constant(0.07), _solved(0.07), range(3)),
    Pairing("512, 16", _ICONS, 512, 16, _constant(0.1), _solved(0.1), range(3), lr=0.002),
    Pairing("1024, 20", _ICONS, 1024, 20, _constant(0.1), _solved(0.1), _SIX, lr=0.002),
)
# Rows that are only in the figure.
OTHERS = (
    Pairing("clip arts, 64, 44", _CLIP_ARTS, 64, 44, _LEARNED, _solved(0.07), (3, 4, 5)),
    Pairing("transformer, 64, 32", _ICONS, 64, 32, _LEARNED, _solved(0.07), _SIX, "demo-vit"),
    Pairing("transformer, 64, 8", _ICONS, 64, 8, _LEARNED, _solved(0.07), _SIX, "demo-vit"),
    Pairing("100,000 icons, 64, 1", _ICONS_100K, 64, 1, _constant(0.02), _solved(0.07), _SIX),
)

# A model with five times the weights, in a table of its own.
LARGER = Pairing("`demo-resnet26`: 128, 16", _ICONS, 128, 16, _LEARNED, _solved(0.07), range(3), "demo-resnet26")

_ICONS_PAIRS = 11_000
_EQUAL_EPOCHS = 16
# The figure of equal epochs: batches from small to large.
CURVE = tuple(
    Pairing(f"{batch}", _ICONS, batch, _EQUAL_EPOCHS, tuned, untuned, seeds, lr=lr, best=_queueclip_constant(best))
    for batch, lr, tuned, untuned, best, seeds in (
        (32, 0.001, _LEARNED, _solved(None), 0.05, (10, 11, 12)),
        (64, 0.001, _constant(0.03), _solved(0.07), 0.03, range(3)),
        (128, 0.001, _constant(0.07), _solved(0.07), 0.03, range(3)),
        (256, 0.0014, _constant(0.07), _solved(0.1), 0.07, range(3)),
        (512, 0.002, _constant(0.1), _solved(0.1), 0.1, range(3)),
        (1024, 0.002, _constant(0.1), _solved(0.1), 0.1, range(3)),
    )
)


@dataclass(frozen=True)
class Gain:
    """Mean R@1 in percent of tuned ``openclip`` and of ``queueclip``, and their difference for each seed."""

    label: str
    openclip: float
    queueclip: float
    differences: Sequence[float]


def gain(pairing: Pairing, rows: Iterable[Mapping[str, Any]], of: Mapping[str, Any] | None = None) -> Gain:
    """Return the gain of a pairing, with its untuned setting or another one; raise KeyError if a seed has no pair of runs.

    The runs of a pair were on processors of the same maker. If a seed has pairs of several makers, the alphabet's first one
    counts, so that both settings are compared with the same runs. Of several equal runs, the last one counts.
    """
    length = {name: getattr(pairing, name) for name in ("data", "model", "batch_size", "epochs", "lr")}
    of_length = [row for row in rows if all(row[name] == value for name, value in length.items())]
    tuned, untuned = _scores(of_length, pairing.tuned), _scores(of_length, of or pairing.untuned)
    pairs = {run[0]: (tuned[run], untuned[run]) for run in sorted(untuned, reverse=True) if run in tuned}
    before, after = zip(*(pairs[seed] for seed in pairing.seeds), strict=True)
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return Gain(pairing.label, statistics.fmean(before), statistics.fmean(after), differences)


def _scores(rows: Iterable[Mapping[str, Any]], setting: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    """Return R@1 by seed and maker of the processor. Runs that two models of Intel repeated have equal scores."""
    makers = ((row, row["environment"]["cpu"].split()[0]) for row in rows if row["setting"] == setting)
    return {(row["seed"], maker): recall(row["test"]) for row, maker in makers}


def table(gains: Iterable[Gain]) -> str:
    """Return README's table. A row whose 95 % interval excludes 0 is bold."""
    cells = [["batch, epochs", "OpenCLIP's loss, tuned", "`queueclip`, untuned"]]
    for one in gains:
        text = f"{one.queueclip:.1f}, {with_interval(one.differences)}"
        is_ahead = seeds_interval(one.differences)[0] > 0
        cells.append([one.label, f"{one.openclip:.1f}", f"**{text}**" if is_ahead else text])
    return markdown_table(cells)


def draw(gains: Sequence[Gain], path: Path) -> None:
    """Draw the mean of each difference as a point with its 95 % interval over paired seeds."""
    figure = Figure(figsize=(7, 0.32 * len(gains) + 0.9), dpi=160, layout="constrained")
    axes = figure.subplots()
    for line, one in enumerate(reversed(gains)):
        low, high = seeds_interval(one.differences)
        color = PALETTE[0] if low > 0 else PALETTE[-1]
        axes.plot([low, high], [line, line], color=color, linewidth=3, solid_capstyle="round", alpha=0.45)
        axes.plot([statistics.fmean(one.differences)], [line], "o", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(gains)), [one.label for one in reversed(gains)])
    axes.set_ylabel("batch, epochs")
    axes.set_xlabel("R@1 of queueclip, untuned, minus OpenCLIP's loss, tuned (95 % interval)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    # Without matplotlib's version in the metadata, equal rows give equal files.
    figure.savefig(path, metadata={"Software": None})


def draw_curve(untuned: Sequence[Gain], best: Sequence[Gain], path: Path) -> None:
    """Draw the mean R@1 over the batch size at equal epochs, with the 95 % interval of the difference over paired seeds."""
    figure = Figure(figsize=(7, 3.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    batches = [int(one.label) for one in untuned]
    label = "queueclip, tuned for each batch"
    axes.plot(batches, [one.queueclip for one in best], "o--", color=PALETTE[0], alpha=0.6, label=label)
    halves = [statistics.fmean(one.differences) - seeds_interval(one.differences)[0] for one in untuned]
    label = "queueclip, untuned; bars: 95 % interval of the difference"
    axes.errorbar(
        batches, [one.queueclip for one in untuned], yerr=halves, fmt="o-", color=PALETTE[0], capsize=3, label=label
    )
    label = "OpenCLIP's loss, tuned for each batch"
    axes.plot(batches, [one.openclip for one in untuned], "o-", color=PALETTE[1], label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel(f"batch size, {_EQUAL_EPOCHS} epochs each")
    axes.set_ylabel("R@1 in percent")
    axes.set_ylim(bottom=0)
    steps = axes.secondary_xaxis("top")
    counts = [_EQUAL_EPOCHS * (_ICONS_PAIRS // batch) for batch in batches]
    steps.set_xticks(batches, [f"{count:,}" for count in counts])
    steps.set_xticks([], minor=True)
    steps.set_xlabel("optimizer steps")
    axes.spines["right"].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path, metadata={"Software": None})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("rows", type=Path, nargs="+", help="JSON lines files of finished runs")
    parser.add_argument("--figure", type=output_path, help="PNG file for the figure")
    parser.add_argument("--curve", type=output_path, help="PNG file for the figure of equal epochs")
    args = parser.parse_args(argv)
    rows = [row for path in args.rows for row in read_results(path).values()]
    print(table(gain(pairing, rows) for pairing in (*BATCHES, LARGER)))
    if args.figure:
        draw([gain(pairing, rows) for pairing in (*BATCHES, *OTHERS)], args.figure)
    if args.curve:
        untuned = [gain(pairing, rows) for pairing in CURVE]
        best = [gain(pairing, rows, pairing.best) for pairing in CURVE]
        for one, other in zip(untuned, best, strict=True):
            shown = (f"{of.queueclip:.1f}, {with_interval(of.differences)}" for of in (one, other))
            print(f"| {one.label} | {one.openclip:.1f} | {' | '.join(shown)} |")
        draw_curve(untuned, best, args.curve)


if __name__ == "__main__":
    command_line.run(main)
