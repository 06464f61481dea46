"""Draw the pictures of ``docs/`` from the committed rows: ``python scripts/plot_results.py`` writes ``docs/images/*.svg``."""

import json
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
# Readable on white and on black.
GRAY, BLUE, ORANGE = "#7d8590", "#3987e5", "#d9772b"
# What docs/results.md reports: files, learning rate, OpenCLIP's temperature (0.03: learned), queueclip's (None: solved).
CELLS = [
    *(
        (["icons-batch-8"], 2.5e-4, 0.03, 0.03),
        (["confirm"], 1e-3, 0.03, 0.05),
        (["icons-30-epochs"], 1e-3, 0.03, 0.05),
    ),
    *((["icons-batch-128", "icons-batch-128-again"], 1e-3, 0.07, 0.03), (["icons-batch-512"], 2e-3, 0.1, 0.1)),
    (["icons-batch-1024"], 2e-3, 0.1, None),
]


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DOCS / f"benchmarks/icons/{name}.jsonl").read_text("utf-8").splitlines()]


def draw_gains(axes: Axes) -> None:
    for files, lr, of_openclip, of_queueclip in CELLS:
        scores: dict[str, dict[int, float]] = {"openclip": {}, "queueclip": {}}
        for row in (row for file in files for row in rows(file) if row["lr"] == lr):
            found = {"temperature": None, **row["setting"], **row["setting"].get("options", {})}
            of_loss = {"openclip": of_openclip, "queueclip": of_queueclip}.get(found["loss"], "none")
            is_constant = found["loss"] == "openclip" and of_loss != 0.03
            if found["temperature"] == of_loss and ("lr_tau" in found) == is_constant:
                r1 = (row["test"]["image-to-text"] + row["test"]["text-to-image"]) / 2
                scores[found["loss"]][row["seed"]], place = 100 * r1, (row["batch_size"], row["epochs"])
        gain = sum(scores["queueclip"][seed] - score for seed, score in scores["openclip"].items()) / 3
        axes.scatter(*place, s=60 + 90 * abs(gain), color=BLUE if gain > 0 else ORANGE)
        axes.annotate(f"{gain:+.1f}", place, xytext=(0, 18), textcoords="offset points", ha="center", color=GRAY)
    axes.set(xscale="log", xlim=(5, 2000), ylim=(0, 37), xlabel="batch", ylabel="epochs")
    axes.set_xticks([8, 32, 64, 128, 512, 1024], ["8", "32", "64", "128", "512", "1024"])


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
    for name, draw in (("gains", draw_gains), ("misjudged", draw_misjudged)):
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        draw(figure.subplots())
        figure.axes[0].minorticks_off()
        figure.savefig(DOCS / f"images/{name}.svg", transparent=True, metadata={"Date": None})
