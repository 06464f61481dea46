"""CLIP-Lite's projection heads are part of the model: they are trained, saved, and used in every evaluation."""

import logging

import open_clip
import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.models import open_model
from openclip_ext.losses.heads import ProjectedModel, read_heads
from openclip_ext.losses.registry import create_loss
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.model import initialize
from openclip_ext.training.optimizer import create_optimizer
from tests.training.commands import plan_of
from tests.training.runs import command, evaluation, results_of, run


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    logs = tmp_path_factory.mktemp("finished")
    assert run(command(shards, logs, "run", "cliplite", "--val-data", shards, "--lr", "0.05", "--warmup", "0")) == 0
    return logs / "run"


@pytest.fixture(scope="module")
def checkpoint(finished):
    return finished / "checkpoints" / "epoch_2.pt"


def test_projections_and_scale_are_trained(checkpoint):
    trained = read_heads(checkpoint).state_dict()
    start = create_loss("cliplite", embed_dim=64, seed=3).projections.state_dict()
    assert trained.keys() == start.keys()
    assert all(not torch.equal(trained[name], value) for name, value in start.items())
    assert torch.load(checkpoint, weights_only=True)["state_dict"]["logit_scale"] != pytest.approx(2.6593, abs=1e-4)


def numbers_of(folder):
    numbers = {name: value for name, value in results_of(folder)[-1].items() if "_R@" in name or "rank" in name}
    assert len(numbers) == 10
    return numbers


def test_validation_goes_through_the_projections_also_after_reloading(finished, checkpoint, shards, tmp_path):
    during = numbers_of(finished)
    for name in ("resume", "pretrained"):
        assert run(evaluation(tmp_path, name, "--val-data", shards, f"--{name}", str(checkpoint))) == 0
        assert numbers_of(tmp_path / name) == during
    bare = tmp_path / "bare.pt"
    torch.save({"state_dict": torch.load(checkpoint, weights_only=True)["state_dict"]}, bare)
    assert run(evaluation(tmp_path, "bare", "--val-data", shards, "--pretrained", str(bare))) == 0
    assert numbers_of(tmp_path / "bare") != during


def test_the_harness_goes_through_the_projections(checkpoint, tmp_path):
    loaded = open_model(checkpoint, "demo-vit")
    assert isinstance(loaded.model, ProjectedModel)
    images, texts = torch.randn(5, 3, 32, 32), loaded.tokenizer(["left", "right"])
    heads = read_heads(checkpoint).eval()
    plain = open_clip.create_model("demo-vit", pretrained=str(checkpoint), output_dict=True).eval()
    with torch.no_grad():
        embeddings = loaded.model.encode_image(images, normalize=True)
        expected = heads.image(plain.encode_image(images, normalize=True))
        torch.testing.assert_close(embeddings, torch.nn.functional.normalize(expected, dim=1))
        torch.testing.assert_close(
            loaded.model.encode_text(texts), heads.text(plain.encode_text(texts, normalize=True))
        )
        outputs = ProjectedModel(plain, heads).eval()(images, texts)
        torch.testing.assert_close(outputs["image_features"], embeddings)
        assert outputs["logit_scale"] == plain.logit_scale.exp()


def test_a_run_starts_from_the_heads_of_its_pretrained_checkpoint(checkpoint, caplog):
    add_model_configs()
    model, loss = open_clip.create_model("demo-vit"), create_loss("cliplite", embed_dim=64)
    initialize(model, loss, str(checkpoint))
    stored = read_heads(checkpoint).state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in loss.projections.state_dict().items())
    with pytest.raises(UsageError, match=r"'projection_dim': 64.*this run has.*'projection_dim': 32"):
        other = create_loss("cliplite", embed_dim=64, projection_dim=32)
        initialize(model, other, str(checkpoint))
    with caplog.at_level(logging.WARNING):
        initialize(model, create_loss("openclip"), str(checkpoint))
    assert "has projection heads 'cliplite', which this loss does not use" in caplog.text
    initialize(model, create_loss("openclip"), "laion2b")


def test_projections_are_in_the_optimizer_with_openclips_decay():
    add_model_configs()
    model = open_clip.create_model("demo-vit")
    head = create_loss("cliplite", embed_dim=64).model_head()
    flags = "--loss cliplite --wd 1e-4 --opt timm/lookahead_sgd --lr 0.2 --momentum 0.9"
    config = plan_of(*flags.split()).optimizer
    optimizer = create_optimizer(model, config, None, head)
    decay = {id(value): group["weight_decay"] for group in optimizer.param_groups for value in group["params"]}
    assert len(decay) == len([*model.parameters(), *head.parameters()])
    for parameter in head.parameters():
        assert decay[id(parameter)] == (0.0 if parameter.ndim < 2 else 1e-4)
