"""``register()``: stock OpenCLIP builds our losses, and refuses what its loop cannot do."""

import argparse

import open_clip
import open_clip.factory
import pytest
import torch
import torch.nn.functional as F

import openclip_ext
from openclip_ext import compat
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.model_configs import add_model_configs


@pytest.fixture(autouse=True)
def registered():
    """Register, and leave OpenCLIP as it was for the other tests."""
    from open_clip_train import main as script

    originals = [(place, place.create_loss) for place in (open_clip, open_clip.factory, script)]
    add_model_configs()
    openclip_ext.register()
    yield
    for place, original in originals:
        place.create_loss = original


def openclip_args(**changes) -> argparse.Namespace:
    """What OpenCLIP's create_loss reads, and what a user's parser adds."""
    defaults = {
        "model": "demo-vit", "distill": False, "siglip": False, "horovod": False, "rank": 0, "world_size": 1,
        "local_loss": False, "gather_with_grad": False, "loss_dist_impl": None, "accum_freq": 1, "eps": 1e-8, "seed": 0,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **changes})


def test_openclip_builds_our_loss_with_the_options_of_args():
    loss = open_clip.create_loss(openclip_args(loss="neuclip", prototypes=12, rho=8.0))
    assert isinstance(loss, GlobalContrastiveLoss)
    assert loss.embed_dim == 64  # from the model's configuration
    image = F.normalize(torch.randn(6, 64), dim=1).requires_grad_()
    terms = loss(image_features=image, text_features=image.flip(0), logit_scale=torch.tensor(10.0), output_dict=True)
    sum(terms.values()).backward()
    assert image.grad.abs().sum() > 0


@pytest.mark.parametrize("loss", [None, "openclip"])
def test_other_losses_stay_openclips(loss):
    changes = {} if loss is None else {"loss": loss}
    assert type(open_clip.create_loss(openclip_args(**changes))) is open_clip.ClipLoss


def test_every_place_that_binds_the_function_gets_it():
    from open_clip_train import main as script

    assert script.create_loss is open_clip.create_loss is open_clip.factory.create_loss


def test_registering_again_changes_nothing():
    before = open_clip.create_loss
    openclip_ext.register()
    assert open_clip.create_loss is before


def test_adams_eps_is_not_the_losses():
    loss = open_clip.create_loss(openclip_args(loss="amorlip", eps=1.0))
    assert isinstance(loss, GlobalContrastiveLoss)
    with_eps = open_clip.create_loss(openclip_args(loss="neuclip", loss_eps=1e-6, eps=1.0))
    assert with_eps.objective.estimand.eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "fastclip"}, "every sample's index"),
        ({"loss": "neuclip", "accum_freq": 2}, "--accum-freq 2"),
        ({"loss": "neuclp"}, "neuclip"),
    ],
)
def test_what_openclips_loop_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        open_clip.create_loss(openclip_args(**changes))


def test_another_openclip_is_refused_by_version(monkeypatch):
    monkeypatch.setattr(open_clip, "__version__", "4.0.0")
    with pytest.raises(ImportError, match=r">=3\.3,<4, found 4\.0\.0"):
        compat.check_version()


def test_embedding_width_of_all_kinds_of_configurations():
    assert compat.embedding_dim("RN50") == 1024
    assert compat.embedding_dim("ViT-B-32") == 512
    for name in ("demo-vit", "demo-resnet"):
        model = open_clip.create_model(name)
        assert compat.embedding_dim("hf-hub:somebody/model", model) == 64  # without asking the hub
    custom = open_clip.create_model("demo-vit", force_custom_text=True)
    assert compat.embedding_dim("hf-hub:somebody/model", custom) == 64
    with pytest.raises(ValueError, match="embedding width"):
        compat.embedding_dim("no-such-model")
