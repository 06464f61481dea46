"""The program: ``openclip-ext inspect RUN_FOLDER``."""

import argparse
import logging
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openclip_ext.data.manifest import Manifest
from openclip_ext.data.shards import ShardSource
from openclip_ext.data.source import Source
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.finished_run import Embeddings, FinishedRun, load_run, stored_embeddings
from openclip_ext.diagnostics.inspect import report
from openclip_ext.diagnostics.inspect.findings import DEFINITIONS, PAIRS, Found, Thresholds, find, log_normalizers
from openclip_ext.diagnostics.inspect.report import Inspection
from openclip_ext.training.errors import UsageError

DEFAULT_ANCHORS = 100_000
_MISFITS = ("misfit-captions", "misfit-images")


def main(argv: list[str]) -> None:
    """Inspect the training data of a run; write a page, JSON and CSV, and a manifest if asked to.

    Raises:
        UsageError: there is no such run or checkpoint, its state or its data are gone, it has no use of captions, or an
            argument is wrong.
    """
    args = _parser().parse_args(argv)
    leave_out = _categories(args.leave_out)
    thresholds = Thresholds(**{field.name: getattr(args, field.name) for field in fields(Thresholds)})
    if bool(leave_out) != (args.write_manifest is not None):
        raise UsageError("--leave-out says what, and --write-manifest where to: give both or none")
    if args.anchors < 2:
        raise UsageError(f"--anchors is {args.anchors}, must be at least 2")
    _check_target(args.write_manifest)
    if not args.deviations >= 0 or args.show < 0:
        raise UsageError(f"--deviations {args.deviations:g}, --show {args.show}: expected 0 or more")
    device = torch.device(args.device)
    run = load_run(Path(args.run), args.checkpoint, device, args.train_data, args.workers, args.batch_size)
    if run.loss.views > 1:
        raise UsageError(f"{run.loss_name} was trained on images alone: nothing is known of the captions")
    manifest = _manifest_to_change(run.source, Path(args.write_manifest)) if leave_out else None
    folder = Path(args.output) if args.output else run.folder / "inspect"

    batches = math.ceil(run.source.num_kept / run.loader.batch_size)
    embeddings = stored_embeddings(
        run, folder, partial(command_line.progress_bar, desc="embedding", unit="batch", total=batches)
    )
    anchors = _draw_anchors(len(embeddings.index), args.anchors, args.seed)
    difficulty, is_stored = log_normalizers(run.loss, embeddings, anchors, device)
    by_row = find(embeddings, anchors, difficulty, thresholds, device)
    found = {name: _by_index(rows, embeddings.index.numpy(), name in PAIRS) for name, rows in by_row.items()}
    about = _about(run, embeddings, len(anchors), is_stored)
    inspection = Inspection(about, thresholds, found, report.read_samples(run.source, report.shown_indices(found)))
    thumbnails = report.read_thumbnails(run.source, report.shown_indices(found, args.show))
    report.write_page(folder / "index.html", inspection, thumbnails, args.show)
    report.write_json(folder / "found.json", inspection)
    report.write_csv(folder / "found.csv", inspection)

    print(_table(about, found))
    print(f"{folder / 'index.html'} shows them; found.json and found.csv list them.")
    if manifest is not None:
        changed = manifest.without(_to_leave_out(found, leave_out))
        changed.save(args.write_manifest)
        print(_about_manifest(args.write_manifest, manifest, changed, run.global_batch))


def _check_target(manifest: str | None) -> None:
    """Whether the file can be written, before the long work."""
    if manifest is None:
        return
    if not Path(manifest).parent.is_dir():
        raise UsageError(f"--write-manifest {manifest}: there is no folder {Path(manifest).parent}")
    if Path(manifest).is_dir():
        raise UsageError(
            f"--write-manifest {manifest} is a folder: give a file, such as {Path(manifest) / 'fewer.json'}"
        )


def _categories(text: str | None) -> tuple[str, ...]:
    """Names separated by commas; ``misfits`` is both of them."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    names = [part for name in names for part in (_MISFITS if name == "misfits" else [name])]
    unknown = [name for name in names if name not in DEFINITIONS]
    if unknown:
        raise UsageError(f"--leave-out {unknown[0]}: expected some of {', '.join(DEFINITIONS)}, misfits")
    return tuple(dict.fromkeys(names))


def _manifest_to_change(source: Source, target: Path) -> Manifest:
    if not isinstance(source, ShardSource):
        raise UsageError(
            "--write-manifest needs webdataset shards: of other data, take the rows in found.csv out yourself"
        )
    if target.is_file() and not len(Manifest.load(target).left_out):
        raise UsageError(f"{target} is a manifest of all samples, which other runs may use: choose another name")
    return source.manifest


def _draw_anchors(rows: int, anchors: int, seed: int) -> Tensor:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return order[:anchors].sort().values


def _by_index(found: Found, index: np.ndarray, is_pair: bool) -> Found:
    """Global indices instead of rows; of pairs the smaller one first."""
    sample = index[found.sample]
    if found.partner is None:
        return replace(found, sample=sample)
    partner = index[found.partner]
    if is_pair:
        sample, partner = np.minimum(sample, partner), np.maximum(sample, partner)
    return replace(found, sample=sample, partner=partner)


def _about(run: FinishedRun, embeddings: Embeddings, anchors: int, is_stored: bool) -> dict[str, str | int]:
    rows = len(embeddings.index)
    looked_at = f"{anchors:,} drawn at random, each compared with all {rows:,} (--anchors)" if anchors < rows else "all"
    return {
        "run": str(run.folder),
        "checkpoint": run.checkpoint.name,
        "loss": run.loss_name,
        "samples": rows,
        "left out by the manifest": run.num_samples - run.source.num_kept,
        "bad": run.source.num_kept - rows,
        "looked at": looked_at,
        "log-normalizers": "stored by the loss" if is_stored else f"exact, over {rows:,} samples",
    }


def _table(about: dict[str, str | int], found: dict[str, Found]) -> str:
    lines = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in about.items()]
    width = max(map(len, found))
    lines += [f"{name:<{width}}  {category.count:>12,}" for name, category in found.items()]
    return "\n".join(lines)


def _to_leave_out(found: dict[str, Found], names: tuple[str, ...]) -> set[int]:
    chosen: set[int] = set()
    for name in names:
        category = found[name]
        if len(category.sample) < category.count:
            logging.warning(
                f"{name}: only the {len(category.sample):,} most similar of {category.count:,} pairs are listed, and no "
                "others lead to samples that are left out: raise --max-pairs or the threshold"
            )
        chosen |= category.redundant() if name in PAIRS else set(category.sample.tolist())
    return chosen


def _about_manifest(path: str, before: Manifest, after: Manifest, global_batch: int) -> str:
    kept = [manifest.num_samples - len(manifest.left_out) for manifest in (before, after)]
    batches = [f"{samples // global_batch:,}" for samples in kept]
    return (
        f"{path} leaves out {len(after.left_out):,} of {after.num_samples:,} samples ({kept[0] - kept[1]:,} more than "
        f"before); no index changes. An epoch has {batches[1]} batches of {global_batch:,} instead of {batches[0]}. Go on "
        f"with the run's command line and --manifest {path} --resume latest if the latest checkpoint is the end of an epoch, "
        "else with another --name and --resume CHECKPOINT"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openclip-ext inspect",
        description="Duplicates, false negatives, misfits, hard and easy samples in the training data of a run.",
    )
    command_line.add_run_arguments(parser)
    parser.add_argument(
        "--output",
        default=None,
        metavar="FOLDER",
        help="for what is written (default: RUN_FOLDER/inspect)",
    )
    parser.add_argument(
        "--leave-out",
        default=None,
        metavar="NAMES",
        help=f"categories, separated by commas: {', '.join(DEFINITIONS)}, misfits. Of a pair, the first sample stays",
    )
    parser.add_argument("--write-manifest", default=None, metavar="PATH", help="a manifest without them, to go on with")
    parser.add_argument(
        "--anchors",
        type=int,
        default=DEFAULT_ANCHORS,
        help="samples to look at, drawn at random; each is compared with all (default: %(default)s)",
    )
    parser.add_argument("--show", type=int, default=30, help="of each category on the page (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the anchors (default: %(default)s)")
    thresholds = parser.add_argument_group("thresholds")
    for name, text in _THRESHOLD_HELP.items():
        default = getattr(Thresholds, name)
        flag = "--" + name.replace("_", "-")
        thresholds.add_argument(flag, type=type(default), default=default, help=f"{text} (default: %(default)s)")
    return parser


_THRESHOLD_HELP = {
    "duplicate_image": "smallest cosine similarity of duplicate images",
    "duplicate_caption": "smallest cosine similarity of duplicate captions",
    "false_negative_quantile": "quantile of the own pairs' similarities that a false negative reaches; 0: no such limit",
    "deviations": "standard deviations from the median to the best similarity of a misfit",
    "extremes": "number of the hardest samples, and of the easiest",
    "max_pairs": "pairs of a category to list, the most similar ones; all are counted",
}


if __name__ == "__main__":
    command_line.run(main)
