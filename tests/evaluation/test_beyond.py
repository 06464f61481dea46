"""clip-benchmark's command line, with this package's fixes, on this package's checkpoints."""

import json
import sys

import pytest
import torch
from clip_benchmark import cli
from clip_benchmark.datasets.builder import build_dataset
from clip_benchmark.metrics import linear_probe, zeroshot_classification
from sklearn.metrics import top_k_accuracy_score

from eval import beyond
from openclip_ext.cli.errors import UsageError
from tests.evaluation import datasets


@pytest.fixture
def evaluate(tiny_folder, tmp_path, monkeypatch):
    """Return a function that evaluates data sets with the command, and returns the metrics of each data set."""
    replaced = {
        cli: ("load_clip", "build_dataset"),
        linear_probe: ("accuracy",),
        zeroshot_classification: ("accuracy",),
    }
    for module, name in ((module, name) for module, names in replaced.items() for name in names):
        monkeypatch.setattr(module, name, getattr(module, name))  # to restore the functions after the test
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(*names: str, root: str, **options: str) -> list[dict]:
        argv = ["eval", "--model", datasets.TINY_MODEL, "--pretrained", str(tiny_folder / "epoch_1.pt")]
        argv += ["--dataset", *names, "--dataset_root", root, "--num_workers", "1", "--quiet"]
        argv += [word for name, value in options.items() for word in (f"--{name}", value)]
        beyond.main([*argv, "--output", str(tmp_path / "out-{dataset}.json")])
        files = [tmp_path / f"out-{name.removeprefix('wds/').replace('/', '_')}.json" for name in names]
        return [json.loads(file.read_text())["metrics"] for file in files]

    return run


@pytest.mark.parametrize("prompts", [None, ["a {c}", "a picture of a {c}"]])
def test_classification_of_fer2013(tiny, evaluate, tmp_path, prompts):
    """Class names come from clip-benchmark. Templates come from clip-benchmark or from a file (as in CLIP-Lite, Table 11)."""
    datasets.write_class_folders(tmp_path / "test", 40, lambda label: str(label % 7))
    options = {}
    if prompts is not None:
        (tmp_path / "prompts.json").write_text(json.dumps({"fer2013": prompts}))
        options = {"custom_template_file": str(tmp_path / "prompts.json")}
    (found,) = evaluate("fer2013", root=str(tmp_path), **options)
    dataset = build_dataset("fer2013", root=str(tmp_path), transform=tiny.transform, **options)
    assert prompts is None or dataset.templates == prompts
    weights = zeroshot_classification.zero_shot_classifier(
        tiny.model, tiny.tokenizer, dataset.classes, dataset.templates, "cpu", amp=False
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    logits, targets = zeroshot_classification.run_classification(tiny.model, weights, loader, "cpu", amp=False)
    for k, name in ((1, "acc1"), (5, "acc5")):
        expected = top_k_accuracy_score(targets, logits, k=k, labels=range(7))
        assert found[name] == pytest.approx(expected, abs=1e-6)


def test_nothing_is_fetched_unasked(evaluate):
    with pytest.raises(
        FileNotFoundError, match=r"/nowhere not found: set --dataset_root\. To download the data, create the folder"
    ):
        evaluate("cifar10", root="/nowhere")


def test_an_unknown_data_set_is_named(evaluate, tmp_path):
    with pytest.raises(UsageError, match="--dataset photos"):
        evaluate("photos", root=str(tmp_path))
