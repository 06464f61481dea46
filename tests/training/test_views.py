"""Image-only runs (SimCLR): two views per image, a trained image tower, and an ordinary CLIP checkpoint."""

import random

import numpy as np
import open_clip
import pytest
import torch

from openclip_ext.contrastive.model import prepare_for
from openclip_ext.data.loader.build import build_train_loader
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.models import open_model
from openclip_ext.losses.heads import HEADS_KEY, read_heads, with_heads
from openclip_ext.losses.registry import create_loss
from tests.training.runs import command, run, stock_model

LOSSES = {"simclr": [], "sogclr": ["--views", "2"]}


def noise(image):
    """Return three sums of random numbers (torch, random, NumPy), then the mean color, which identifies the image."""
    random_numbers = torch.rand(3) + random.random() + np.random.random()
    return torch.cat([random_numbers, torch.tensor(np.asarray(image).mean(axis=(0, 1)) / 255)]).float()


def epoch_of(shards, views, workers=0, epoch=0):
    loader = build_train_loader(
        DataSpec(shards),
        TrainLoaderConfig(batch_size=4, workers=workers, seed=5, views=views),
        preprocess=noise,
        tokenizer=lambda captions: torch.zeros(len(captions), 1),
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
        assert torch.equal(pixels[0], one[index])  # the first view does not depend on the number of views
        assert torch.equal(pixels, three[index][:2])
        assert torch.equal(pixels, with_workers[index])
        assert torch.equal(pixels[0, 3:], pixels[1, 3:])  # both views are of the same image
        assert not torch.equal(pixels[0, :3], pixels[1, :3])
    assert len({tuple(view.tolist()) for pixels in two.values() for view in pixels}) == 2 * len(two)
    assert all(not torch.equal(pixels, two[index]) for index, pixels in next_epoch.items() if index in two)


@pytest.fixture(scope="module", params=LOSSES)
def finished(request, shards, tmp_path_factory):
    logs = tmp_path_factory.mktemp(request.param)
    assert run(command(shards, logs, "run", request.param)) == 0
    return logs / "run"


def test_an_ordinary_checkpoint(finished):
    path = finished / "checkpoints" / "epoch_2.pt"
    content = torch.load(path, weights_only=True)
    model = stock_model(path)
    torch.manual_seed(3)
    start = open_clip.create_model("demo-vit").state_dict()
    for name, value in model.state_dict().items():
        if name == "logit_scale":
            assert value == pytest.approx(np.log(10), rel=1e-6)  # log(1 / 0.1): the temperature stays 0.1
        else:
            assert torch.equal(value, start[name]) == (not name.startswith("visual.")), name
    trained, projector = content[HEADS_KEY]["state_dict"], create_loss("simclr", embed_dim=64, seed=3).projector
    assert content[HEADS_KEY]["kind"] == "projector"
    assert all(not torch.equal(value, trained[name]) for name, value in projector.state_dict().items())


def test_evaluation_leaves_the_projector_out(finished):
    path = finished / "checkpoints" / "epoch_2.pt"
    loaded = open_model(path, "demo-vit").model
    stock = open_clip.create_model("demo-vit", pretrained=str(path)).eval()
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.encode_image(images), stock.encode_image(images))
    assert with_heads(stock, read_heads(path)) is stock


def test_a_locked_image_tower_stays_locked():
    model = open_clip.create_model("demo-vit")
    model.lock_image_tower()
    prepare_for(create_loss("simclr", embed_dim=64), model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
