"""Draw the picture of ``docs/how-it-works.md`` from the committed rows: ``python scripts/plot_results.py``."""

import json
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
# Readable on white and on black.
GRAY, BLUE, ORANGE = "#7d8590", "#3987e5", "#d9772b"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DOCS / f"benchmarks/icons/{name}.jsonl").read_text("utf-8").splitlines()]


def draw_misjudged(axes: Axes) -> None:
    runs = [row for row in rows("estimation-error") if row["loss"] == "neuclip"]
    for kind, label, shift, color in (("minibatch", "the batch", 0.4, ORANGE), ("estimator", "NeuCLIP", 0.1, BLUE)):
        places, found = [place + shift for place in range(len(runs))], [run[kind] for run in runs]
        low, high = ([error[end] for error in found] for end in ("factor_low", "factor_high"))
        axes.hlines(places, low, high, color=color, linewidth=4, alpha=0.6)
        axes.plot([error["factor"] for error in found], places, "o", color=color, markersize=9, label=label)
    axes.set(xscale="log", xlabel="factor by which a normalizer is wrong (1: exact)")
    axes.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.set_yticks([place + 0.25 for place in range(len(runs))], [f"{run['samples']:,} icons" for run in runs])
    axes.legend(frameon=False, labelcolor=GRAY)


if __name__ == "__main__":
    matplotlib.rcParams |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY)
    matplotlib.rcParams |= {"svg.hashsalt": "openclip_ext", "axes.spines.top": False, "axes.spines.right": False}
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    draw_misjudged(figure.subplots())
    figure.axes[0].minorticks_off()
    figure.savefig(DOCS / "images/misjudged.svg", transparent=True, metadata={"Date": None})
