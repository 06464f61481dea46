"""Linear probes on frozen features: ``python -m eval.cliplite.probes voc07`` and ``python -m eval.cliplite.probes top1``.

Source: CLIP-Lite, section 4.3, which follows VirTex (Desai and Johnson, 2021).

- VOC07: per class a linear SVM on the trainval split, its cost chosen from {0.01, 0.1, 1, 10} by 3-fold
  cross-validation of average precision; mean average precision on the test split. As in VirTex, features have unit
  length, positives weigh twice, and images where an object is marked difficult count as negatives in training and are
  left out of the test.
- Top-1: one multinomial logistic regression over all classes, trained to convergence; its cost is chosen on a part of
  the training data. CLIP-Lite trains the same classifier with SGD for 100 epochs.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import LinearSVC
from torch import Tensor

from ..command_line import add_model_arguments, load_encoder, run_command
from ..data import CLASSNAMES_FILE, Batch, SampleFormat, find_shards, read_lines
from ..features import Collected, Encoder
from ..models import ImageTextModel, ModelError
from .image_files import list_images, read_images
from .logistic import TorchLogisticRegression

SVM_COSTS = (0.01, 0.1, 1.0, 10.0)
LOGISTIC_COSTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FOLDS = 3
SOLVERS = ("scikit-learn", "torch")
PRESENT, DIFFICULT, ABSENT = 1, 0, -1


@dataclass(frozen=True)
class Split:
    """Features of one split.

    Attributes:
        features: ``(n, d)`` float32.
        labels: top-1: ``(n,)`` class numbers; VOC07: ``(n, classes)`` of `PRESENT`, `DIFFICULT`, `ABSENT`.
        classes: their names.
        skipped: number of images that do not decode and are left out.
    """

    features: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    skipped: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        metrics: by name.
        per_class: average precision by class (VOC07 only).
        costs: the chosen cost, by class for VOC07.
    """

    metrics: dict[str, float]
    per_class: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)


def feature_function(model: ImageTextModel, kind: str) -> Callable[[Tensor], Tensor]:
    """Return the function from images ``(B, 3, H, W)`` to the features ``(B, d)`` to probe.

    Args:
        model: an OpenCLIP model.
        kind: ``backbone``, the pooled features in front of the projection (for ModifiedResNet the global average of its
            last map, as in the papers); ``embedding``, the features that are compared with texts.

    Raises:
        ModelError: if this tower's backbone is not known.
    """
    visual: Any = model.visual  # one of several classes without a common interface

    def last_map(images: Tensor) -> Tensor:
        found = visual.forward_intermediates(images, indices=1, intermediates_only=True)
        return found["image_intermediates"][-1].mean(dim=(2, 3))

    def pooled(images: Tensor) -> Tensor:
        features = visual.trunk(images)  # pools by itself, unless OpenCLIP put an attention pool behind it
        return features.mean(dim=(2, 3)) if features.dim() == 4 else features

    def without_projection(images: Tensor) -> Tensor:
        projection, visual.proj = visual.proj, None
        try:
            features = visual(images)
        finally:
            visual.proj = projection
        return features[0] if isinstance(features, tuple) else features

    if kind == "embedding":
        return model.encode_image
    if hasattr(visual, "layer4") and hasattr(visual, "forward_intermediates"):
        return last_map
    if hasattr(visual, "trunk"):
        return pooled
    if hasattr(visual, "proj"):
        return without_projection
    raise ModelError(
        f"The backbone's features of a {type(visual).__name__} are not known; --features embedding works with any."
    )


@torch.no_grad()
def extract(batches: Iterator[Batch], encoder: Encoder, kind: str, name: str, total: int | None = None) -> Collected:
    """Compute the ``features`` ``(n, d)`` float32 of a data set's images, in order, with ``order`` and ``label``.

    Args:
        batches: of the data set.
        encoder: the model.
        kind: ``backbone`` or ``embedding``.
        name: of the data set.
        total: number of images, for the progress bar.

    Raises:
        ValueError: if no image decodes, or features are not finite.
    """
    function = feature_function(encoder.model, kind)

    def compute(batch: Batch) -> dict[str, Tensor]:
        features = function(encoder.model_input(batch.images)).float().cpu()
        return {"features": features, "order": batch.order, **({} if batch.labels is None else {"label": batch.labels})}

    found = encoder.collect(batches, compute, name, total)
    for entry in found.skipped:
        logging.warning(f"left out: {entry}")
    if not found.values["features"].isfinite().all():
        raise ValueError("the model gives features that are not finite: its weights are broken or overflow")
    return found


def read_voc(devkit: Path, split: str, encoder: Encoder, kind: str) -> Split:
    """Read features and labels of a split of Pascal VOC 2007.

    Args:
        devkit: ``VOCdevkit/VOC2007`` (or the folder above it), with ``ImageSets/Main/CLASS_SPLIT.txt`` (a line an
            image: its name and 1, 0 for difficult, or -1) and ``JPEGImages``.
        split: ``trainval`` or ``test``.
        encoder: the model.
        kind: ``backbone`` or ``embedding``.

    Raises:
        ValueError: if files are missing or not as described.
    """
    devkit = devkit / "VOC2007" if (devkit / "VOC2007").is_dir() else devkit
    files = sorted((devkit / "ImageSets" / "Main").glob(f"*_{split}.txt"))
    if not files:
        raise ValueError(f"{devkit} has no ImageSets/Main/*_{split}.txt: expected the folder VOCdevkit/VOC2007.")
    columns = [_read_class(file) for file in files]
    names = list(columns[0])
    if any(column.keys() != columns[0].keys() for column in columns):
        raise ValueError(f"the class files of {split} in {devkit} do not list the same images")
    labels = np.array([[column[name] for column in columns] for name in names], dtype=np.int8)
    paths = [devkit / "JPEGImages" / f"{name}.jpg" for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"{devkit / 'JPEGImages'} lacks {len(missing)} images of {split}, among them {missing[0]}")
    return _split_of_files(paths, labels, [file.stem.removesuffix(f"_{split}") for file in files], encoder, kind)


def _read_class(file: Path) -> dict[str, int]:
    labels = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if fields and (len(fields) != 2 or fields[1] not in ("1", "0", "-1")):
            raise ValueError(f"{file}, line {number}: expected an image and 1, 0 or -1, found {line!r}")
        if fields:
            labels[fields[0]] = int(fields[1])
    return labels


def _split_of_files(
    paths: Sequence[Path], labels: np.ndarray, classes: Sequence[str], encoder: Encoder, kind: str
) -> Split:
    found = extract(read_images(paths, encoder), encoder, kind, "features", len(paths))
    return Split(
        found.values["features"].numpy(), labels[found.values["order"].numpy()], tuple(classes), len(found.skipped)
    )


def read_labelled(path: Path, encoder: Encoder, kind: str) -> Split:
    """Read features and labels of a folder of class folders (ImageFolder), or of a set in DataComp's format.

    Raises:
        ValueError: if the folder is neither, or damaged.
    """
    if (path / CLASSNAMES_FILE).is_file():
        classes = read_lines(path / CLASSNAMES_FILE, "class names")
        found = extract(encoder.batches(find_shards(path), SampleFormat(len(classes))), encoder, kind, path.name)
        values = found.values
        return Split(values["features"].numpy(), values["label"].numpy(), tuple(classes), len(found.skipped))
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    if not folders:
        raise ValueError(f"{path} is neither a folder of class folders nor a set in DataComp's format.")
    files = [(number, file) for number, folder in enumerate(folders) for file in list_images(folder)]
    labels = np.array([number for number, _ in files])
    return _split_of_files([file for _, file in files], labels, [folder.name for folder in folders], encoder, kind)


def probe_voc07(train: Split, test: Split, costs: Sequence[float] = SVM_COSTS) -> ProbeResult:
    """Train per-class linear SVMs and compute their mean average precision.

    Args:
        train: as `read_voc` returns it.
        test: of the same classes.
        costs: to choose from, per class.

    Returns:
        ``map`` (area under the precision-recall curve, as VirTex reports), ``map_11point`` (VOC2007's own definition).

    Raises:
        ValueError: if a class has too few examples for cross-validation, or none in the test.
    """
    _check_classes(train, test)
    for name, present, shown in zip(train.classes, train.labels.T == PRESENT, test.labels.T == PRESENT, strict=True):
        if min(present.sum(), (~present).sum()) < FOLDS:
            raise ValueError(
                f"class {name} has {present.sum()} positives among {len(present)} training images; "
                f"{FOLDS}-fold cross-validation needs {FOLDS} of either kind"
            )
        if not shown.any():
            raise ValueError(f"class {name} has no positives in the test split, so no average precision")
    train_features, test_features = normalize(train.features), normalize(test.features)
    per_class, eleven_point, chosen = {}, {}, {}
    svm = LinearSVC(class_weight={True: 2, False: 1}, max_iter=2000, dual="auto", random_state=0)
    for number, name in enumerate(train.classes):
        search = GridSearchCV(svm, {"C": list(costs)}, scoring="average_precision", cv=FOLDS)
        search.fit(train_features, train.labels[:, number] == PRESENT)
        counted = test.labels[:, number] != DIFFICULT
        targets = test.labels[counted, number] == PRESENT
        scores = search.decision_function(test_features[counted])
        chosen[name] = search.best_params_["C"]
        per_class[name] = float(average_precision_score(targets, scores))
        eleven_point[name] = eleven_point_precision(targets, scores)
    means = {"map": per_class, "map_11point": eleven_point}
    return ProbeResult({name: float(np.mean(list(of.values()))) for name, of in means.items()}, per_class, chosen)


def eleven_point_precision(targets: np.ndarray, scores: np.ndarray) -> float:
    """Compute VOC2007's average precision: the mean, over recalls 0, 0.1, ..., 1, of the best precision from there on.

    Args:
        targets: ``(n,)`` bool, at least one true.
        scores: ``(n,)``.
    """
    ranked = targets[np.argsort(-scores, kind="stable")]
    hits = np.cumsum(ranked)
    precision, recall = hits / np.arange(1, len(ranked) + 1), hits / hits[-1]
    # A tenth is no binary fraction: without the margin, recall 0.3 would miss the level 3/10.
    return float(np.mean([precision[recall >= level / 10 - 1e-9].max() for level in range(11)]))


def probe_top1(
    train: Split,
    test: Split,
    costs: Sequence[float] = LOGISTIC_COSTS,
    samples_per_class: int | None = None,
    max_iterations: int = 1000,
    solver: str = "scikit-learn",
    device: str | torch.device = "cpu",
) -> ProbeResult:
    """Train a multinomial logistic regression on standardised features.

    Args:
        train: as `read_labelled` returns it.
        test: of the same classes.
        costs: scikit-learn's C, the inverse of the weight decay; the best on a tenth of the training data is taken.
        samples_per_class: train on at most this many a class; None: on all.
        max_iterations: of L-BFGS.
        solver: ``scikit-learn``, or ``torch`` for data of ImageNet's size: the same classifier, in float32 on `device`.
        device: of the solver ``torch``.

    Returns:
        ``acc1`` and ``train_acc1``.

    Raises:
        ValueError: if the splits have other classes, or a class has fewer than two training images.
    """
    _check_classes(train, test)
    features, labels = train.features, train.labels
    if samples_per_class is not None:
        order = np.random.default_rng(0).permutation(len(labels))
        kept = [order[labels[order] == label][:samples_per_class] for label in np.unique(labels)]
        kept_rows = np.sort(np.concatenate(kept))
        features, labels = features[kept_rows], labels[kept_rows]
    counts = np.bincount(labels, minlength=len(train.classes))
    if counts.min() < 2:
        raise ValueError(
            f"class {train.classes[int(counts.argmin())]} has {counts.min()} training images, expected at least 2"
        )
    scaler = StandardScaler().fit(features)
    features, test_features = scaler.transform(features), scaler.transform(test.features)

    def classifier_of(cost: float) -> LogisticRegression | TorchLogisticRegression:
        if solver == "torch":
            return TorchLogisticRegression(cost, max_iterations, device)
        return LogisticRegression(C=cost, max_iter=max_iterations)

    cost = costs[0]
    if len(costs) > 1:  # the best on a held-out tenth, which has every class in it
        held_out = max(len(counts), len(labels) // 10)
        split = train_test_split(features, labels, test_size=held_out, stratify=labels, random_state=0)
        train_x, valid_x, train_y, valid_y = split
        scores = [classifier_of(cost).fit(train_x, train_y).score(valid_x, valid_y) for cost in costs]
        cost = costs[int(np.argmax(scores))]
    classifier = classifier_of(cost).fit(features, labels)
    metrics = {
        "acc1": float(np.mean(classifier.predict(test_features) == test.labels)),
        "train_acc1": float(np.mean(classifier.predict(features) == labels)),
    }
    return ProbeResult(metrics, costs={"all": cost})


def _check_classes(train: Split, test: Split) -> None:
    if train.classes != test.classes:
        different = sorted(set(train.classes) ^ set(test.classes))[:5] or "the same names in another order"
        raise ValueError(
            f"the training data has {len(train.classes)} classes, the test data {len(test.classes)}; "
            f"they differ in {different}"
        )


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.probes",
        description="Linear probes on frozen features, as in CLIP-Lite and VirTex.",
    )
    probes = parser.add_subparsers(dest="probe", required=True)
    voc07 = probes.add_parser("voc07", help="Pascal VOC 2007: an SVM a class, mean average precision")
    voc07.add_argument("--devkit", type=Path, required=True, help="folder VOCdevkit/VOC2007")
    top1 = probes.add_parser("top1", help="ImageNet and the like: logistic regression, top-1 accuracy")
    top1.add_argument("--train", type=Path, required=True, help="data to train on: class folders, or DataComp's format")
    top1.add_argument("--test", type=Path, required=True, help="data to test on: class folders, or DataComp's format")
    top1.add_argument("--samples-per-class", type=int, help="train on at most this many a class")
    top1.add_argument("--max-iterations", type=int, default=1000, help="of L-BFGS (default: %(default)s)")
    top1.add_argument(
        "--solver",
        choices=SOLVERS,
        default=SOLVERS[0],
        help="torch: the same classifier in float32 on --device, for data of ImageNet's size (default: %(default)s)",
    )
    for probe, costs in ((voc07, SVM_COSTS), (top1, LOGISTIC_COSTS)):
        add_model_arguments(probe)
        kinds = ("backbone", "embedding")
        probe.add_argument("--features", choices=kinds, default="backbone", help="default: before the projection")
        probe.add_argument("--costs", type=float, nargs="+", default=costs, help=f"default: {costs}")
        probe.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    warnings.filterwarnings("once", category=ConvergenceWarning)
    return run_command(probe, build_parser().parse_args(argv))


def probe(args: argparse.Namespace) -> None:
    """Compute the features, run a probe on them, and print or write the report.

    Raises:
        ValueError: for wrong data or options.
    """
    loaded, encoder = load_encoder(args)
    if args.probe == "voc07":
        train, test = (read_voc(args.devkit, split, encoder, args.features) for split in ("trainval", "test"))
        result = probe_voc07(train, test, args.costs)
    else:
        train, test = (read_labelled(path, encoder, args.features) for path in (args.train, args.test))
        options = (args.samples_per_class, args.max_iterations, args.solver, encoder.device)
        result = probe_top1(train, test, args.costs, *options)
    report = {
        "probe": args.probe,
        **result.metrics,
        "per_class": result.per_class,
        "costs": result.costs,
        **loaded.origin,
        "features": args.features,
        "dimensions": train.features.shape[1],
        "train_images": len(train.labels),
        "test_images": len(test.labels),
        "skipped_images": train.skipped + test.skipped,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
