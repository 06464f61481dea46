"""Evaluation of DataComp's tasks during training."""

import pytest
import torch

from openclip_ext.evaluation.open_tasks import datacomp_suite
from openclip_ext.evaluation.tasks import FLICKR, SUITES, TASKS, WINOGAVIL
from tests.evaluation import datasets


@pytest.mark.parametrize("suite", ["quick", "retrieval"])
def test_a_suite_measures_its_tasks_and_averages_complete_groups(suite, make_encoder, tmp_path):
    for key in SUITES[suite]:
        datasets.make_task(tmp_path, key, count=12)
    evaluator = datacomp_suite(suite, tmp_path, any_size=True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    metrics = evaluator.score(make_encoder())
    assert torch.equal(torch.get_rng_state(), before), "the evaluation changed the random state of the training"
    assert evaluator.name == "datacomp"
    values = {f"datacomp/{key}": metrics.pop(f"datacomp/{key}") for key in SUITES[suite]}
    title = "datacomp/average/Retrieval, DataComp (Flickr, MSCOCO, WinoGAViL)"
    assert metrics.pop(title, None) == (pytest.approx(sum(values.values()) / 3) if suite == "retrieval" else None)
    assert "datacomp/average/DataComp average (38)" not in metrics


def test_the_classifier_follows_the_weights(tiny, make_encoder, tmp_path):
    datasets.make_task(tmp_path, "cifar10", count=60)
    evaluator = datacomp_suite("quick", tmp_path, any_size=True)
    first = evaluator.score(make_encoder())
    with torch.no_grad():
        projection = tiny.model.text_projection.clone()
        tiny.model.text_projection.neg_()
    second = evaluator.score(make_encoder())
    tiny.model.text_projection.data.copy_(projection)
    assert first != second
    assert evaluator.score(make_encoder()) == first


def test_a_failing_task_is_left_out_and_named(make_encoder, tmp_path, caplog):
    datasets.make_task(tmp_path, "cifar10", count=12)
    datasets.make_task(tmp_path, FLICKR)
    (tmp_path / TASKS[FLICKR].folder / "test" / "1.tar").unlink()
    evaluator = datacomp_suite("quick", tmp_path, any_size=True)
    assert set(evaluator.score(make_encoder())) == {"datacomp/cifar10"}
    assert "Flickr failed and is excluded" in caplog.text
    strict = datacomp_suite("quick", tmp_path)  # by default, 12 images of CIFAR-10 are an error
    assert strict.score(make_encoder()) == {}
    datasets.make_task(tmp_path, WINOGAVIL, count=2)  # its main metric needs instances with 10 or 12 candidates
    evaluator = datacomp_suite("retrieval", tmp_path, any_size=True)
    assert evaluator.score(make_encoder()) == {}


def test_a_suite_without_data_is_refused_before_training(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no data set of the suite 'quick': expected one or more of Caltech-101, CIFAR-10, "
    ):
        datacomp_suite("quick", tmp_path)
    with pytest.raises(ValueError, match="There is no task 'fast'"):
        datacomp_suite("fast", tmp_path)
