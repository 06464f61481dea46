"""After ``register()``, OpenCLIP creates this package's losses, and rejects losses that its loop does not support."""

import argparse
import logging
import math
import re
import sys
from pathlib import Path

import open_clip
import open_clip.factory
import pytest
import torch
import torch.nn.functional as F
from open_clip_train import main as script
from open_clip_train import params, train

import openclip_ext
from openclip_ext.cli.options import Option
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.losses import registry
from openclip_ext.losses.options import OPTIONS
from openclip_ext.model_configs import add_model_configs


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Call ``register()``, and restore OpenCLIP's functions after the test."""
    places = {
        "create_loss": (open_clip, open_clip.factory, script),
        "parse_args": (params, script),
        "train_one_epoch": (train, script),
    }
    for name, modules in places.items():
        for module in modules:
            monkeypatch.setattr(module, name, getattr(module, name))
    add_model_configs()
    openclip_ext.register()


def parse(*argv: str) -> argparse.Namespace:
    """Parse a command line like OpenCLIP's script, and set the attributes that the script adds."""
    args = script.parse_args(["--model", "demo-vit", *argv])
    args.distill, args.rank, args.world_size = False, 0, 1
    return args


def openclip_args(**changes) -> argparse.Namespace:
    """Return arguments from a parser without the flags that ``register()`` adds."""
    stock = {name: value for name, value in vars(parse()).items() if name not in ("loss", "loss_options")}
    return argparse.Namespace(**stock | changes)


def test_openclip_builds_our_loss_with_the_options_of_args():
    loss = open_clip.create_loss(openclip_args(loss="neuclip", prototypes=12, loss_eps=1e-6, eps=1.0))
    assert isinstance(loss, GlobalContrastiveLoss)
    assert loss.embed_dim == 64  # read from the model's configuration
    assert loss.objective.eps == 1e-6  # loss_eps, not Adam's eps
    image = F.normalize(torch.randn(6, 64), dim=1).requires_grad_()
    terms = loss(image_features=image, text_features=image.flip(0), logit_scale=torch.tensor(10.0), output_dict=True)
    sum(terms.values()).backward()
    assert image.grad.abs().sum() > 0


@pytest.mark.parametrize(("samples", "start"), [(None, 0.1), (64 * 2 * 70 - 1, 0.1), (64 * 2 * 70, 0.07)])
def test_a_solved_temperature_starts_as_in_our_training(samples: int | None, start: float):
    args = openclip_args(loss="queueclip", epochs=10, batch_size=64, world_size=2, train_num_samples=samples)
    assert open_clip.create_loss(args).initial_logit_scale == pytest.approx(-math.log(start))


def test_the_models_temperature_has_a_gradient_even_if_the_loss_does_not_train_it():
    """DistributedDataParallel needs the gradient in each step."""
    loss = open_clip.create_loss(openclip_args(loss="neuclip", loss_options={"temperature_scheme": "constant"}))
    features = F.normalize(torch.randn(2, 6, 64), dim=2).requires_grad_()
    scale = torch.tensor(10.0, requires_grad=True)
    terms = loss(image_features=features[0], text_features=features[1], logit_scale=scale, output_dict=True)
    sum(terms.values()).backward()
    assert scale.grad == 0 and features.grad.abs().sum() > 0


def test_options_of_openclips_loss_are_not_dropped():
    """With options of this package, ``--loss openclip`` is composed of this package's parts."""
    options = {"temperature_scheme": "constant", "temperature": 0.05}
    loss = open_clip.create_loss(openclip_args(loss="openclip", loss_options=options))
    assert isinstance(loss, GlobalContrastiveLoss) and loss.initial_logit_scale == pytest.approx(math.log(20))


def test_every_place_that_binds_the_function_gets_it_once():
    before = open_clip.create_loss
    openclip_ext.register()
    assert script.create_loss is open_clip.create_loss is open_clip.factory.create_loss is before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "fastclip"}, "every sample's index"),
        ({"loss": "neuclip", "accum_freq": 2}, "--accum-freq 2"),
        ({"loss": "cliplite"}, "adds a projection to the model"),
        ({"loss": "queueclip", "model": "coca_ViT-B-32"}, "would not train the captions of coca_ViT-B-32"),
        ({"loss": "openclip", "normalizer": "minibatch", "model": "coca_ViT-B-32"}, "without --normalizer"),
        ({"loss": "neuclip", "loss_options": {"gamma": 0.5}}, "gamma=: not used by the loss 'neuclip'"),
        ({"loss": "openclip", "loss_options": {"no_option": 1}}, "no_option=: not used by the loss 'openclip'"),
        ({"loss": "openclip", "loss_options": {"equal_captions": "mask"}}, "labels of equal captions"),
    ],
)
def test_what_openclips_loop_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        open_clip.create_loss(openclip_args(**changes))


# --- OpenCLIP's training script ---------------------------------------------------------------------------------------


def test_the_stock_parser_knows_our_losses_and_their_options():
    args = parse("--loss", "neuclip", "--prototypes", "12", "--restart-every", "none", "--lr", "1e-3")
    assert (args.loss, args.loss_dist_impl, args.siglip, args.lr) == ("neuclip", None, False, 1e-3)
    loss = open_clip.create_loss(args)
    assert len(loss.normalizer.prototypes[0]) == 12
    assert loss.normalizer.restart_every is None


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        ([], open_clip.ClipLoss),
        (["--loss", "siglip"], open_clip.loss.SigLipLoss),
        (["--siglip", "--loss-dist-impl", "gather"], open_clip.loss.SigLipLoss),
    ],
)
def test_the_stock_parser_with_openclips_losses(argv, kind):
    args = parse(*argv)
    assert args.siglip == (kind is open_clip.loss.SigLipLoss)
    without_a_name = openclip_args(siglip=args.siglip, loss_dist_impl=args.loss_dist_impl)
    assert type(open_clip.create_loss(args)) is type(open_clip.create_loss(without_a_name)) is kind


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss", "neuclp"], "did you mean neuclip"),
        (["--loss", "absent_module:METHOD"], "No module named 'absent_module'"),
        (["--loss", "neuclip", "--siglip"], "contradict each other"),
        (["--los", "neuclip"], "--los: abbreviations are not accepted; write it out: --loss"),
    ],
)
def test_the_stock_parser_refuses(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_option_of_an_own_loss_does_not_take_a_flag_of_openclip(monkeypatch, capsys):
    monkeypatch.setitem(OPTIONS, "lr", Option("lr", float, 0.1, "an option of an own loss"))
    with pytest.raises(SystemExit):
        parse("--lr", "1e-3")
    assert "an option of your loss has the name of another flag, --lr" in capsys.readouterr().err


def test_options_of_the_models_temperature_are_said_to_have_no_effect(caplog):
    open_clip.create_loss(openclip_args(loss="neuclip-paper", loss_options={"lr_tau": 1e-4, "prototypes": 4}))
    assert "--lr-tau: no effect on --loss neuclip-paper in OpenCLIP's loop" in caplog.text


def test_the_recipe_of_the_guide_trains_our_loss(tmp_path, monkeypatch):
    built = []
    create = registry.create_loss
    monkeypatch.setattr(
        registry, "create_loss", lambda *args, **options: built.append(create(*args, **options)) or built[0]
    )
    data = ["--dataset-type", "synthetic", "--train-num-samples", "8", "--batch-size", "4", "--workers", "0"]
    run = ["--epochs", "2", "--device", "cpu", "--precision", "fp32", "--logs", str(tmp_path), "--name", "run"]
    guide = (Path(__file__).parents[2] / "docs" / "coming-from-openclip.md").read_text(encoding="utf-8")
    recipe = re.search(r"as `train_clip.py`:\n\n```python\n(.*?)```", guide, flags=re.DOTALL)[1]
    argv = ["train_clip.py", "--model", "demo-vit", "--loss", "amorlip", "--fit-every", "1", *data, *run]
    monkeypatch.setattr(sys, "argv", argv)
    root_handlers = list(logging.root.handlers)
    exec(recipe, {})
    logging.root.handlers[:] = root_handlers  # OpenCLIP's script leaves its log file there
    assert isinstance(built[0], GlobalContrastiveLoss)
    assert (built[0].calls, built[0].epoch) == (4, 1)
    assert built[0].normalizer.fit_every == 1
    assert "loss: amorlip" in (tmp_path / "run" / "params.txt").read_text()
