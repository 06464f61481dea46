"""clip-benchmark's other data sets on our checkpoints: one of each of its kinds, made on the spot."""

import io
import json

import numpy as np
import pytest
import torch
from clip_benchmark.metrics import image_caption_selection, zeroshot_classification
from PIL import Image
from sklearn.metrics import average_precision_score

from eval import beyond
from eval.data import find_shards, read_shard
from eval.tasks import FLICKR
from tests.eval import datasets


def evaluate(tiny_folder, capfd, *arguments: str) -> tuple[int, list[dict]]:
    argv = ["--model", datasets.TINY_MODEL, "--checkpoint", str(tiny_folder / "epoch_1.pt"), "--workers", "2"]
    status = beyond.main([*argv, *arguments])
    return status, [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]


def test_classification_of_fer2013(tiny, tiny_folder, tmp_path, capfd):
    """A folder of images a class; names and templates are clip-benchmark's."""
    images, labels = datasets.digit_images(40)
    kept = [(image, label) for image, label in zip(images, labels, strict=True) if label < 7]
    for number, (image, label) in enumerate(kept):
        (tmp_path / "test" / str(label)).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "test" / str(label) / f"{number}.png")
    output = tmp_path / "results.jsonl"
    status, lines = evaluate(
        tiny_folder, capfd, "--dataset", "fer2013", "--dataset-root", str(tmp_path), "--output", str(output)
    )
    assert status == 0
    assert [line["dataset"] for line in lines] == ["fer2013"]
    assert json.loads(output.read_text()) == lines[0]
    from clip_benchmark.datasets.builder import build_dataset

    dataset = build_dataset("fer2013", root=str(tmp_path), transform=tiny.preprocess)
    weights = zeroshot_classification.zero_shot_classifier(
        tiny.model, tiny.tokenizer, dataset.classes, dataset.templates, "cpu", amp=False
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    logits, targets = zeroshot_classification.run_classification(tiny.model, weights, loader, "cpu", amp=False)
    assert len(targets) == len(kept)
    assert lines[0]["metrics"]["acc1"] == pytest.approx((logits.argmax(1) == targets).float().mean().item(), abs=1e-6)


def test_image_caption_selection_of_sugar_crepe(tiny, tiny_folder, tmp_path, capfd):
    images, labels = datasets.digit_images(30)
    (tmp_path / "val2017").mkdir()
    annotations = {}
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        image.save(tmp_path / "val2017" / f"{number}.jpg")
        caption, negative = (f"the digit {datasets.DIGIT_NAMES[value % 10]}" for value in (label, label + 3))
        annotations[str(number)] = {"filename": f"{number}.jpg", "caption": caption, "negative_caption": negative}
    (tmp_path / "add_att.json").write_text(json.dumps(annotations))
    status, lines = evaluate(
        tiny_folder, capfd, "--dataset", "sugar_crepe/add_att", "--dataset-root", str(tmp_path), "--batch-size", "8"
    )
    assert status == 0
    batch = torch.stack([tiny.preprocess(Image.open(tmp_path / "val2017" / f"{n}.jpg")) for n in range(30)])
    captions = [[annotations[str(n)]["caption"], annotations[str(n)]["negative_caption"]] for n in range(30)]
    expected = image_caption_selection.evaluate(tiny.model, [(batch, captions)], tiny.tokenizer, "cpu", amp=False)
    assert 0 < expected["text_acc"] < 1
    assert lines[0]["metrics"] == pytest.approx(expected, abs=1e-6)


def test_multilabel_and_retrieval_webdatasets(tiny, tiny_folder, tmp_path, capfd):
    folder = datasets.make_classification(tmp_path, "cifar10", count=40)
    labels = np.random.default_rng(0).integers(0, 2, (40, 10))
    labels[0], labels[1] = 1, 0
    for shard in find_shards(folder):
        samples = []
        for key, fields in read_shard(shard):
            stream = io.BytesIO()
            np.save(stream, labels[int(key[1:])])
            samples.append((key, {**{k: v for k, v in fields.items() if k != "cls"}, "npy": stream.getvalue()}))
        datasets.write_tar(shard, samples)
    (folder / "dataset_type.txt").write_text("multilabel\n")
    datasets.make_retrieval(tmp_path, FLICKR)
    root = str(tmp_path / "wds_{dataset}_test")
    status, lines = evaluate(
        tiny_folder, capfd, "--dataset", "wds/cifar10", f"wds/{FLICKR}", "wds/nowhere", "--dataset-root", root
    )
    assert status == 1, "one of the three is not there"
    assert [line["dataset"] for line in lines] == ["wds/cifar10", f"wds/{FLICKR}"]
    assert set(lines[1]["metrics"]) >= {"mean_recall@1", "image_retrieval_recall@5"}

    images = {key: next(iter(fields.values())) for shard in find_shards(folder) for key, fields in read_shard(shard)}
    batch = torch.stack([tiny.preprocess(Image.open(io.BytesIO(images[f"s{n:07d}"]))) for n in range(40)])
    weights = zeroshot_classification.zero_shot_classifier(
        tiny.model, tiny.tokenizer, datasets.DIGIT_NAMES, list(datasets.TEMPLATES), "cpu", amp=False
    )
    with torch.no_grad():
        scores = tiny.model.encode_image(batch, normalize=True) @ weights
    expected = average_precision_score(labels, scores.numpy(), average="macro")
    assert lines[0]["metrics"]["mean_average_precision"] == pytest.approx(expected, abs=1e-5)


def test_collections_are_written_out():
    assert len(beyond.expand_collections(["sugar_crepe", "fer2013"])) == 8


def test_what_cannot_be_evaluated(tiny_folder, capfd, caplog):
    assert evaluate(tiny_folder, capfd, "--dataset", "cifar10", "--dataset-root", "/nowhere")[0] == 1
    assert "there is no /nowhere: set --dataset-root" in caplog.text
    assert evaluate(tiny_folder, capfd, "--dataset", "cifar10", "--checkpoint", "/nowhere.pt")[0] == 2
