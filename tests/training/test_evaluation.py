"""Validation: OpenCLIP's numbers, in chunks; and evaluators that fail without costing the training."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from openclip_ext.training.evaluation import ScheduledEvaluator, Validation, retrieval_metrics, run_evaluators


def unit_rows(count: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator), dim=1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_retrieval_metrics_equal_openclips_at_any_chunk(chunk):
    from open_clip_train.train import get_clip_metrics

    images = unit_rows(150, 8, seed=0)
    texts = F.normalize(images + 1.0 * unit_rows(150, 8, seed=1), dim=1)
    ours = retrieval_metrics(images, texts, chunk=chunk)
    theirs = get_clip_metrics(images, texts, torch.tensor(100.0))
    assert set(theirs) == set(ours)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(float(value)), name
    assert 0.1 < ours["image_to_text_R@1"] < 0.9  # the comparison is not of trivial numbers


def test_constant_features_score_as_chance_not_as_perfect():
    constant = torch.ones(100, 4) / 2
    metrics = retrieval_metrics(constant, constant)
    assert metrics["image_to_text_R@10"] == 0.0
    assert metrics["image_to_text_mean_rank"] == pytest.approx(50.5)


class ToyModel(nn.Module):
    """Returns its inputs as features."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}


def test_validation_averages_the_loss_over_samples_of_unequal_batches():
    images, texts = unit_rows(10, 4, seed=2), unit_rows(10, 4, seed=3)
    batches = [{"image": images[:8], "text": texts[:8]}, {"image": images[8:], "text": texts[8:]}]
    metrics = Validation(batches, torch.device("cpu")).run(ToyModel().eval())
    expected = 0.0
    for rows in (slice(0, 8), slice(8, 10)):
        logits = torch.exp(torch.tensor(2.0)) * images[rows] @ texts[rows].T
        labels = torch.arange(len(logits))
        expected += float(F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2 * len(logits)
    assert metrics["clip_val_loss"] == pytest.approx(expected / 10, rel=1e-6)
    assert metrics["num_samples"] == 10


class Failing:
    name = "failing"

    def run(self, model):
        raise RuntimeError("no data")


class Counting:
    name = "counting"

    def run(self, model):
        assert not model.training
        return {"answer": 42.0}


def test_a_failing_evaluator_is_logged_and_the_others_run(caplog):
    model = ToyModel().train()
    with caplog.at_level(logging.ERROR):
        metrics = run_evaluators([Failing(), Counting()], model)
    assert metrics == {"answer": 42.0}
    assert "failing failed" in caplog.text
    assert model.training


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (10, [5])], ids=["never", "1", "2", "10"]
)
def test_evaluators_run_every_so_many_epochs_and_at_the_end(every, due):
    item = ScheduledEvaluator(Counting(), every)
    assert [epoch for epoch in range(1, 6) if item.is_due(epoch, 5)] == due
