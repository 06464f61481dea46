"""Fit linear probes on frozen features: ``python -m eval.cliplite.probes voc07`` and ``... top1``.

Source: CLIP-Lite, section 4.3, which follows VirTex (Desai and Johnson, 2021).

- ``voc07`` fits a linear SVM for each class on the trainval split, and measures mean average precision on the test split.
  3-fold cross-validation selects the cost with the best average precision. As in VirTex, features have unit norm, and positive
  samples have twice the weight. If VOC marks an image as difficult for a class, the image is a negative of this class in
  training, and is excluded from the class's test.
- ``top1`` fits one multinomial logistic regression over all classes to convergence. The cost is selected on a held-out part of
  the training data. (CLIP-Lite instead trains this classifier with SGD for 100 epochs.)
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import LinearSVC
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.evaluation.command_line import add_model_arguments, load_encoder
from openclip_ext.evaluation.encoder import Encoder, ImageTextModel
from openclip_ext.evaluation.open_tasks import own_task
from openclip_ext.evaluation.samples import Batch, Samples, file_samples
from openclip_ext.evaluation.scoring import Classification
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path, write_text

logger = get_logger(__name__)

SVM_COSTS = (0.01, 0.1, 1.0, 10.0)
LOGISTIC_COSTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FOLDS = 3
PRESENT, DIFFICULT, ABSENT = 1, 0, -1


@dataclass(frozen=True)
class Split:
    """The features and labels of one split.

    ``labels`` are class numbers ``(n,)`` for top-1. For VOC07, they are `PRESENT`, `DIFFICULT` or `ABSENT` ``(n, classes)``.
    """

    features: np.ndarray  # ``(n, d)`` float32
    labels: np.ndarray
    classes: tuple[str, ...]
    skipped: int = 0  # number of images that do not decode


def image_features(model: ImageTextModel, images: Tensor, kind: str) -> Tensor:
    """Return the probe's input: features ``(B, d)`` of images ``(B, 3, H, W)``.

    The ``kind`` ``backbone`` means the pooled features before the projection. For ModifiedResNet, they are the mean of the
    last feature map over all positions, as in CLIP-Lite and VirTex. The ``kind`` ``embedding`` means image embeddings.
    """
    visual: Any = model.visual  # visual towers have no common interface
    if kind == "embedding":
        return model.encode_image(images)
    if hasattr(visual, "layer4"):
        found = visual.forward_intermediates(images, indices=1, intermediates_only=True)
        return found["image_intermediates"][-1].mean(dim=(2, 3))
    if hasattr(visual, "trunk"):
        features = visual.trunk(images)  # timm has already pooled them, except if OpenCLIP added an attention pool
        return features.mean(dim=(2, 3)) if features.dim() == 4 else features
    if hasattr(visual, "proj"):
        projection, visual.proj = visual.proj, None
        try:
            features = visual(images)
        finally:
            visual.proj = projection
        return features[0] if isinstance(features, tuple) else features
    raise UsageError(f"The backbone of a {type(visual).__name__} is unknown. Use --features embedding.")


def read_features(samples: Samples, encoder: Encoder, kind: str) -> Batch:
    """Return the features ``(N, d)`` float32 of images, under ``features``, and their labels, if any, under ``label``."""

    @torch.no_grad()
    def compute(batch: Batch) -> dict[str, Tensor]:
        features = image_features(encoder.model, encoder.model_input(batch.values["image"]), kind).float().cpu()
        if not features.isfinite().all():
            raise ValueError("the model returns non-finite features: its weights are broken or overflow")
        return {"features": features}

    found = encoder.collect(encoder.batches(samples), compute, samples)
    for message in found.skipped.values():
        logger.warning(f"Image skipped: {message}")
    return found


def read_voc(devkit: Path, split: str, encoder: Encoder, kind: str) -> Split:
    """Return the features and labels of a split of Pascal VOC 2007.

    ``devkit`` is ``VOCdevkit/VOC2007`` or its parent. The images are in ``JPEGImages``. Each line of
    ``ImageSets/Main/CLASS_SPLIT.txt`` has an image's name and 1 (present), 0 (difficult) or -1 (absent).
    """
    devkit = devkit / "VOC2007" if (devkit / "VOC2007").is_dir() else devkit
    files = sorted((devkit / "ImageSets" / "Main").glob(f"*_{split}.txt"))
    if not files:
        raise ValueError(f"{devkit} has no ImageSets/Main/*_{split}.txt: expected the folder VOCdevkit/VOC2007.")
    columns = [np.loadtxt(file, dtype=str, ndmin=2) for file in files]
    names = columns[0][:, 0]
    if any(column.shape[1] != 2 or not np.array_equal(column[:, 0], names) for column in columns):
        raise ValueError(
            f"{devkit}: expected all files ImageSets/Main/*_{split}.txt to list the same images with a label"
        )
    labels = np.stack([column[:, 1].astype(np.int8) for column in columns], axis=1)
    paths = [devkit / "JPEGImages" / f"{name}.jpg" for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{devkit / 'JPEGImages'}: {len(missing)} images of {split} not found, such as {missing[0]}")
    # The label of a sample is its row of ``labels``.
    found = read_features(file_samples(split, paths, range(len(paths))), encoder, kind)
    classes = tuple(file.stem.removesuffix(f"_{split}") for file in files)
    rows = labels[found.values["label"].numpy()]
    return Split(found.values["features"].numpy(), rows, classes, len(found.skipped))


def read_labeled(path: Path, encoder: Encoder, kind: str) -> Split:
    """Return the features and labels of class folders, a table of labels, or a data set in DataComp's layout."""
    task = own_task(path)
    if not isinstance(task, Classification):
        raise UsageError(f"{path}: expected labeled images, in one of the formats of openclip-ext evaluate --tasks")
    samples, classes, _ = task.read()
    found = read_features(samples, encoder, kind)
    features, labels = (found.values[name].numpy() for name in ("features", "label"))
    return Split(features, labels, tuple(classes), len(found.skipped))


def probe_voc07(train: Split, test: Split, costs: Sequence[float] = SVM_COSTS) -> dict[str, Any]:
    """Train an SVM for each class (as in VirTex); return each class's average precision and cost, and the mean ``map``."""
    train_features, test_features = normalize(train.features), normalize(test.features)
    per_class, chosen = {}, {}
    svm = LinearSVC(class_weight={True: 2, False: 1}, max_iter=2000, dual="auto", random_state=0)
    for number, name in enumerate(train.classes):
        search = GridSearchCV(svm, {"C": list(costs)}, scoring="average_precision", cv=FOLDS)
        search.fit(train_features, train.labels[:, number] == PRESENT)
        counted = test.labels[:, number] != DIFFICULT
        targets = test.labels[counted, number] == PRESENT
        scores = search.decision_function(test_features[counted])
        chosen[name] = search.best_params_["C"]
        per_class[name] = float(average_precision_score(targets, scores))
    return {"map": float(np.mean(list(per_class.values()))), "per_class": per_class, "costs": chosen}


def limit_samples(split: Split, most: int) -> Split:
    """Return up to ``most`` random samples of each class."""
    order = np.random.default_rng(0).permutation(len(split.labels))
    kept = [order[split.labels[order] == label][:most] for label in np.unique(split.labels)]
    rows = np.sort(np.concatenate(kept))
    return replace(split, features=split.features[rows], labels=split.labels[rows])


def probe_top1(train: Split, test: Split, costs: Sequence[float] = LOGISTIC_COSTS) -> dict[str, Any]:
    """Train a multinomial logistic regression on standardized features.

    Returns the accuracies on both splits, and the selected cost. ``costs`` are values of scikit-learn's ``C``, the inverse of
    the L2 penalty.
    """
    features, labels = train.features, train.labels
    scaler = StandardScaler().fit(features)
    features, test_features = scaler.transform(features), scaler.transform(test.features)

    # Costs are compared on a held-out tenth of the training data, or on as many samples as classes if that is more. Each class
    # has about the same share in both parts. Then a classifier with the best cost is fitted to all training data.
    held_out = StratifiedShuffleSplit(1, test_size=max(len(train.classes), len(labels) // 10), random_state=0)
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": list(costs)}, cv=held_out)
    search.fit(features, labels)
    return {
        "acc1": float(search.score(test_features, test.labels)),
        "train_acc1": float(search.score(features, labels)),
        "costs": {"all": search.best_params_["C"]},
    }


def build_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog=f"python -m {__package__}.probes",
        description="Fit linear probes on frozen features, as in CLIP-Lite and VirTex.",
    )
    probes = parser.add_subparsers(dest="probe", required=True)
    voc07 = probes.add_parser("voc07", help="Pascal VOC 2007: one SVM per class, mean average precision")
    voc07.add_argument("--devkit", type=Path, required=True, help="folder VOCdevkit/VOC2007")
    top1 = probes.add_parser("top1", help="other data, such as ImageNet: logistic regression, top-1 accuracy")
    top1.add_argument("--train", type=Path, required=True, help="training data: class folders, or DataComp's format")
    top1.add_argument("--test", type=Path, required=True, help="test data: class folders, or DataComp's format")
    top1.add_argument(
        "--samples-per-class", type=command_line.count, help="maximum number of training samples per class"
    )
    features_help = "features that the probe receives (default: backbone, the features before the projection)"
    for probe, costs in ((voc07, SVM_COSTS), (top1, LOGISTIC_COSTS)):
        add_model_arguments(probe)
        probe.add_argument("--features", choices=("backbone", "embedding"), default="backbone", help=features_help)
        probe.add_argument("--costs", type=float, nargs="+", default=costs, help=f"costs to compare (default: {costs})")
        probe.add_argument("--output", type=output_path, help="JSON file to write")
    return parser


def main(argv: list[str]) -> None:
    """Compute features, fit a probe to them, and print the results; write them to ``--output`` if it is given."""
    args = build_parser().parse_args(argv)
    opened, encoder = load_encoder(args)
    is_voc = args.probe == "voc07"
    if is_voc:
        train, test = (read_voc(args.devkit, split, encoder, args.features) for split in ("trainval", "test"))
    else:
        train, test = (read_labeled(path, encoder, args.features) for path in (args.train, args.test))
    if train.classes != test.classes:
        different = sorted(set(train.classes) ^ set(test.classes))[:5] or "the same names in another order"
        raise ValueError(f"expected the same classes in training and test data, found differences: {different}")
    if not is_voc and args.samples_per_class is not None:
        train = limit_samples(train, args.samples_per_class)
    result = (probe_voc07 if is_voc else probe_top1)(train, test, args.costs)
    report = {
        "probe": args.probe,
        **result,
        **opened.origin,
        "features": args.features,
        "dimensions": train.features.shape[1],
        "train_images": len(train.labels),
        "test_images": len(test.labels),
        "skipped_images": train.skipped + test.skipped,
    }
    text = json_lines.dumps(report, indent=2)
    print(text)
    if args.output:
        write_text(args.output, text + "\n")


if __name__ == "__main__":
    command_line.run(main)
