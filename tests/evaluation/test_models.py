"""Evaluations load every model that OpenCLIP loads. Other input is rejected with a one-sentence error."""

import contextlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation import models
from openclip_ext.evaluation.models import open_model, options_of_run
from openclip_ext.evaluation.results import run_identity
from openclip_ext.losses.heads import HEADS_KEY
from tests.evaluation.datasets import TINY_MODEL, tiny_checkpoint, tiny_model_config


def test_formats_of_checkpoints(tiny, tiny_folder, tmp_path):
    state_dict = torch.load(tiny_folder / "epoch_1.pt", weights_only=True)["state_dict"]
    loaded = tiny.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_dict.items()) and not tiny.model.training
    torch.save(state_dict, tmp_path / "plain.pt")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state_dict.items()}}, tmp_path / "ddp.pt")
    torch.save(state_dict, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({name: value.contiguous() for name, value in state_dict.items()}, tmp_path / "model.safetensors")
    for path in tmp_path.iterdir():
        assert open_model(path, TINY_MODEL).weights_sha256 == tiny.weights_sha256, path.name


def test_a_sigmoid_loss_checkpoint_loads_into_a_stock_configuration(tiny_folder, tmp_path):
    trained = open_clip.create_model(TINY_MODEL, init_logit_bias=-10.0)
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "siglip.pt")
    save_file(trained.state_dict(), tmp_path / "siglip.safetensors")
    for name in ("siglip.pt", "siglip.safetensors"):
        assert open_model(tmp_path / name, TINY_MODEL).model.logit_bias.item() == -10
    config = {"model_cfg": json.loads((tiny_folder / f"{TINY_MODEL}.json").read_text())}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "siglip.pt").rename(tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "siglip.safetensors").unlink()
    assert open_model(f"local-dir:{tmp_path}").model.logit_bias.item() == -10


def test_local_dir_models_bring_their_weights(tiny, tiny_folder, tmp_path):
    config = {"model_cfg": json.loads((tiny_folder / f"{TINY_MODEL}.json").read_text())}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    torch.save(tiny.model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    first = open_model(f"local-dir:{tmp_path}")
    assert first.weights_sha256 == tiny.weights_sha256
    config["model_cfg"]["quick_gelu"] = True
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    other = open_model(f"local-dir:{tmp_path}")  # another model with these weights, which has other results
    assert run_identity(other, "fp32") != run_identity(first, "fp32")
    trained = open_model(tiny_checkpoint(tmp_path, seed=5, file_name="run/epoch_1.pt"), TINY_MODEL)
    loaded = open_model(trained.checkpoint, f"local-dir:{tmp_path}")
    assert loaded.weights_sha256 == trained.weights_sha256 != tiny.weights_sha256
    with pytest.raises(UsageError, match="has its own weights"):
        open_model("epoch_1.pt", f"local-dir:{tmp_path}")


def test_what_is_not_there_is_refused(tiny_folder, tmp_path):
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for name, checkpoint, message in (
        ("ViT-B-32", "opena", "There is no checkpoint opena: .*the pretrained tags of ViT-B-32: openai, "),
        (TINY_MODEL, None, "--checkpoint is missing"),
        (None, tmp_path / "typo", "typo: not found: expected a run folder"),
        (None, tiny_folder / "epoch_1.pt", r"epoch_1\.pt: the model is unknown"),
        (TINY_MODEL, tiny_folder, "neither a file nor a pretrained tag"),
        ("ViT-B32", tiny_folder / "epoch_1.pt", r"no OpenCLIP model 'ViT-B32'; did you mean ViT-B-32"),
        (TINY_MODEL, tmp_path / "text.pt", r"text\.pt cannot be loaded"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(checkpoint, name)


def test_a_checkpoint_of_another_model_is_refused(tiny_folder, tmp_path):
    open_clip.add_model_config(tiny_model_config(tmp_path, "tiny-wide", width=48))
    open_clip.add_model_config(tiny_model_config(tmp_path, "tiny-deep", layers=3))
    for name in ("tiny-wide", "tiny-deep"):
        with pytest.raises(UsageError, match=rf"{name} with .*epoch_1\.pt cannot be loaded; check that --model"):
            open_model(tiny_folder / "epoch_1.pt", name)


def test_a_checkpoint_that_training_replaces_during_the_read_is_refused(tiny_folder, tmp_path, monkeypatch):
    checkpoint = shutil.copy(tiny_folder / "epoch_1.pt", tmp_path / "epoch_latest.pt")

    def replace_after(path):
        shutil.copy(checkpoint, tmp_path / "new.pt").replace(checkpoint)

    monkeypatch.setattr(models, "read_heads", replace_after)
    with pytest.raises(UsageError, match=r"training replaced .*epoch_latest\.pt while it was read"):
        open_model(checkpoint, TINY_MODEL)


@pytest.mark.parametrize("evaluated", [True, False])
def test_heads_of_an_unknown_kind_are_refused_if_evaluations_need_them(tiny, tmp_path, evaluated):
    """Known kinds of projection heads are tested in tests/training/test_cliplite.py."""
    entry = {"kind": "test", "config": {}, "evaluated": evaluated, "state_dict": {}}
    torch.save({"state_dict": tiny.model.state_dict(), HEADS_KEY: entry}, tmp_path / "heads.backup")
    with (
        contextlib.nullcontext()
        if not evaluated
        else pytest.raises(
            UsageError, match=r"needs heads of the kind 'test': expected one of cliplite, projector.*find_method"
        )
    ):
        open_model(tmp_path / "heads.backup", TINY_MODEL)


def test_a_broken_model_is_no_score(tiny_folder, make_encoder):
    broken = open_model(tiny_folder / "epoch_1.pt", TINY_MODEL).model
    nn.init.constant_(broken.visual.proj, torch.nan)
    nn.init.constant_(broken.text_projection, torch.inf)
    encoder = replace(make_encoder(), model=broken)
    with pytest.raises(ValueError, match="non-finite image embeddings"):
        encoder.encode_images(torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match="non-finite text embeddings"):
        encoder.encode_texts(["a", "b"])


def test_shared_classes_are_encoded_once(make_encoder):
    encoded = []
    encoder = make_encoder()
    tokenizer = encoder.tokenizer
    encoder.tokenizer = lambda texts: encoded.extend(texts) or tokenizer(texts)
    first = encoder.class_embeddings(["cat", "dog", "cat"], ["a {c}", "the {c}"])
    assert sorted(encoded) == ["a cat", "a dog", "the cat", "the dog"] and torch.equal(first[0], first[2])
    encoded.clear()
    second = encoder.class_embeddings(["owl", "dog"], ["a {c}", "the {c}"])
    assert sorted(encoded) == ["a owl", "the owl"] and torch.equal(first[1], second[1])
    encoder.class_embeddings(["dog"], ["a {c}"])
    assert encoded[2:] == ["a dog"], "new templates need a new embedding"


@pytest.fixture
def run_folder(tmp_path, caplog) -> Path:
    """Return a run folder with the tiny model's checkpoint; tests write its ``config.json``."""
    caplog.set_level(logging.WARNING)  # an earlier test may have set another level
    tiny_checkpoint(tmp_path, file_name="run/checkpoints/epoch_1.pt")
    return tmp_path / "run"


def write_config(folder: Path, **flags: Any) -> None:
    content = {"flags": {"model": TINY_MODEL, "image_std": None, **flags}, "loss": {}}
    (folder / "config.json").write_text(json.dumps({"resolved": content}))


@pytest.mark.parametrize(
    ("parameters", "options", "expected"),
    [
        ({"force_quick_gelu": True, "image_mean": [0.5] * 3}, {}, {"force_quick_gelu": True, "image_mean": [0.5] * 3}),
        ({"force_image_size": [64]}, {"force_image_size": 32}, {"force_image_size": 32}),
        ({"force_context_length": 9}, {}, {"force_context_length": 9}),
        ({"image_resize_mode": "squash"}, {"force_image_size": None}, {"image_resize_mode": "squash"}),
        ({"wandb_notes": "try 2\nforce_image_size: 64", "image_mean": None}, {}, {}),
    ],
)
def test_the_models_options_are_those_of_its_run(parameters, options, expected, run_folder, caplog):
    write_config(run_folder, **parameters)
    loaded = open_model(run_folder / "checkpoints" / "epoch_1.pt", TINY_MODEL, **options)
    assert loaded.config["options"] == expected
    assert not caplog.text  # such as OpenCLIP's warning about a model without weights
    size = expected.get("force_image_size", 32)
    assert loaded.transform(Image.new("RGB", (80, 80))).shape == (3, size, size)
    assert loaded.tokenizer(["a"]).shape == (1, expected.get("force_context_length", 24))


@pytest.mark.parametrize("folder", ["run", "run/checkpoints"])
def test_a_checkpoint_has_the_options_of_its_run_and_a_tag_has_none(folder, run_folder, tmp_path, monkeypatch):
    write_config(run_folder, force_quick_gelu=True)
    monkeypatch.chdir(tmp_path / folder)
    checkpoint = next(Path().rglob("epoch_1.pt"))
    link = tmp_path / "link.pt"
    link.symlink_to(checkpoint.absolute())
    for path in (checkpoint, link):
        assert open_model(path, TINY_MODEL).config["options"] == {"force_quick_gelu": True}
    assert options_of_run("tag") == {}


def test_a_checkpoint_in_a_linked_folder_has_the_options_of_its_run(run_folder, tmp_path):
    write_config(run_folder, force_quick_gelu=True)
    (run_folder / "checkpoints").rename(tmp_path / "disk")
    (run_folder / "checkpoints").symlink_to(tmp_path / "disk")
    loaded = open_model(run_folder / "checkpoints" / "epoch_1.pt", TINY_MODEL)
    assert loaded.config["options"] == {"force_quick_gelu": True}


def test_another_architecture_whose_weights_fit_is_named(run_folder, caplog, tmp_path):
    """Two models with equal tensor shapes may differ in the activation. Both load, so a warning must report the difference."""
    config = json.loads((tmp_path / f"{TINY_MODEL}.json").read_text())
    (tmp_path / "tiny-quick.json").write_text(json.dumps({**config, "quick_gelu": True}))
    write_config(run_folder, model="tiny-quick")
    checkpoint = run_folder / "checkpoints" / "epoch_1.pt"
    open_model(checkpoint, TINY_MODEL)
    assert f"was trained with --model tiny-quick and is evaluated with --model {TINY_MODEL}" in caplog.text
    caplog.clear()
    open_model(checkpoint, "tiny-quick", model_config=tmp_path / "tiny-quick.json")
    assert "trained with" not in caplog.text
