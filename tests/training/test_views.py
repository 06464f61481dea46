"""Uni-modal runs: two views of each image, the image tower alone is trained, the file is an ordinary checkpoint."""

import json
import random

import numpy as np
import open_clip
import pytest
import torch
from torch import nn

from eval.models import load_model
from openclip_ext.data.build import build_train_loader
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig
from openclip_ext.losses.heads import HEADS_KEY, read_heads, with_heads
from openclip_ext.losses.registry import create_loss, options_used_by
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import views
from openclip_ext.training.errors import UsageError
from openclip_ext.training.flags import parse
from openclip_ext.training.model import train_image_tower_only
from openclip_ext.training.step import encode_views
from tests.training.runs import command, run

LOSSES = {"simclr": [], "sogclr": ["--views", "2"]}


def noise(image):
    """An augmentation that draws from all three generators, and tells the images apart."""
    random_numbers = torch.rand(3) + random.random() + np.random.random()
    return torch.cat([random_numbers, torch.tensor(np.asarray(image).mean(axis=(0, 1)) / 255)]).float()


def epoch_of(shards, views, workers=0, epoch=0):
    loader = build_train_loader(
        DataSpec(shards),
        TrainLoaderConfig(batch_size=4, workers=workers, seed=5, views=views),
        preprocess=noise,
        tokenizer=lambda caption: torch.tensor([[len(caption)]]),
    )
    return {
        index: image
        for batch in loader.iterate(epoch)
        for index, image in zip(batch["index"].tolist(), batch["image"], strict=True)
    }


def test_views_are_functions_of_seed_epoch_index_and_view(shards):
    one, two, three = (epoch_of(shards, count) for count in (1, 2, 3))
    with_workers, next_epoch = epoch_of(shards, 2, workers=2), epoch_of(shards, 2, epoch=1)
    for index, pixels in two.items():
        assert pixels.shape == (2, 6)
        assert torch.equal(pixels[0], one[index])  # more views change nothing about the first ones
        assert torch.equal(pixels, three[index][:2])
        assert torch.equal(pixels, with_workers[index])
        assert torch.equal(pixels[0, 3:], pixels[1, 3:])  # of the same image
        assert not torch.equal(pixels[0, :3], pixels[1, :3])
    assert len({tuple(view.tolist()) for pixels in two.values() for view in pixels}) == 2 * len(two)
    assert all(not torch.equal(pixels, two[index]) for index, pixels in next_epoch.items() if index in two)


def test_the_tower_sees_all_views_and_no_text():
    class Tower(nn.Module):
        def forward(self, image, text):
            assert text is None
            return {"image_features": image.mean(dim=(2, 3)), "text_features": None, "logit_scale": torch.tensor(1.0)}

    images = torch.randn(5, 2, 3, 4, 4)
    outputs = encode_views(Tower(), images)
    torch.testing.assert_close(outputs["image_features"], images[:, 0].mean(dim=(2, 3)))
    torch.testing.assert_close(outputs["text_features"], images[:, 1].mean(dim=(2, 3)))
    assert outputs["logit_scale"] == 1


@pytest.mark.parametrize("name", ["demo-vit", "demo-resnet"])
def test_only_the_image_tower_is_trained(name):
    add_model_configs()
    model = open_clip.create_model(name)
    train_image_tower_only(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"visual.{name}" for name, _ in model.visual.named_parameters()}


@pytest.fixture(scope="module", params=LOSSES)
def finished(request, shards, tmp_path_factory):
    logs = tmp_path_factory.mktemp(request.param)
    assert run(command(shards, logs, "run", request.param)) == 0
    return logs / "run"


def test_an_ordinary_checkpoint(finished):
    path = finished / "checkpoints" / "epoch_2.pt"
    content = torch.load(path, weights_only=True)
    model = open_clip.create_model("demo-vit", pretrained=str(path))
    torch.manual_seed(3)
    start = open_clip.create_model("demo-vit").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, content["state_dict"][name])
        if name == "logit_scale":
            assert value == pytest.approx(np.log(10), rel=1e-6)  # the constant temperature of 0.1
        else:
            assert torch.equal(value, start[name]) == (not name.startswith("visual.")), name
    trained, projector = content[HEADS_KEY]["state_dict"], create_loss("simclr", embed_dim=64, seed=3).projector
    assert content[HEADS_KEY]["kind"] == "projector"
    assert all(not torch.equal(value, trained[name]) for name, value in projector.state_dict().items())


def test_evaluation_leaves_the_projector_out(finished):
    path = finished / "checkpoints" / "epoch_2.pt"
    loaded = load_model("demo-vit", path).model
    stock = open_clip.create_model("demo-vit", pretrained=str(path)).eval()
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.encode_image(images), stock.encode_image(images))
    assert with_heads(stock, read_heads(path)) is stock


def test_logs_know_the_number_of_candidates(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [16 * step for step in range(1, 11)]
    for line in lines:
        assert line["chance"] == pytest.approx(np.log(31))
        assert line["temperature"] == pytest.approx(0.1)
        assert 0 < line["infonce"] < 2 * np.log(31)


def test_names_and_options():
    assert options_used_by("sogclr")["views"] == 1
    assert options_used_by("sogclr", views=2)["temperature"] == options_used_by("simclr")["temperature"] == 0.1
    assert views(parse(["--loss", "sogclr"])[1]) == views(parse(["--loss", "openclip"])[1]) == 1
    assert views(parse(["--loss", "sogclr", "--views", "2"])[1]) == views(parse(["--loss", "simclr"])[1]) == 2
    sizes = {"embed_dim": 8, "num_samples": 20}
    assert (create_loss("sogclr", **sizes).views, create_loss("sogclr", **sizes, views=2).views) == (1, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--loss", "neuclip", "--views", "2"],
            "--views 2: neuclip compares images with texts; .* simclr, sogclr",
        ),
        (["--loss", "openclip", "--views", "2"], "--views 2: openclip compares images with texts"),
        (["--loss", "sogclr", "--views", "2", "--rho", "5"], "--rho: not used by the loss 'sogclr with --views 2'"),
        (["--loss", "sogclr", "--projection-dim", "8"], "--projection-dim: not used by the loss 'sogclr'"),
        (["--loss", "simclr", "--normalizer", "queue"], "--normalizer: not used by the loss 'simclr'"),
    ],
)
def test_wrong_command_lines_are_refused_with_the_reason(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(argv)


def test_wrong_inputs_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="views=1: this loss compares two views of each image"):
        create_loss("simclr", embed_dim=8, views=1)
    with pytest.raises(ValueError, match="views=3: expected an integer >= 1, at most 2"):
        create_loss("simclr", embed_dim=8, views=3)
    loss = create_loss("sogclr", embed_dim=8, num_samples=20, views=2)
    features, scale = torch.eye(8)[:4], torch.tensor(10.0)
    with pytest.raises(ValueError, match="needs index="):
        loss(features, features, scale)
    with pytest.raises(ValueError, match=r"index: expected int64 of shape \(4,\), found \(3,\)"):
        loss(features, features, scale, index=torch.arange(3))
    with pytest.raises(ValueError, match=r"index \[20\]: expected 0 <= index < num_samples=20"):
        loss(features, features, scale, index=torch.tensor([0, 1, 2, 20]))
    with pytest.raises(ValueError, match="at least 2 samples"):
        loss(features[:1], features[:1], scale, index=torch.tensor([0]))
    with pytest.raises(ValueError, match="width 8, the loss was created with embed_dim=7"):
        create_loss("simclr", embed_dim=7)(features, features, scale)


def test_an_image_keeps_the_mean_of_its_views():
    loss = create_loss("sogclr", embed_dim=8, num_samples=20, views=2, gamma=1.0).double()
    first, second = (nn.functional.normalize(torch.randn(4, 8, dtype=torch.float64), dim=1) for _ in range(2))
    index, scale = torch.tensor([3, 7, 11, 0]), torch.tensor(10.0)
    estimates = loss.log_normalizers(first, second, scale, index=index)
    loss(first, second, scale, index=index)
    kept = loss.log_normalizers(first, second, scale, index=index)
    expected = torch.log((estimates[0].exp() + estimates[1].exp()) / 2)
    torch.testing.assert_close(kept[0], expected)
    torch.testing.assert_close(kept[1], expected)
    assert not torch.allclose(*estimates)
