"""Train losses on the demo set, from the same start and with the same budget, and print what they reach.

    .venv/bin/python -m scripts.experiments.compare_losses --data-dir demo --output demo/compare
        [--losses neuclip openclip] [--run 'LABEL=LOSS --flag ...'] [--seeds 0 1] [--batch-size 64] [--epochs 3]

``DATA_DIR`` holds ``train/`` and ``test/`` as ``scripts/quickstart.sh`` makes them. A seed fixes the model's start and the
order of the samples, so that equal seeds pair the runs. Finished runs are kept and an interrupted one goes on: call it
again with more losses or seeds. The table has the mean over the seeds, and each seed's value for retrieval.

"Probe" is a linear classifier on the frozen image tower, trained on half of the test images and tested on the other: it
also measures the losses of images alone, whose other columns mean nothing. With ``--anchors`` the table also has the
estimation error of the log-normalizers at the end, and the mini-batch estimate's on the same model.
"""

import argparse
import json
import logging
import shlex
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from eval.cliplite.probes import Split, feature_function, probe_top1
from eval.models import load_model
from eval.shapes import ShapesEvaluator, untrained
from openclip_ext.data.shapes.scene import COLORS, SHAPES
from openclip_ext.diagnostics import estimation_error
from openclip_ext.losses.registry import list_losses
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import main as training

# What differs from a loss's defaults in a run of a few epochs over 20,000 samples (docs/results.md): fewer prototypes;
# averages that follow the batch; an MLP that is fitted in every step and kept over the epochs; SimCLR's augmentations.
_MOVING_AVERAGE = "--gamma 0.8"
_TWO_VIEWS = (
    "--views 2 --caption-aware-flip --aug-cfg scale=(0.3,1.0) color_jitter=(0.4,0.4,0.4,0.1) color_jitter_prob=0.8"
)
SHORT_RUN_FLAGS = {
    "neuclip": "--prototypes 1024",
    "queueclip": "--prototypes 1024",
    "amorlip": "--no-reinitialize --ema-decay 0 --fit-every 1 --target-every 1",
    "simclr": _TWO_VIEWS,
    **dict.fromkeys(
        ("sogclr", "isogclr", "tempnet", "fastclip", "fastclip-v0", "fastclip-v1", "fastclip-v2"), _MOVING_AVERAGE
    ),
}
DEFAULT_RUNS = {
    **{name: f"{name} {SHORT_RUN_FLAGS.get(name, '')}" for name in list_losses() if name != "fastclip-v3"},
    "sogclr, two views": f"sogclr {_MOVING_AVERAGE} {_TWO_VIEWS}",
}
COLUMNS = {
    "shape-color-top1": "shape x color",
    "held-out-top1": "unseen pairs",
    "relation-top1": "relation",
    "image-to-text-R@1": "R@1 i2t",
    "text-to-image-R@1": "R@1 t2i",
    "shape-probe-top1": "shape, probe",
    "color-probe-top1": "color, probe",
}
ERRORS = {"error": "estimation error", "minibatch-error": "of the mini-batch"}
PER_SEED = "image-to-text-R@1"


def train(flags: str, folder: Path, args: argparse.Namespace, seed: int) -> Path:
    """Train (or finish) one run; returns its last checkpoint."""
    loss, *options = shlex.split(flags)
    checkpoint = folder / "checkpoints" / f"epoch_{args.epochs}.pt"
    if not checkpoint.exists():
        training.main(
            [
                *("--loss", loss, *options, "--model", args.model, "--train-data", f"{args.data_dir}/train/*.tar"),
                *("--batch-size", str(args.batch_size), "--epochs", str(args.epochs), "--seed", str(seed)),
                *("--lr", "1e-3", "--warmup", "100", "--precision", "fp32", "--device", args.device, "--workers", "1"),
                *("--logs", str(folder.parent), "--name", folder.name, "--resume", "latest"),
                *("--log-every-n-steps", "50"),
            ]
        )
    return checkpoint


def evaluate(checkpoint: Path | None, args: argparse.Namespace) -> dict[str, float]:
    """The demo set's metrics of a checkpoint, or of random weights."""
    device = args.device
    loaded = untrained(args.model, device) if checkpoint is None else load_model(args.model, checkpoint, device)
    evaluator = ShapesEvaluator(args.data_dir / "test", loaded.preprocess, loaded.tokenizer)
    return evaluator.run(loaded.model) | probe(loaded.model, evaluator)


def estimation_errors(folder: Path, anchors: int) -> dict[str, float | None]:
    """Mean squared errors of the log-normalizers of a finished run; None for a loss that has none."""
    report = folder / "estimation_error.json"
    if not report.exists():
        try:
            estimation_error.main([str(folder), "--anchors", str(anchors), "--json", str(report)])
        except ValueError as error:
            logging.info(f"{folder.name}: {error}")
            return dict.fromkeys(ERRORS)
    found = json.loads(report.read_text())
    return {
        "error": (found["estimator"] or found["minibatch"])["mean"],
        "minibatch-error": found["minibatch"]["mean"],
    }


@torch.no_grad()
def probe(model: nn.Module, evaluator: ShapesEvaluator) -> dict[str, float]:
    """Accuracies of linear classifiers of the single items' shape and color on the frozen image tower's backbone."""
    encode = feature_function(model, "backbone")
    features = torch.cat([encode(images).float() for images in evaluator.images(model)])[evaluator.singles].cpu()
    items = [evaluator.samples[number].scene.items[0] for number in evaluator.singles]
    labels = {
        "shape-probe-top1": (SHAPES, [item.shape for item in items]),
        "color-probe-top1": (COLORS, [item.color for item in items]),
    }
    accuracies = {}
    for name, (classes, truth) in labels.items():
        numbers = np.array([classes.index(label) for label in truth])
        halves = [Split(features[part::2].numpy(), numbers[part::2], tuple(classes)) for part in range(2)]
        accuracies[name] = probe_top1(*halves, costs=(1.0,)).metrics["acc1"]
    return accuracies


def run_all(runs: dict[str, str], args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Train and evaluate; seed after seed, so that an interrupted comparison has complete ones."""
    results: dict[str, list[dict[str, float]]] = {label: [] for label in runs}
    for seed in args.seeds:
        for label, flags in runs.items():
            slug = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in label)
            folder = args.output / f"batch{args.batch_size}" / f"{slug}-seed{seed}"
            scores = folder / "scores.json"
            if not scores.exists():
                metrics = evaluate(train(flags, folder, args, seed), args)
                scores.write_text(json.dumps({"flags": flags, "seed": seed, **metrics}, indent=1) + "\n")
            errors = estimation_errors(folder, args.anchors) if args.anchors else {}
            results[label].append(json.loads(scores.read_text()) | errors)
    return results


def format_table(results: dict[str, list[dict[str, float]]], with_errors: bool) -> str:
    """Markdown: a row a run, the mean over the seeds, each seed's retrieval behind."""
    columns = COLUMNS | (ERRORS if with_errors else {})
    lines = [
        "| run | " + " | ".join(columns.values()) + f" | {COLUMNS[PER_SEED]}, each seed |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for label, scores in results.items():
        means = " | ".join(mean([score.get(key) for score in scores]) for key in columns)
        lines.append(f"| {label} | {means} | {' / '.join(f'{score[PER_SEED]:.3f}' for score in scores)} |")
    return "\n".join(lines)


def mean(values: list[float | None]) -> str:
    return "" if None in values else f"{statistics.fmean(values):.3f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with train/ and test/")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--losses", nargs="*", default=list(DEFAULT_RUNS), choices=list(DEFAULT_RUNS))
    parser.add_argument("--run", action="append", default=[], metavar="'LABEL=LOSS --flag ...'", help="one more run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--anchors", type=int, default=0, help="of the estimation error; 0: not measured")
    parser.add_argument("--model", default="demo-resnet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    add_model_configs()
    runs = {label: DEFAULT_RUNS[label] for label in args.losses}
    runs |= dict(run.split("=", maxsplit=1) for run in args.run)
    results = run_all(runs, args)
    logging.disable()
    print(format_table({**results, "untrained": [evaluate(None, args)]}, args.anchors > 0))


if __name__ == "__main__":
    main()
