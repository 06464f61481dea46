"""Linear probes: features, results (compared with scikit-learn's), and the command with all data formats."""

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import LinearSVC

from eval.cliplite.probes import (
    ABSENT,
    DIFFICULT,
    PRESENT,
    SVM_COSTS,
    Split,
    image_features,
    main,
    probe_top1,
    probe_voc07,
)
from openclip_ext.cli.errors import UsageError
from tests.evaluation import datasets

CLASSES = ("cat", "dog", "owl")


def build(folder: Path, name: str, **vision: object) -> torch.nn.Module:
    open_clip.add_model_config(datasets.tiny_model_config(folder, name, **vision))
    torch.manual_seed(0)
    return open_clip.create_model(name).eval()


@torch.no_grad()
def test_backbone_features_are_those_in_front_of_the_projection(tmp_path: Path) -> None:
    images = torch.randn(3, 3, 64, 64)
    resnet = build(tmp_path, "probe-resnet", layers=[1, 1, 1, 1], width=8, patch_size=None, image_size=64)
    maps = resnet.visual.layer4(
        resnet.visual.layer3(resnet.visual.layer2(resnet.visual.layer1(resnet.visual.stem(images))))
    )
    features = image_features(resnet, images, "backbone")
    torch.testing.assert_close(features, maps.mean(dim=(2, 3)))
    assert features.shape == (3, 256)

    vit = build(tmp_path, "probe-vit")
    small = images[:, :, :32, :32]
    features = image_features(vit, small, "backbone")
    assert features.shape == (3, 32)
    torch.testing.assert_close(features @ vit.visual.proj, vit.encode_image(small))
    torch.testing.assert_close(image_features(vit, small, "embedding"), vit.encode_image(small))

    for pool in ("avg", "abs_attn"):  # OpenCLIP's attention pool receives maps, which the probe averages
        vision = {"timm_model_name": "resnet10t", "timm_pool": pool, "timm_proj": "linear", "image_size": 64}
        convnet = build(tmp_path, f"probe-timm-{pool}", **vision)
        found, maps = image_features(convnet, images, "backbone"), convnet.visual.trunk.forward_features(images)
        torch.testing.assert_close(found, maps.mean(dim=(2, 3)))

    vit.visual = torch.nn.Identity()
    with pytest.raises(UsageError, match="Use --features embedding"):
        image_features(vit, small, "backbone")


def voc_splits(seed: int = 0, size: int = 90) -> tuple[Split, Split]:
    """Return a training and a test split with 12 features. A sample has zero to three classes; each adds a direction."""
    generator = np.random.default_rng(seed)
    directions = generator.standard_normal((3, 12))
    splits = []
    for _ in range(2):
        present = generator.random((size, 3)) < 0.35
        features = present @ directions + 1.5 * generator.standard_normal((size, 12))
        labels = np.where(present, PRESENT, ABSENT).astype(np.int8)
        splits.append(Split(features.astype(np.float32), labels, CLASSES))
    return splits[0], splits[1]


def test_voc_protocol_against_scikit_learn() -> None:
    train, test = voc_splits()
    result = probe_voc07(train, test)
    unit = [split.features / np.linalg.norm(split.features, axis=1, keepdims=True) for split in (train, test)]
    precisions = []
    for number, name in enumerate(CLASSES):
        search = GridSearchCV(
            LinearSVC(class_weight={0: 1, 1: 2}, max_iter=2000, random_state=0),
            {"C": list(SVM_COSTS)},
            scoring="average_precision",
            cv=StratifiedKFold(3),
        )
        search.fit(unit[0], (train.labels[:, number] == PRESENT).astype(int))
        assert result["costs"][name] == search.best_params_["C"]
        precisions.append(search.score(unit[1], (test.labels[:, number] == PRESENT).astype(int)))
        assert result["per_class"][name] == pytest.approx(precisions[-1], abs=1e-12)
    assert result["map"] == pytest.approx(np.mean(precisions), abs=1e-12)
    assert 0.4 < result["map"] < 1
    assert len(set(result["costs"].values())) > 1  # expected classes with different best costs


def test_difficult_images_are_negatives_in_training_and_left_out_of_the_test() -> None:
    train, test = voc_splits()
    base = probe_voc07(train, test)
    difficult = train.labels.copy()
    difficult[train.labels == ABSENT] = DIFFICULT
    assert probe_voc07(Split(train.features, difficult, CLASSES), test) == base
    # A wrong prediction for an excluded test image has no effect.
    labels, features = test.labels.copy(), test.features.copy()
    labels[0, :], features[0] = DIFFICULT, 100.0
    ignored = probe_voc07(train, Split(features, labels, CLASSES))
    assert ignored == probe_voc07(train, Split(test.features[1:], test.labels[1:], CLASSES))


def test_top1_probe_learns_digits() -> None:
    digits = load_digits()
    images, labels = digits.data.astype(np.float32), digits.target
    names = tuple(map(str, range(10)))
    train, test = Split(images[:1200], labels[:1200], names), Split(images[1200:], labels[1200:], names)
    result = probe_top1(train, test, costs=(1e-5, 1e-2))
    # scikit-learn's logistic regression on standardized pixels reaches 0.92; chance is 0.1.
    assert result["costs"] == {"all": 1e-2} and result["acc1"] > 0.88
    assert probe_top1(train, test, costs=(1e-5,))["acc1"] < result["acc1"]


def write_devkit(folder: Path, per_split: int = 40) -> Path:
    """Write a VOC devkit with digits. Its classes are ``even`` and ``small`` (below 5); some digits are marked difficult."""
    devkit = folder / "VOCdevkit" / "VOC2007"
    (devkit / "ImageSets" / "Main").mkdir(parents=True)
    (devkit / "JPEGImages").mkdir()
    images, labels = datasets.digit_images(2 * per_split)
    for start, split in ((0, "trainval"), (per_split, "test")):
        lines: dict[str, list[str]] = {"even": [], "small": []}
        for number in range(start, start + per_split):
            images[number].save(devkit / "JPEGImages" / f"{number:06d}.jpg")
            for name, shown in (("even", labels[number] % 2 == 0), ("small", labels[number] < 5)):
                label = 0 if number % 17 == 16 else 1 if shown else -1
                lines[name].append(f"{number:06d} {label:2d}")
        for name, content in lines.items():
            (devkit / "ImageSets" / "Main" / f"{name}_{split}.txt").write_text("\n".join(content) + "\n")
    return devkit


def test_voc_command(tmp_path: Path, model_arguments: list[str]) -> None:
    devkit = write_devkit(tmp_path)
    output = tmp_path / "voc.json"
    main(["voc07", *model_arguments, "--devkit", str(devkit.parent), "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["train_images"] == report["test_images"] == 40 and report["dimensions"] == 32
    assert set(report["per_class"]) == set(report["costs"]) == {"even", "small"}
    assert report["map"] == pytest.approx(np.mean(list(report["per_class"].values())))
    assert set(report["costs"].values()) <= set(SVM_COSTS) and report["skipped_images"] == 0
    (devkit / "JPEGImages" / "000003.jpg").write_bytes(b"\xff\xd8")
    main(["voc07", *model_arguments, "--devkit", str(devkit), "--output", str(output)])
    report = json.loads(output.read_text())
    assert (report["train_images"], report["skipped_images"]) == (39, 1)


def test_top1_command(tmp_path: Path, model_arguments: list[str]) -> None:
    datasets.write_class_folders(tmp_path / "train", 300, lambda label: datasets.DIGIT_NAMES[label], seed=1)
    datacomp = datasets.make_task(tmp_path, "mnist", count=60)
    output = tmp_path / "top1.json"
    # Class folders are sorted by name, but DataComp's class names are not. The labels would not match, so this is an error.
    arguments = ["top1", *model_arguments, "--train", str(tmp_path / "train"), "--test", str(datacomp)]
    with pytest.raises(ValueError, match="another order"):
        main(arguments)
    for number, name in enumerate(datasets.DIGIT_NAMES):
        (tmp_path / "train" / name).rename(tmp_path / "train" / str(number))
    (datacomp / "classnames.txt").write_text("".join(f"{number}\n" for number in range(10)))
    main([*arguments, "--costs", "0.01", "--output", str(output)])
    report = json.loads(output.read_text())
    assert (report["train_images"], report["test_images"], report["costs"]) == (300, 60, {"all": 0.01})
    assert report["acc1"] > 0.3  # features of an untrained model are poor; chance is 0.1
    main([*arguments, "--costs", "10", "--samples-per-class", "4", "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["train_images"] == 40 and report["train_acc1"] == 1.0 > report["acc1"]
    with pytest.raises(SystemExit):  # a negative number would remove samples of each class
        main([*arguments, "--samples-per-class", "-1"])
