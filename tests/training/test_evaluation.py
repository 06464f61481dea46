"""Validation metrics equal OpenCLIP's, ImageNet accuracies equal scikit-learn's, and wrong class folders are rejected."""

import logging
import re
import shutil
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import top_k_accuracy_score
from timm.data import ImageNetInfo
from torch import nn

from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.open_tasks import imagenet_task
from openclip_ext.evaluation.ranks import retrieval_metrics
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.validation import Validation
from tests.data.shards import image_bytes
from tests.training.runs import evaluation, results_of, run, small_command


def unit_rows(count: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator), dim=1)


def test_retrieval_metrics_equal_openclips():
    from open_clip_train.train import get_clip_metrics

    images = unit_rows(150, 8, seed=0)
    texts = F.normalize(images + 1.0 * unit_rows(150, 8, seed=1), dim=1)
    ours = retrieval_metrics(images, texts)
    theirs = get_clip_metrics(images, texts, torch.tensor(100.0))
    assert set(theirs) == set(ours)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(float(value)), name
    assert 0.1 < ours["image_to_text_R@1"] < 0.9  # between 0 and 1, so the comparison above is meaningful


class ToyModel(nn.Module):
    """A captioner that returns its inputs as features. As under autocast, the logits of its one token have 16 bits."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        features = {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}
        return features | {"logits": image[:, None].bfloat16(), "labels": text.argmax(dim=1, keepdim=True)}


def test_validation_averages_the_loss_over_samples_of_unequal_batches():
    images, texts = unit_rows(10, 4, seed=2), unit_rows(10, 4, seed=3)
    rows = torch.arange(10)
    batches = [
        {"image": images[part], "text": texts[part], "image_hash": rows[part], "caption_hash": rows[part]}
        for part in (slice(0, 8), slice(8, 10))
    ]
    metrics = Validation(batches).score(Encoder(ToyModel().eval(), None, None, torch.device("cpu")))
    expected = 0.0
    for rows in (slice(0, 8), slice(8, 10)):
        logits = torch.exp(torch.tensor(2.0)) * images[rows] @ texts[rows].T
        labels = torch.arange(len(logits))
        expected += float(F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2 * len(logits)
    assert metrics["clip_val_loss"] == pytest.approx(expected / 10, rel=1e-6)
    assert metrics["num_samples"] == 10
    expected = float(F.cross_entropy(images.bfloat16().float(), texts.argmax(dim=1)))
    assert metrics["val_generative_loss"] == pytest.approx(expected, rel=1e-6)


def write_pairs(path: Path, images: list[int], captions: list[str]) -> str:
    """Write a CSV file with a row per pair; rows with the same number of an image have copies of one file."""
    lines = ["filepath\ttitle"]
    for row, (number, caption) in enumerate(zip(images, captions, strict=True)):
        image = path.with_name(f"{path.stem}_{row}.jpg")
        image.write_bytes(image_bytes(number))
        lines.append(f"{image}\t{caption}")
    path.write_text("\n".join(lines))
    return str(path)


def test_equal_captions_and_images_are_right_answers_in_validation(tmp_path, caplog):
    """Each of two images occurs with each of two captions, so no answer is wrong, even of an untrained model."""
    path = write_pairs(tmp_path / "val.csv", [0, 0, 1, 1] * 3, ["a cat", "a dog"] * 6)
    with caplog.at_level(logging.INFO):
        assert run(evaluation(tmp_path, "run", "--val-data", path)) == 0
    (metrics,) = results_of(tmp_path / "run")
    for direction in ("image_to_text", "text_to_image"):
        assert metrics[f"{direction}_R@1"] == metrics[f"{direction}_mean_rank"] == 1
    assert metrics["num_samples"] == 12
    assert "2 distinct captions and 2 distinct images" in caplog.text


@pytest.mark.parametrize(
    ("loss", "images", "captions", "reported"),
    [
        ("openclip", range(160), [f"a {number}" for number in range(160)], None),
        (
            "openclip",
            range(160),
            ["a cat"] * 160,
            "100% share their caption and 0% their image.* set --equal-captions mask",
        ),
        (
            "openclip",
            [7] * 160,
            [f"a {number}" for number in range(160)],
            "0% share their caption and 100% their image",
        ),
        ("siglip", range(160), ["a cat"] * 160, "100% share their caption.* use a loss such as queueclip"),
        ("openclip --equal-captions mask", range(160), ["a cat", "a dog"] * 80, None),
        ("queueclip --equal-captions mask", range(160), ["a cat"] * 160, "In 10 of the first 10 steps.*no negatives"),
        (
            "openclip",
            range(160),
            [f"{'a ' * 90}{number}" if number % 2 else f"a {number}" for number in range(160)],
            "50%",
        ),
    ],
)
def test_the_log_reports_captions_that_repeat_or_are_cut(loss, images, captions, reported, tmp_path, caplog):
    path = write_pairs(tmp_path / "train.csv", [*images], captions)
    with caplog.at_level(logging.INFO):
        assert run(small_command(path, tmp_path, "run", *loss.split(), "--epochs", "1")) == 0
    found = [message for message in caplog.messages if "--equal-captions" in message or "--draw-sentences" in message]
    assert len(found) == (reported is not None)
    assert reported is None or re.search(reported, found[0])


# --- ImageNet ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_templates(monkeypatch):
    """Use 2 of the 80 templates for the 1000 classes, to save time."""
    monkeypatch.setattr(open_clip, "OPENAI_IMAGENET_TEMPLATES", open_clip.OPENAI_IMAGENET_TEMPLATES[:2])


@torch.no_grad()
def scores_of(model: nn.Module, preprocess, paths: list[Path]) -> torch.Tensor:
    """Return the similarity of every image to each of the 1000 classes, computed without openclip_ext."""
    tokenizer = open_clip.get_tokenizer("demo-vit")
    columns = []
    for name in open_clip.IMAGENET_CLASSNAMES:
        texts = tokenizer([template(name) for template in open_clip.OPENAI_IMAGENET_TEMPLATES])
        columns.append(F.normalize(model.encode_text(texts, normalize=True).mean(dim=0), dim=0))
    images = torch.stack([preprocess(Image.open(path)) for path in paths])
    return model.encode_image(images, normalize=True) @ torch.stack(columns, dim=1)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return an untrained model, its image transform and the path of a file with its weights."""
    add_model_configs()
    model, _, preprocess = open_clip.create_model_and_transforms("demo-vit")
    path = tmp_path_factory.mktemp("model") / "weights.pt"
    torch.save(model.state_dict(), path)
    return model.eval(), preprocess, path


def test_imagenet_accuracies_equal_scikit_learns(pretrained, two_templates, tmp_path):
    model, preprocess, weights = pretrained
    random = np.random.default_rng(0)
    pictures = [tmp_path / f"{number}.png" for number in range(30)]
    for picture in pictures:
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(picture)
    scores = scores_of(model, preprocess, pictures)
    # The true class has one of five ranks, so some predictions are right and some are wrong.
    ranks = [(0, 2, 4, 6, 300)[number % 5] for number in range(30)]
    labels = scores.argsort(descending=True).gather(1, torch.tensor(ranks)[:, None]).flatten().tolist()
    others = sorted(set(range(1000)) - set(labels))  # the evaluation requires a folder for every class
    pictures, targets = pictures + pictures[:1] * len(others), labels + others
    scores = torch.cat([scores, scores[:1].expand(len(others), -1)])
    folder = tmp_path / "data" / "imagenetv2-matched-frequency-format-val"
    for number, (picture, label) in enumerate(zip(pictures, targets, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder / str(label) / f"{number}.{('png', 'jpeg')[number % 2]}")
    flags = ["--pretrained", str(weights), "--imagenet-val", str(folder), "--imagenet-v2", str(folder.parent)]
    assert run(evaluation(tmp_path / "logs", "run", *flags)) == 0
    (metrics,) = results_of(tmp_path / "logs" / "run")
    for k in (1, 5):
        expected = top_k_accuracy_score(targets, scores.numpy(), k=k, labels=range(1000))
        for name in ("imagenet", "imagenetv2"):
            assert metrics[f"{name}-zeroshot-val-top{k}"] == pytest.approx(expected, abs=1e-12)
        assert 0 < expected < 1


def labels_of(root: Path) -> dict[str, int]:
    """Return the label of each image of ImageNet's folders, by the name of its folder."""
    stored = imagenet_task("imagenet", str(root)).read().samples.stored
    assert len(stored) == 1000
    return {Path(sample.key).parent.name: sample.label for sample in stored}


def write_class_folders(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "0.png").write_bytes(b"")  # an empty file is enough, because images are read at their first use


def assert_refused(root: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        imagenet_task("imagenet", str(root))


def test_synsets_are_numbered_by_their_names_without_hidden_files(tmp_path):
    synsets = ImageNetInfo().label_names()
    write_class_folders(tmp_path, [".ipynb_checkpoints", *synsets, f"{synsets[0]}/.hidden"])
    (tmp_path / synsets[0] / "._0.png").write_bytes(b"")
    assert labels_of(tmp_path) == {name: number for number, name in enumerate(synsets)}
    (tmp_path / synsets[-1]).rename(tmp_path / "n00000001")
    assert_refused(tmp_path, "expected ImageNet's 1000 .*, found .*n00000001 among them")


def test_numbers_are_labels_from_zero(tmp_path):
    """The test of the accuracies has numbers without leading zeros."""
    numbers = [f"{number:03d}" for number in range(1000)]
    write_class_folders(tmp_path, numbers)
    assert labels_of(tmp_path) == {name: number for number, name in enumerate(numbers)}
    (tmp_path / "000").rename(tmp_path / "1000")
    assert_refused(tmp_path, "expected ImageNet's 1000 .*, found .*1000 class folders, 1000 among them")


def test_folders_that_are_not_imagenets_classes_are_refused(tmp_path):
    write_class_folders(tmp_path, ["train", "val"])
    assert_refused(tmp_path, "parts of a data set.*give one of them.*val")
    for name in ("train", "val"):
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    write_class_folders(tmp_path, [str(number) for number in range(1, 11)])
    assert_refused(tmp_path, "expected ImageNet's 1000 .*, found .*10 class folders")
