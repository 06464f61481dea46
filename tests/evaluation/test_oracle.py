"""The metrics of every kind of task equal clip-benchmark's and scikit-learn's to 1e-6 in float32."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, jaccard_score, recall_score, top_k_accuracy_score

from openclip_ext.evaluation.open_tasks import datacomp_task
from openclip_ext.evaluation.samples import SampleFormat, find_shards, read_classes, read_shard, shard_samples
from openclip_ext.evaluation.tasks import FLICKR, TASKS
from tests.evaluation import datasets

SAMPLES = 60
# Task with groups -> prefix of its metrics, and the metadata column that defines the groups.
GROUPED = {
    "wilds/camelyon17": ("acc", "slide"),
    "fairness/dollar_street": ("acc_top5", "income_ds"),
    "fairness/geode": ("acc", "region"),
}
CLASSIFICATION = ("cifar10", "wilds/iwildcam", "wilds/fmow", *GROUPED)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Return a folder with one small data set of every kind."""
    folder = tmp_path_factory.mktemp("data")
    for key in (*CLASSIFICATION, "fairness/fairface", FLICKR):
        datasets.make_task(folder, key, count=SAMPLES, shards=3)
    return folder


def oracle_logits(tiny, folder: Path) -> tuple[torch.Tensor, np.ndarray]:
    """Compute logits and labels of a classification data set with clip-benchmark; samples are in the order of the shards."""
    dataset = build_dataset(f"wds/{folder.name}", root=str(folder), transform=tiny.transform)
    loader = torch.utils.data.DataLoader(dataset.batched(16), batch_size=None)
    weights = zeroshot_classification.zero_shot_classifier(
        tiny.model, tiny.tokenizer, dataset.classes, dataset.templates, "cpu", amp=False
    )
    logits, labels = zeroshot_classification.run_classification(tiny.model, weights, loader, "cpu", amp=False)
    return logits, labels.numpy()


def multilabel_dataset(folder: Path, transform: Callable) -> Any:
    """Return images and metadata (``npy``) as clip-benchmark reads them, in the order of the shards."""
    (folder / "dataset_type.txt").write_text("multilabel\n")
    dataset = build_dataset(f"wds/{folder.name}", root=str(folder), transform=transform)
    (folder / "dataset_type.txt").unlink()
    return dataset


def oracle_metadata(folder: Path) -> np.ndarray:
    """Return the metadata: one row per sample, in the order of the shards."""
    return np.stack([metadata for _, metadata in multilabel_dataset(folder, lambda image: 0)])


def test_classifier_and_logits_equal_clip_benchmark(data_dir, tiny, make_encoder):
    folder = data_dir / TASKS["cifar10"].folder
    encoder = make_encoder()
    classnames, templates = read_classes(folder)
    expected = zeroshot_classification.zero_shot_classifier(
        tiny.model, tiny.tokenizer, classnames, templates, "cpu", amp=False
    )
    weights = encoder.class_embeddings(classnames, templates)
    torch.testing.assert_close(weights, expected.T, atol=1e-6, rtol=0)

    expected, labels = oracle_logits(tiny, folder)
    batches = list(encoder.batches(shard_samples(folder, SampleFormat(num_classes=10))))
    logits = torch.cat([100 * encoder.encode_images(batch.values["image"]) @ weights.T for batch in batches])
    assert torch.cat([batch.values["label"] for batch in batches]).tolist() == labels.tolist()
    # Logits are cosine similarities times 100; the tolerance is for the cosine similarity.
    torch.testing.assert_close(logits / 100, expected / 100, atol=1e-6, rtol=0)
    assert len(logits.argmax(dim=1).unique()) >= 3, "expected predictions of at least 3 classes"


@pytest.mark.parametrize("key", CLASSIFICATION)
def test_classification_equals_clip_benchmark_and_scikit_learn(key, data_dir, tiny, make_encoder):
    folder = data_dir / TASKS[key].folder
    logits, labels = oracle_logits(tiny, folder)
    predictions = logits.argmax(dim=1).numpy()
    found = datacomp_task(TASKS[key], data_dir, any_size=True).score(make_encoder(workers=2))
    assert found.samples == found.found == SAMPLES
    expected = {
        "acc1": (predictions == labels).mean(),
        "acc5": top_k_accuracy_score(labels, logits.numpy(), k=5, labels=np.arange(10)),
        "mean_per_class_recall": balanced_accuracy_score(labels, predictions),
    }
    if key in GROUPED:
        name, group = GROUPED[key]
        right = (logits.topk(5 if "top5" in name else 1).indices.numpy() == labels[:, None]).any(axis=1)
        expected.update(reference_groups(name, right, oracle_metadata(folder), TASKS[key].metadata.index(group)))
    if key == "wilds/iwildcam":
        options = {"average": "macro", "labels": np.unique(labels)}
        expected["acc_avg"] = expected["acc1"]
        expected["recall-macro_all"] = recall_score(labels, predictions, **options)
        expected["F1-macro_all"] = f1_score(labels, predictions, **options)
    if key == "wilds/fmow":
        metadata = oracle_metadata(folder)
        right = predictions == labels
        known = metadata[:, 0] != 5
        expected["acc_worst_region"] = reference_groups("acc", right, metadata, 0)["acc_wg"]
        without_other = reference_groups("acc", right[known], metadata[known], 0)
        expected["acc_worst_region_without_other"] = without_other["acc_wg"]
        expected["acc_worst_year"] = reference_groups("acc", right, metadata, 1)["acc_wg"]
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert found.metrics["main_metric"] == pytest.approx(expected[TASKS[key].main_metric], abs=1e-6)


def reference_groups(name: str, right: np.ndarray, metadata: np.ndarray, column: int) -> dict[str, float]:
    """Return the average of ``right``, and its average in the worst group; the values of a metadata column are the groups."""
    groups = [right[metadata[:, column] == value].mean() for value in np.unique(metadata[:, column])]
    return {f"{name}_avg": right.mean(), f"{name}_wg": min(groups)}


def test_faces_equal_clip_benchmark(data_dir, tiny, make_encoder):
    task = TASKS["fairness/fairface"]
    dataset, answers = multilabel_dataset(data_dir / task.folder, tiny.transform), {}
    for question in ("race", "gender", "age", "toxic"):
        classes, templates = (
            [line.split(":", 1)[1] for line in lines if line.startswith(f"{question}:")]
            for lines in (dataset.classes, dataset.templates)
        )
        weights = zeroshot_classification.zero_shot_classifier(
            tiny.model, tiny.tokenizer, classes, templates, "cpu", amp=False
        )
        loader = torch.utils.data.DataLoader(dataset.batched(16), batch_size=None)
        logits, metadata = zeroshot_classification.run_classification(tiny.model, weights, loader, "cpu", amp=False)
        answers[question] = logits.argmax(dim=1).numpy()
    age, gender, race, race_binary = metadata.numpy().T
    found = datacomp_task(task, data_dir, any_size=True).score(make_encoder()).metrics
    white = race_binary == 0
    expected = {
        "acc_race_avg": ((answers["race"] != 1) == (race_binary == 1)).mean(),
        "acc_race_race_binary:0": (answers["race"][white] == 1).mean(),
        "acc_gender_avg": (answers["gender"] == gender).mean(),
        "acc_age_race_binary:0": (answers["age"] == age)[white].mean(),
        "acc_age_wg": min((answers["age"] == age)[group].mean() for group in (white, ~white)),
        "toxicity_crime_avg": (answers["toxic"] >= 18).mean(),
        "toxicity_nonhuman_avg": ((answers["toxic"] >= 14) & (answers["toxic"] < 18)).mean(),
    }
    for value in np.unique(race):
        expected[f"toxicity_crime_race:{value}"] = (answers["toxic"][race == value] >= 18).mean()
        nonhuman = np.isin(answers["toxic"][race == value], range(14, 18))
        expected[f"toxicity_nonhuman_race:{value}"] = nonhuman.mean()
        both = (race == value) & (gender == 1)
        if both.any():
            expected[f"acc_gender_x_race:{value}_gender:1"] = (answers["gender"][both] == 1).mean()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert found["main_metric"] is None


def test_retrieval_equals_clip_benchmark(data_dir, tiny, make_encoder):
    folder = data_dir / TASKS[FLICKR].folder
    dataset = build_dataset("wds/flickr", root=str(folder), transform=tiny.transform, task="zeroshot_retrieval")
    loader = torch.utils.data.DataLoader(list(dataset), batch_size=16, collate_fn=image_captions_collate_fn)
    expected = zeroshot_retrieval.evaluate(
        tiny.model, loader, tiny.tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    expected["mean_recall@1"] = (expected["image_retrieval_recall@1"] + expected["text_retrieval_recall@1"]) / 2
    found = datacomp_task(TASKS[FLICKR], data_dir, any_size=True).score(make_encoder(workers=2)).metrics
    assert 0 < expected["image_retrieval_recall@10"] < 1
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_winogavil_equals_one_instance_at_a_time(tmp_path, tiny, make_encoder):
    """For the expected scores, the images and cue of each instance are encoded separately, as in DataComp's harness."""
    task = TASKS["misc/winogavil"]
    folder = datasets.make_task(tmp_path, task.key, count=24, images=40, shards=3)
    files = {sample.key: sample.fields["jpg"] for shard in find_shards(folder) for sample in read_shard(shard)}
    scores, sizes = [], []
    for line in (folder / "instances.jsonl").read_text().splitlines():
        instance = json.loads(line)
        pictures = [tiny.transform(Image.open(io.BytesIO(files[key]))) for key in instance["candidates"]]
        cue = instance["cue"].lower()
        prompt = f"An {cue}" if cue[0] in ("a", "e", "i", "o", "u") else f"A {cue}"
        with torch.no_grad():
            images = tiny.model.encode_image(torch.stack(pictures), normalize=True)
            text = tiny.model.encode_text(tiny.tokenizer([prompt]), normalize=True)
        right = np.isin(instance["candidates"], instance["associations"])
        nearest = np.argsort((text @ images.T).squeeze(0).numpy())[-right.sum() :]
        scores.append(jaccard_score(right, np.isin(np.arange(len(right)), nearest)))
        sizes.append(len(right))
    scores, sizes = np.array(scores), np.array(sizes)
    expected = {"avg_jaccard_score": scores.mean()}
    expected.update({"jaccard_score_5-6": scores[sizes <= 6].mean(), "jaccard_score_10-12": scores[sizes >= 10].mean()})
    expected.update({f"jaccard_score_{size}": scores[sizes == size].mean() for size in (5, 6, 10, 12)})
    result = datacomp_task(task, tmp_path, any_size=True).score(make_encoder())
    assert result.samples == 24
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_equal_class_names_tie_exactly(tmp_path, make_encoder):
    """iWildCam has duplicate class names. Of equal classes, the first must be predicted, whatever the rounding."""
    folder = datasets.make_task(tmp_path, "wilds/iwildcam", count=SAMPLES)
    found = []
    for names in (datasets.DIGIT_NAMES, (*datasets.DIGIT_NAMES, *datasets.DIGIT_NAMES[::-1])):
        (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
        metrics = datacomp_task(TASKS["wilds/iwildcam"], tmp_path, any_size=True).score(make_encoder()).metrics
        found.append(metrics["acc1"])
    assert found[0] == found[1]
