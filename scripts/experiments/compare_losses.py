"""Train losses on the demo set by the training program, from the same start and as long, and print what they reach.

    .venv/bin/python -m scripts.experiments.compare_losses --data-dir demo --output demo/compare
        [--losses neuclip openclip] [--run 'LABEL=LOSS --flag ...'] [--seeds 0 1] [--batch-size 64] [--epochs 3]

``DATA_DIR`` holds ``train/`` and ``test/`` as ``scripts/quickstart.sh`` makes them. A seed fixes the model's start and the
order of the samples, so that equal seeds pair the runs: the table has means over the seeds and the paired differences to the
first run. Finished runs are kept and an interrupted one goes on. With ``--anchors`` the table also has the estimation error of
the log-normalizers at the end, and the mini-batch estimate's on the same model.
"""

import argparse
import contextlib
import json
import logging
import shlex
import statistics
from pathlib import Path

import torch

from eval.models import load_model
from eval.shapes import ShapesEvaluator, untrained
from openclip_ext.diagnostics import estimation_error
from openclip_ext.experiments.results import ResultsFile
from openclip_ext.experiments.tables import markdown_table, with_interval
from openclip_ext.losses.registry import list_losses
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import main as training

# What differs from a loss's defaults in a run of a few epochs over 20,000 samples (docs/results.md): fewer prototypes;
# averages that follow the batch; an MLP that is fitted in every step and kept over the epochs.
SHORT_RUN_FLAGS = {
    **dict.fromkeys(("neuclip", "queueclip"), "--prototypes 1024"),
    "amorlip": "--no-reinitialize --ema-decay 0 --fit-every 1 --target-every 1",
    **dict.fromkeys(
        ("sogclr", "isogclr", "tempnet", "fastclip", "fastclip-v0", "fastclip-v1", "fastclip-v2"), "--gamma 0.8"
    ),
}
# All but those of images alone, which retrieve nothing, and another name of fastclip.
RUNS = {
    name: f"{name} {SHORT_RUN_FLAGS.get(name, '')}" for name in list_losses() if name not in ("simclr", "fastclip-v3")
}
COLUMNS = {
    "shape-color-top1": "shape x color",
    "held-out-top1": "unseen pairs",
    "relation-top1": "relation",
    "image-to-text-R@1": "R@1 i2t",
    "text-to-image-R@1": "R@1 t2i",
    "error": "estimation error",
    "minibatch-error": "of the mini-batch",
}

Scores = dict[str, float]


def run(flags: str, seed: int, folder: Path, args: argparse.Namespace) -> Scores:
    """Train (or finish) one run, and score its last checkpoint."""
    loss, *options = shlex.split(flags)
    argv = [
        *("--loss", loss, *options, "--model", args.model, "--train-data", f"{args.data_dir}/train/*.tar"),
        *("--batch-size", str(args.batch_size), "--epochs", str(args.epochs), "--seed", str(seed)),
        *("--lr", "1e-3", "--warmup", "100", "--precision", "fp32", "--device", args.device, "--workers", "1"),
        *("--logs", str(folder.parent), "--name", folder.name, "--resume", "latest", "--log-every-n-steps", "50"),
    ]
    training.main(argv)
    scores = evaluate(folder / "checkpoints" / f"epoch_{args.epochs}.pt", args)
    if args.anchors:
        report = folder / "estimation_error.json"
        with contextlib.suppress(ValueError):  # a loss without normalizers
            estimation_error.main([str(folder), "--anchors", str(args.anchors), "--json", str(report)])
            found = json.loads(report.read_text())
            scores["error"] = (found["estimator"] or found["minibatch"])["mean"]
            scores["minibatch-error"] = found["minibatch"]["mean"]
    return scores


def evaluate(checkpoint: Path | None, args: argparse.Namespace) -> Scores:
    """Return the demo set's metrics of a checkpoint, or of random weights."""
    device = args.device
    loaded = untrained(args.model, device) if checkpoint is None else load_model(args.model, checkpoint, device)
    return ShapesEvaluator(args.data_dir / "test", loaded.preprocess, loaded.tokenizer).run(loaded.model)


def format_table(scores: dict[str, dict[int, Scores]]) -> str:
    """Return the mean over the seeds and the paired difference to the first run, in percent but for errors."""
    shown = {
        key: title for key, title in COLUMNS.items() if any(key in s for of in scores.values() for s in of.values())
    }
    first = next(iter(scores.values()))
    rows = []
    for label, of_seed in scores.items():
        cells = [label]
        for key in shown:
            factor = 1 if "error" in key else 100
            found = {seed: factor * one[key] for seed, one in of_seed.items() if key in one}
            paired = [value - factor * first[seed][key] for seed, value in found.items() if key in first.get(seed, {})]
            cell = f"{statistics.fmean(found.values()):.3g}" if found else ""
            cells.append(cell if of_seed is first or not paired or factor == 1 else f"{cell}, {with_interval(paired)}")
        cells.append(" ".join(f"{100 * one['image-to-text-R@1']:.1f}" for one in of_seed.values()))
        rows.append(cells)
    return markdown_table(["run", *shown.values(), "R@1 i2t, each seed"], rows)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with train/ and test/")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--losses", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--run", action="append", default=[], metavar="'LABEL=LOSS --flag ...'", help="one more run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--anchors", type=int, default=0, help="of the estimation error; 0: not measured")
    parser.add_argument("--model", default="demo-resnet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    add_model_configs()
    runs = {label: RUNS[label] for label in args.losses} | dict(one.split("=", maxsplit=1) for one in args.run)
    results = ResultsFile(args.output / "runs.jsonl")
    scores: dict[str, dict[int, Scores]] = {label: {} for label in runs}
    for seed in args.seeds:  # seed after seed, so that an interrupted comparison has complete ones
        for label, flags in runs.items():
            name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in label)
            row = f"batch{args.batch_size}/{name}-seed{seed}"
            if row not in results.rows:
                found = run(flags, seed, args.output / row, args)
                results.add({"id": row, "flags": flags, "seed": seed, "epochs": args.epochs, "scores": found})
            scores[label][seed] = results.rows[row]["scores"]
    logging.disable()
    print(format_table(scores | {"untrained": {-1: evaluate(None, args)}}))


if __name__ == "__main__":
    main()
