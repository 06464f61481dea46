"""Metrics with data that test_oracle.py does not contain: empty classes, empty groups, and ties."""

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

from openclip_ext.evaluation.metrics import Answers, classification_metrics, group_metrics, macro_f1, target_ranks


def test_classes_that_never_occur_do_not_enter_the_means():
    """As in iWildCam, some classes have no sample."""
    generator = np.random.default_rng(0)
    labels = generator.choice(np.arange(0, 12, 2), 200)
    logits = torch.from_numpy(generator.normal(size=(200, 12)) + 1.5 * np.eye(12)[labels])
    predictions, ranks = logits.argmax(dim=1).numpy(), target_ranks(logits, torch.from_numpy(labels)).numpy()
    answers = Answers(labels, predictions, ranks, labels[:, None])
    assert classification_metrics(answers, 4)["acc5"] is None
    assert classification_metrics(answers, 5)["acc5"] == (ranks < 5).mean()
    found = classification_metrics(answers, 12)["mean_per_class_recall"]
    assert found == pytest.approx(balanced_accuracy_score(labels, predictions), abs=1e-12)
    expected = f1_score(labels, predictions, average="macro", labels=np.unique(labels))
    assert macro_f1(labels, predictions) == pytest.approx(expected, abs=1e-12)
    assert abs(expected - f1_score(labels, predictions, average="macro")) > 0.05


def test_a_collapsed_model_scores_chance_and_not_one():
    assert target_ranks(torch.zeros(10, 10), torch.arange(10)).tolist() == list(range(10))


def test_group_metrics_follow_wilds():
    """The first column varies fastest in the order of groups, and names of groups start with the last column."""
    metadata = np.array([(age, gender, race) for age in range(4) for gender in range(2) for race in (0, 2)])
    correct = metadata[:, 2] > metadata[:, 1]
    found = group_metrics("acc", correct, metadata, ("age", "gender", "race"), ["gender", "race"])
    assert list(found.items()) == [
        ("acc_avg", 0.5),
        ("acc_race:0_gender:0", 0.0), ("count_race:0_gender:0", 4),
        ("acc_race:0_gender:1", 0.0), ("count_race:0_gender:1", 4),
        ("acc_race:1_gender:0", None), ("count_race:1_gender:0", 0),
        ("acc_race:1_gender:1", None), ("count_race:1_gender:1", 0),
        ("acc_race:2_gender:0", 1.0), ("count_race:2_gender:0", 4),
        ("acc_race:2_gender:1", 1.0), ("count_race:2_gender:1", 4),
        ("acc_wg", 0.0),
    ]  # fmt: skip
