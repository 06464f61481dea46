"""Frozen layers do not change: BatchNorm keeps its statistics, and dropout does not act."""

import json

import open_clip
import pytest
import torch

from openclip_ext import compat
from openclip_ext.contrastive.model import set_training_mode
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.model import build_model
from tests.devices import CAN_SHARD
from tests.distributed.pool import two_ranks
from tests.training.commands import plan_of
from tests.training.runs import command, run
from tests.training.test_models import TEXT, VISION, model_folder

RESNET = ("--model", "demo-resnet", "--force-patch-dropout", "0")
SHORT = ("--train-num-samples", "32")


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """Return a checkpoint with BatchNorm statistics of an earlier training."""
    logs = tmp_path_factory.mktemp("base")
    assert run(command(shards, logs, "base", "openclip", *RESNET, *SHORT, "--epochs", "1")) == 0
    return logs / "base" / "checkpoints" / "epoch_1.pt"


def image_tower(checkpoint):
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    state = {name.removeprefix("module."): value for name, value in state.items()}
    return {name: value for name, value in state.items() if name.startswith("visual.")}


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--lock-image --accum-freq 2 --model-ema-decay 0.9", 1),
        ("--lock-image --lock-image-freeze-bn-stats --grad-checkpointing", 1),
        ("--lora-rank 2 --lora-targets text", 1),
        ("--lock-image", 2),
        pytest.param(
            "--lock-image --fsdp", 2, marks=pytest.mark.skipif(not CAN_SHARD, reason="this torch shards only on a GPU")
        ),
    ],
)
def test_a_frozen_image_tower_does_not_change(base, shards, tmp_path, flags, ranks):
    """An evaluation in between, after which training continues, does not end the evaluation mode of frozen layers."""
    more = [
        "--pretrained",
        str(base),
        "--no-before-after",
        "--val-data",
        shards,
        "--batch-size",
        "8",
        *SHORT,
        *flags.split(),
    ]
    argv = command(shards, tmp_path, "run", "openclip", *RESNET, *more)
    assert run(argv) == 0 if ranks == 1 else two_ranks().run(run, argv, group=False) == [0, 0]
    before, after = image_tower(base), image_tower(tmp_path / "run" / "checkpoints" / "epoch_2.pt")
    assert any(name.endswith("running_mean") for name in before)
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
    log = (tmp_path / "run" / "out.log").read_text()
    assert log.count("evaluation mode") == 1


def test_only_the_frozen_layers_of_a_tower_stay_in_evaluation_mode(tmp_path):
    vision = {"image_size": 32, "timm_model_name": "test_resnet", "timm_model_pretrained": False, "timm_pool": "avg"}
    name = model_folder(tmp_path / "folder", {**vision, "timm_proj": "linear"})
    flags = ["--model", name, "--lock-image", "--lock-image-unlocked-groups", "2"]
    model = build_model(plan_of(*flags).model, torch.device("cpu"), 0).model
    set_training_mode(model)
    before = {key: value.clone() for key, value in model.visual.named_buffers() if key.endswith("running_mean")}
    model(torch.rand(4, 3, 32, 32), torch.ones(4, 20, dtype=torch.int64))
    moved = {
        key for key, value in model.visual.named_buffers() if key in before and not torch.equal(before[key], value)
    }
    trained = {key.removesuffix("weight") for key, value in model.visual.named_parameters() if value.requires_grad}
    assert moved == {key for key in before if key.removesuffix("running_mean") in trained} and moved < before.keys()


@pytest.mark.parametrize("tower", ["image", "text"])
def test_dropout_of_a_frozen_tower_does_not_act(tmp_path, tower):
    add_model_configs()
    text, options = TEXT, {"force_patch_dropout": 0.5}
    if tower == "text":
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        transformers.BertConfig(vocab_size=99, **sizes).save_pretrained(tmp_path / "bert")
        text = {"hf_model_name": str(tmp_path / "bert"), "hf_model_pretrained": False, "hf_proj_type": "mlp"}
        options = {"pretrained_text": False}
    config = {"embed_dim": 32, "custom_text": True, "vision_cfg": VISION, "text_cfg": text}
    (tmp_path / "dropping.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model("dropping", **options)
    assert not torch.equal(*encoded_twice(model.train(), tower))
    compat.lock_text_tower(model, 0, True) if tower == "text" else model.visual.lock()
    set_training_mode(model)
    assert torch.equal(*encoded_twice(model, tower))


def encoded_twice(model, tower):
    images, texts = torch.rand(4, 3, 32, 32), torch.randint(1, 99, (4, 20))
    return [model.encode_image(images) if tower == "image" else model.encode_text(texts) for _ in range(2)]
