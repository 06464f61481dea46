"""Metrics with data that test_oracle.py does not contain: empty classes, empty groups, and ties."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

from openclip_ext.evaluation.metrics import classification_metrics, group_metrics, macro_f1, target_ranks
from openclip_ext.evaluation.retrieval import retrieval_metrics


def random_case(seed: int, samples: int = 200, classes: int = 12) -> tuple[torch.Tensor, np.ndarray]:
    """Return logits that favor the correct class, and the labels. As in iWildCam, some classes have no sample."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(np.arange(0, classes, 2), samples)
    logits = generator.normal(size=(samples, classes)) + 1.5 * np.eye(classes)[labels]
    return torch.from_numpy(logits), labels


def test_classes_that_never_occur_do_not_enter_the_means():
    logits, labels = random_case(0)
    predictions = logits.argmax(dim=1).numpy()
    ranks = target_ranks(logits, torch.from_numpy(labels)).numpy()
    assert classification_metrics(labels, predictions, ranks, 4)["acc5"] is None
    found = classification_metrics(labels, predictions, ranks, 12)["mean_per_class_recall"]
    assert found == pytest.approx(balanced_accuracy_score(labels, predictions), abs=1e-12)
    expected = f1_score(labels, predictions, average="macro", labels=np.unique(labels))
    assert macro_f1(labels, predictions) == pytest.approx(expected, abs=1e-12)
    assert abs(expected - f1_score(labels, predictions, average="macro")) > 0.05


def test_a_collapsed_model_scores_chance_and_not_one():
    labels = torch.arange(10)
    assert target_ranks(torch.zeros(10, 10), labels).tolist() == list(range(10))
    same = torch.ones(10, 4) / 2
    metrics = retrieval_metrics(same, same, labels)
    assert metrics["mean_recall@1"] == pytest.approx(0.1)


def test_group_metrics_follow_wilds():
    generator = np.random.default_rng(0)
    columns = ("age", "gender", "race")
    metadata = np.stack([generator.integers(0, size, 300) for size in (4, 2, 5)], axis=1)
    metadata = metadata[metadata[:, 2] != 3]
    correct = generator.random(len(metadata)) < 0.6
    found = group_metrics("acc", correct, metadata, columns, ["gender", "race"])
    expected = {"acc_avg": correct.mean()}
    # As in WILDS, the first column varies fastest in the order of groups, and names of groups start with the last column.
    for race in range(5):
        for gender in range(2):
            inside = (metadata[:, 1] == gender) & (metadata[:, 2] == race)
            name = f"race:{race}_gender:{gender}"
            expected[f"acc_{name}"] = correct[inside].mean() if inside.any() else None
            expected[f"count_{name}"] = int(inside.sum())
    expected["acc_wg"] = min(v for k, v in expected.items() if k.startswith("acc_race") and v is not None)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found["count_race:3_gender:0"] == 0
