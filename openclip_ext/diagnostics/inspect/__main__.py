"""Run ``openclip-ext inspect RUN_FOLDER``."""

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo, get_logger
from openclip_ext.cli.options import cli_field, from_flags, own_options
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.shards.shard_source import ShardSource
from openclip_ext.data.sources.source import Source
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.diagnostics.finished_run import (
    FinishedRun,
    add_run_arguments,
    embed_training_set,
    load_public,
    load_run,
)
from openclip_ext.diagnostics.inspect import outputs
from openclip_ext.diagnostics.inspect.findings import (
    DEFINITIONS,
    OF_IMAGES,
    PAIRS,
    Found,
    Thresholds,
    find,
    log_normalizers,
    separate_copies,
)
from openclip_ext.diagnostics.inspect.outputs import Inspection
from openclip_ext.evaluation.command_line import add_columns, given_columns
from openclip_ext.evaluation.encoder import Embeddings
from openclip_ext.files.writing import file_lock, output_path
from openclip_ext.training.parser import add_flag

logger = get_logger(__name__)

_RESULTS = ("index.html", "found.json", "found.csv")
_MUCH = 0.1  # share of excluded samples that causes a warning
_MISFITS = ("misfit-captions", "misfit-images")


@dataclass(frozen=True)
class _Sizes:
    anchors: int = cli_field(100_000, "number of random samples that are compared with all samples", minimum=2)
    show: int = cli_field(30, "number of samples or pairs per category on the page", minimum=0)
    seed: int = cli_field(0, "seed for choosing the random samples")


def main(argv: list[str]) -> None:
    """Inspect the training data of a run; write the findings as HTML, JSON and CSV, and optionally a manifest."""
    args = _parser().parse_args(argv)
    thresholds = from_flags(Thresholds, vars(args))
    if bool(args.leave_out) != (args.write_manifest is not None):
        raise UsageError("--leave-out and --write-manifest need each other: give both flags, or remove both")
    reading = {"device": args.device, "batch_size": args.batch_size, "workers": args.workers}
    columns: dict[str, Any] = {name.replace("img", "image"): value for name, value in given_columns(args).items()}
    if args.pretrained is None and not (args.model or "").startswith(("local-dir:", "hf-hub:")):
        if not os.path.isdir(args.run):
            raise UsageError(
                f"{args.run} is not the folder of a run. To inspect data with a public model, add --model NAME "
                "--pretrained TAG --output FOLDER"
            )
        if columns or args.manifest is not None or args.model is not None:
            raise UsageError("--model, --manifest and --csv-* are for a public model: remove them, or add --pretrained")
        run = load_run(args.run, args.checkpoint, args.train_data, **reading)
    elif args.output is None:
        raise UsageError("a public model needs a folder for the results: add --output FOLDER")
    else:
        spec = DataSpec(args.train_data or str(args.run), manifest=args.manifest, **columns)
        run = load_public(args.model, args.pretrained, spec, args.output, **reading)
    if run.loss.views > 1:
        raise UsageError(f"{run.loss_name} was trained on images without captions: expected a run with captions")
    manifest = _manifest_to_change(run.source, args.write_manifest) if args.leave_out else None
    folder = args.output or run.folder / "inspect" / run.checkpoint.stem
    with file_lock(folder):
        _inspect(run, args, thresholds, manifest, folder)


def _inspect(
    run: FinishedRun, args: argparse.Namespace, thresholds: Thresholds, manifest: Manifest | None, folder: Path
) -> None:
    embeddings = embed_training_set(run, folder)
    order = torch.randperm(len(embeddings.index), generator=torch.Generator().manual_seed(args.seed))
    anchors = order[: args.anchors].sort().values
    difficulty, is_stored = log_normalizers(run.loss, embeddings, anchors, run.encoder.device, run.source.reference)
    by_row = find(embeddings, anchors, difficulty, thresholds, run.encoder.device)
    found = {name: _by_index(rows, embeddings.index.numpy(), name in PAIRS) for name, rows in by_row.items()}
    of_images = [index for name in OF_IMAGES for index in found[name].samples.flatten().tolist()]
    found = separate_copies(found, outputs.image_hashes(run.source, of_images))
    about = _about(run, embeddings, len(anchors), is_stored)
    samples, thumbnails = outputs.read_samples(run.source, found, args.show)
    inspection = Inspection(about, thresholds, found, samples)
    outputs.write_page(folder / _RESULTS[0], inspection, thumbnails, args.show)
    outputs.write_json(folder / _RESULTS[1], inspection)
    outputs.write_csv(folder / _RESULTS[2], inspection)

    for name, value in about.items():
        echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
    for name, category in found.items():
        print(f"{name:<{max(map(len, found))}}  {category.count:>12,}")
    print(f"{folder / _RESULTS[0]} shows the findings; found.json and found.csv list them.")
    if manifest is not None:
        changed = manifest.without(_to_leave_out(found, args.leave_out))
        changed.save(args.write_manifest)
        excluded, kept = len(changed.left_out) - len(manifest.left_out), run.source.num_kept
        if excluded > _MUCH * kept:
            logger.warning(
                f"--leave-out excludes {excluded:,} of {kept:,} samples ({excluded / kept:.0%}): look at the least certain "
                f"pairs in {folder / _RESULTS[0]}, or set a stricter threshold"
            )
        print(
            f"{args.write_manifest} excludes {len(changed.left_out):,} of {changed.num_samples:,} samples ({excluded:,} more "
            "than before). To continue, add --manifest with this file and --resume latest to the training command"
        )


def _categories(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in {*DEFINITIONS, "misfits"}]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: expected one or more of {', '.join(DEFINITIONS)}, misfits")
    return [part for name in names for part in (_MISFITS if name == "misfits" else [name])]


def _manifest_to_change(source: Source, target: Path) -> Manifest:
    """Return the run's manifest. Raise UsageError if the changed manifest cannot be written to ``target``."""
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"--write-manifest {target}: expected a file in an existing folder")
    if not isinstance(source, ShardSource):
        raise UsageError("--write-manifest supports only webdataset shards: exclude the samples of found.csv yourself")
    if target.is_file() and not len(Manifest.load(target).left_out):
        raise UsageError(f"{target} is a manifest of all samples, which other runs may use: choose another name")
    return source.manifest


def _by_index(found: Found, index: np.ndarray, is_pair: bool) -> Found:
    """Replace rows by global indices. In a pair, the smaller index comes first."""
    samples = index[found.samples]
    return replace(found, samples=np.sort(samples, axis=1) if is_pair else samples)


def _about(run: FinishedRun, embeddings: Embeddings, anchors: int, is_stored: bool) -> dict[str, str | int]:
    rows = len(embeddings.index)
    looked_at = f"{anchors:,} drawn at random, each compared with all {rows:,} (--anchors)" if anchors < rows else "all"
    return {
        "run": str(run.folder),
        "checkpoint": run.checkpoint.name,
        "loss": run.loss_name,
        "samples": rows,
        "left out by the manifest": run.source.num_samples - run.source.num_kept,
        "bad": run.source.num_kept - rows,
        "looked at": looked_at,
        "log-normalizers": "stored by the loss" if is_stored else f"exact, over {rows:,} samples",
    }


def _to_leave_out(found: dict[str, Found], names: list[str]) -> set[int]:
    chosen: set[int] = set()
    for name in names:
        category = found[name]
        if len(category.samples) < category.count:
            logger.warning(
                f"{name}: only the {len(category.samples):,} most similar of {category.count:,} pairs are listed and "
                "excluded: increase --max-pairs or the threshold"
            )
        chosen |= category.redundant() if name in PAIRS else set(category.samples[:, 0].tolist())
    return chosen


def _parser() -> argparse.ArgumentParser:
    description = "Find duplicates, false negatives, misfits, hard and easy samples in the training data of a run."
    parser = command_line.Parser(prog="openclip-ext inspect", description=description)
    add_run_arguments(parser)
    public = "pretrained tag or file of a model that was not trained on the data; RUN_FOLDER is then the data"
    parser.add_argument("--pretrained", help=public)
    parser.add_argument(
        "--model", help="OpenCLIP's name of the model of --pretrained, or a model that has weights (hf-hub:NAME)"
    )
    parser.add_argument("--manifest", help="manifest of the data of --pretrained; it may exclude samples")
    add_columns(parser)
    folder = "folder for the results (default: RUN_FOLDER/inspect/CHECKPOINT)"
    parser.add_argument("--output", type=output_path, metavar="FOLDER", help=folder)
    names = (
        f"categories to exclude, separated by commas: {', '.join(DEFINITIONS)}, misfits; one sample per pair is kept"
    )
    parser.add_argument("--leave-out", type=_categories, default=[], metavar="NAMES", help=names)
    file = "file for a manifest that excludes the samples of --leave-out"
    parser.add_argument("--write-manifest", type=output_path, metavar="PATH", help=file)
    for option in own_options([_Sizes, Thresholds]):
        add_flag(parser, option, default=option.default)
    return parser


if __name__ == "__main__":
    command_line.run(main)
