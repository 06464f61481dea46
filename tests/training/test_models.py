"""Models that have more than a contrastive loss trains, and how a run's model comes back in stock OpenCLIP."""

import json
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.errors import UsageError
from openclip_ext.training.model import MODEL_CONFIG
from tests.distributed.pool import two_ranks
from tests.training.runs import command, losses_of, metrics_of, run

VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
BIASED = {"embed_dim": 32, "init_logit_bias": -10, "vision_cfg": VISION, "text_cfg": TEXT}
CAPTIONER = {
    "embed_dim": 32,
    "vision_cfg": {**VISION, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    "text_cfg": {**TEXT, "context_length": 19, "embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {**TEXT, "context_length": 19, "attn_pooler_heads": 2},
    "custom_text": True,
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    (folder / "tiny-biased.json").write_text(json.dumps(BIASED))
    (folder / "tiny-storyteller.json").write_text(json.dumps(CAPTIONER))
    add_model_configs()
    open_clip.add_model_config(folder)
    return folder


def of_model(name: str) -> list[str]:
    return ["--model", name, "--force-patch-dropout", "0", "--epochs", "1"]


@pytest.mark.parametrize("loss", ["neuclip", "siglip"])
def test_a_logit_bias_trains_with_the_losses_that_use_it(shards, configs, tmp_path, loss):
    """DDP ends at the second step where a parameter got no gradient."""
    argv = [*command(shards, tmp_path, "run", loss, *of_model("tiny-biased")), "--batch-size", "8"]
    two_ranks().run(run_with_configs, str(configs), argv, group=False)
    assert len(losses_of(tmp_path / "run")) == 5
    state = torch.load(tmp_path / "run" / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]
    assert (float(state["module.logit_bias"]) == -10) == (loss != "siglip")


def run_with_configs(configs: str, argv: list[str]) -> None:
    open_clip.add_model_config(configs)
    assert run(argv) == 0


def test_a_captioner_is_known_by_its_decoder(shards, configs, tmp_path):
    with pytest.raises(UsageError, match="tiny-storyteller trains a captioner, too, which --loss neuclip would ignore"):
        run(command(shards, tmp_path, "run", "neuclip", *of_model("tiny-storyteller")))


def test_a_captioner_trains_with_openclips_loss(shards, configs, tmp_path):
    model = open_clip.create_model("tiny-storyteller")
    # OpenCLIP 3.3 leaves it as the memory was, now and then NaN.
    torch.nn.init.normal_(model.text_decoder.text_projection, std=0.02)
    torch.save(model.state_dict(), tmp_path / "start.pt")
    start = ["--pretrained", str(tmp_path / "start.pt")]
    assert run(command(shards, tmp_path, "run", "openclip", *of_model("tiny-storyteller"), *start)) == 0
    assert set(metrics_of(tmp_path / "run")[0]["terms"]) == {"contrastive_loss", "caption_loss"}


# A loss, the model, and flags that change it or its transform.
PRINTED = [
    ("neuclip", "demo-resnet", ""),
    (
        "siglip",
        "demo-vit",
        "--force-image-size 48 --force-quick-gelu --force-context-length 24 --force-custom-text "
        "--image-mean 0.5 0.5 0.5 --image-resize-mode squash",
    ),
]


def test_the_printed_lines_load_the_model_in_stock_openclip(shards, tmp_path, capsys):
    """In a process that never imports this package."""
    program = ["import sys, torch, open_clip"]
    for loss, model, flags in PRINTED:
        assert run(command(shards, tmp_path, loss, loss, *of_model(model), *flags.split())) == 0
        lines = capsys.readouterr().out.split("To load the model in stock OpenCLIP:\n")[1].splitlines()[:2]
        assert "stock OpenCLIP" not in (tmp_path / loss / "out.log").read_text()
        assert [path.name for path in (tmp_path / loss / MODEL_CONFIG).iterdir()] == [f"{model}.json"]
        program += [
            *(line.strip() for line in lines),
            f"saved = torch.load({str(tmp_path / loss / 'checkpoints' / 'epoch_1.pt')!r}, weights_only=True)['state_dict']",
            "state = model.state_dict()",
            "assert saved.keys() == state.keys()",
            "assert all(torch.equal(saved[name], state[name]) for name in saved)",
            "print(preprocess, 'openclip_ext' in sys.modules)",
        ]
    started = [sys.executable, "-c", "\n".join(program)]
    result = subprocess.run(started, capture_output=True, text=True, cwd=Path.home())
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("False")
    assert result.stdout.count("0.5, 0.5, 0.5") >= 1
