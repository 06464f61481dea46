"""Models with parameters that a contrastive loss does not train, and trained models in stock OpenCLIP."""

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import prepare_for
from openclip_ext.diagnostics.finished_run import load_run
from openclip_ext.evaluation.models import open_model
from openclip_ext.losses import registry
from openclip_ext.losses.method import Method
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import LossConfig
from openclip_ext.training.model import MODEL_CONFIG, build_loss, build_model
from tests.distributed.pool import two_ranks
from tests.training.commands import plan_of
from tests.training.runs import EXIT_AFTER_SIGTERM, command, evaluation, losses_of, metrics_of, run

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


ONE_STEP = ("--train-num-samples", "16")


def of_model(name: str) -> list[str]:
    return ["--model", name, "--force-patch-dropout", "0", "--epochs", "1"]


@pytest.mark.parametrize("loss", ["neuclip", "siglip"])
def test_a_logit_bias_trains_with_the_losses_that_use_it(shards, configs, tmp_path, loss):
    """DDP fails at the second step if a trainable parameter gets no gradient."""
    argv = [*command(shards, tmp_path, "run", loss, *of_model("tiny-biased")), "--batch-size", "8"]
    two_ranks().run(run_with_configs, str(configs), argv, group=False)
    assert len(losses_of(tmp_path / "run")) == 5
    state = torch.load(tmp_path / "run" / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]
    assert (float(state["module.logit_bias"]) == -10) == (loss != "siglip")
    assert (tmp_path / "run" / "out.log").read_text().count("--loss siglip") == (loss != "siglip")


def test_weights_of_the_sigmoid_loss_start_another_loss(shards, tmp_path):
    """Stock OpenCLIP does not load a trained bias into a model without one."""
    add_model_configs()
    weights = tmp_path / "weights.pt"
    torch.save(open_clip.create_model("demo-vit", init_logit_bias=-7.0).state_dict(), weights)
    more = [*of_model("demo-vit"), "--pretrained", str(weights), "--val-data", shards, *ONE_STEP]
    assert run(command(shards, tmp_path, "run", "openclip", *more)) == 0
    open_clip.add_model_config(tmp_path / "run" / MODEL_CONFIG)
    for name in ("epoch_1", "interpolated"):
        model = open_clip.create_model("demo-vit", pretrained=str(tmp_path / "run" / "checkpoints" / f"{name}.pt"))
        assert model.logit_bias is None


def run_with_configs(configs: str, argv: list[str]) -> None:
    open_clip.add_model_config(configs)
    assert run(argv) == 0


def test_a_captioner_trains_with_openclips_loss(shards, configs, tmp_path):
    assert run(command(shards, tmp_path, "run", "openclip", *of_model("tiny-storyteller"), *ONE_STEP)) == 0
    assert set(metrics_of(tmp_path / "run")[0]["terms"]) == {"contrastive_loss", "caption_loss"}


TIMM = {"timm_model_name": "test_vit", "timm_model_pretrained": False, "timm_pool": "avg", "timm_proj": "linear"}


def model_folder(path: Path, vision: dict, scale: float = 100.0, bias: float | None = None) -> str:
    """Write a model folder in the format of the Hugging Face hub, with τ = 1/scale; return the value for ``--model``."""
    path.mkdir()
    config = {"embed_dim": 32, "custom_text": True, "vision_cfg": vision, "text_cfg": TEXT}
    if bias is not None:
        config["init_logit_bias"] = 0
    content = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5] * 3, "resize_mode": "squash"}}
    (path / "open_clip_config.json").write_text(json.dumps(content))
    name = f"local-dir:{path}"
    state = open_clip.create_model(name, load_weights=False).state_dict()
    state["logit_scale"].fill_(math.log(scale))
    if bias is not None:
        state["logit_bias"].fill_(bias)
    torch.save(state, path / "open_clip_pytorch_model.bin")
    return name


@pytest.mark.parametrize(
    ("loss", "bias", "flags", "expected"),
    [
        ("siglip", -16.5, "", 1 / 112),
        ("siglip", None, "", 1 / 112),
        ("openclip", None, "", 1 / 112),
        ("fastclip", None, "", 1 / 112),
        ("fastclip", None, "--temperature-min 0.02", 0.02),
        ("fastclip", None, "--temperature 0.05", 0.05),
    ],
)
def test_a_pretrained_temperature_outside_of_the_bounds_is_kept(shards, tmp_path, loss, bias, flags, expected):
    """Released SigLIP models have 1/τ of about 112, but OpenCLIP's bound is 100. After a resume, the bounds are the same."""
    name = model_folder(tmp_path / "folder", VISION, 112, bias)
    argv = command(shards, tmp_path, "run", loss, "--model", name, "--force-patch-dropout", "0", *flags.split())
    argv += ["--lr", "1e-9", "--loss-option=lr_tau=1e-9"] if loss == "fastclip" else ["--lr", "1e-9"]
    assert run([*argv, "--resume", "latest"], stop_after=2) == EXIT_AFTER_SIGTERM
    assert run([*argv, "--resume", "latest"]) == 0
    state = torch.load(tmp_path / "run" / "checkpoints" / "epoch_2.pt", weights_only=True)["state_dict"]
    assert math.exp(-state["logit_scale"]) == pytest.approx(expected, rel=1e-5)
    if loss == "siglip":  # weights without a bias get that of a new model, and not OpenCLIP's 0
        assert float(state["logit_bias"]) == pytest.approx(-10 if bias is None else bias)
    is_widened = not flags
    assert ("Temperature bounds" in (tmp_path / "run" / "out.log").read_text()) == is_widened


def test_evaluations_use_the_preprocessing_of_a_pretrained_tag(shards, tmp_path, monkeypatch):
    add_model_configs()
    file = tmp_path / "tag.pt"
    torch.save(open_clip.create_model("demo-vit").state_dict(), file)
    tag = {"file": str(file), "mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear"}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "demo-vit", {"tag": tag})
    assert run([*command(shards, tmp_path, "run", "openclip", *of_model("demo-vit")), "--pretrained", "tag"]) == 0
    found = open_model(tmp_path / "run" / "checkpoints" / "epoch_1.pt", "demo-vit").config["options"]
    values = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "image_interpolation": "bilinear"}
    assert {name: value for name, value in found.items() if name.startswith("image_")} == values
    file.unlink()  # the tools for finished runs need only the checkpoint
    assert list(load_run(tmp_path / "run").encoder.model.visual.preprocess_cfg["mean"]) == [0.0] * 3


def test_a_model_folder_is_pretrained(shards, tmp_path, caplog):
    """A model folder contains weights. The run starts from their temperature, and rejects an additional --pretrained."""
    name = model_folder(tmp_path / "plain", VISION)
    argv = command(shards, tmp_path, "run", "neuclip", *of_model(name), "--force-image-size", "64", "--lr", "1e-5")
    assert run(argv) == 0
    assert metrics_of(tmp_path / "run")[0]["temperature_median"] == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(UsageError, match=r"--pretrained /no/such: --model local-dir:.* has its own weights"):
        run([*argv, "--pretrained", "/no/such"])
    assert run(evaluation(tmp_path, "measured", "--model", name, "--val-data", shards)) == 0
    assert "untrained" not in caplog.text + (tmp_path / "measured" / "out.log").read_text()


def test_a_model_folder_without_weights_rejects_pretrained(shards, tmp_path):
    """OpenCLIP ignores --pretrained for folders, so the run would start from random weights."""
    name = model_folder(tmp_path / "plain", VISION)
    weights = (tmp_path / "plain" / "open_clip_pytorch_model.bin").rename(tmp_path / "epoch_1.pt")
    argv = command(shards, tmp_path, "run", "openclip", *of_model(name), "--pretrained", str(weights))
    with pytest.raises(
        UsageError, match=r"only from its folder, which has none. Copy the file .*open_clip_pytorch_model.bin"
    ):
        run(argv)


def test_a_model_folder_may_have_weights_of_the_sigmoid_loss(shards, tmp_path, caplog):
    """OpenCLIP's script adds the bias by a flag, so the configuration of its checkpoint lacks it."""
    caplog.set_level("INFO")
    name = model_folder(tmp_path / "folder", VISION, bias=-9.0)
    file = tmp_path / "folder" / "open_clip_config.json"
    content = json.loads(file.read_text())
    del content["model_cfg"]["init_logit_bias"]
    file.write_text(json.dumps(content))
    assert run(command(shards, tmp_path, "run", "openclip", *of_model(name), "--force-image-size", "64")) == 0
    assert "open_clip_pytorch_model.bin is left out. Only --loss siglip uses it" in caplog.text
    assert run(command(shards, tmp_path, "sigmoid", "siglip", *of_model(name), "--force-image-size", "64")) == 0
    state = torch.load(tmp_path / "sigmoid" / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]
    assert float(state["logit_bias"]) == pytest.approx(-9, abs=0.1)


@pytest.mark.parametrize("weight", ["contrastive", "caption"])
def test_a_captioner_trains_in_two_processes_without_one_of_its_losses(shards, configs, tmp_path, weight):
    """DDP fails at the second step if a trainable parameter gets no gradient."""
    flags = [f"--coca-{weight}-loss-weight", "0", "--batch-size", "8"]
    argv = [*command(shards, tmp_path, "run", "openclip", *of_model("tiny-storyteller")), *flags]
    two_ranks().run(run_with_configs, str(configs), argv, group=False)
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 5 and all(math.isfinite(line["loss"]) for line in lines)
    assert (lines[0]["infonce"] is None) == (weight == "contrastive")


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_captioners_tower_is_locked(configs, tower):
    flags = ["--lock-image"] if tower == "image" else ["--lock-text", "--lock-text-freeze-layer-norm"]
    model = build_model(plan_of(*of_model("tiny-storyteller"), *flags).model, torch.device("cpu"), 0).model
    frozen = {name.split(".")[0] for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {"visual" if tower == "image" else "text"}


def test_no_parameter_is_memory_as_it_was(configs, monkeypatch):
    """OpenCLIP 3.3 leaves the output projection of CoCa's decoder uninitialized; openclip_ext must initialize it."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(1000))
    options = {"pretrained": None, "precision": "fp32", "siglip_start": False}
    model, _, _ = compat.create_model("tiny-storyteller", torch.device("cpu"), **options)
    assert all(parameter.abs().max() < 100 for parameter in model.parameters())
    assert float(model.text_decoder.text_projection.detach().std()) == pytest.approx(32**-0.5, rel=0.01)


# Triples of a loss, a model, and flags that change the model or its image transform.
PRINTED = [
    ("neuclip", "demo-resnet", ""),
    ("fastclip", "plain", "--force-image-size 64 --force-quick-gelu --force-context-length 8"),
    ("openclip", "timm", "--force-image-size 64 --force-patch-dropout 0.5"),
    (
        "siglip",
        "demo-vit",
        "--force-image-size 48 --force-quick-gelu --force-context-length 24 --force-custom-text "
        "--image-mean 0.5 0.5 0.5 --image-resize-mode squash",
    ),
]


def test_the_printed_lines_load_the_model_in_stock_openclip(shards, tmp_path, capsys):
    """The printed lines run in a process that never imports this package."""
    program = ["import sys, torch, open_clip"]
    folders = {"plain": model_folder(tmp_path / "plain", VISION), "timm": model_folder(tmp_path / "timm", TIMM)}
    for loss, name, flags in PRINTED:
        model = folders.get(name, name)
        assert run(command(shards, tmp_path, loss, loss, *of_model(model), *ONE_STEP, *flags.split())) == 0
        line = capsys.readouterr().out.split("To load the model in stock OpenCLIP:\n")[1].strip()
        assert "stock OpenCLIP" not in (tmp_path / loss / "out.log").read_text()
        assert [path.name for path in (tmp_path / loss / MODEL_CONFIG).iterdir()] == [f"{name}.json"]
        program += [
            line,
            f"saved = torch.load({str(tmp_path / loss / 'checkpoints' / 'epoch_1.pt')!r}, weights_only=True)['state_dict']",
            "state = model.state_dict()",
            "assert saved.keys() == state.keys()",
            "assert all(torch.equal(saved[name], state[name]) for name in saved)",
            "images = model.visual.preprocess_cfg",
            f"assert (images['resize_mode'] == 'squash' and images['mean'][0] == 0.5) is {name != 'demo-resnet'}",
            "assert 'openclip_ext' not in sys.modules",
        ]
    started = [sys.executable, "-c", "\n".join(program)]
    result = subprocess.run(started, capture_output=True, text=True, cwd=Path.home())
    assert result.returncode == 0, result.stderr


class _Head(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = {}


class _LossWithHead(ContrastiveLoss):
    """A loss with parameters. ``make_head`` creates the result of ``model_head()``."""

    make_head = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.make_head() or torch.nn.Linear(2, 2)

    def model_head(self) -> torch.nn.Module | None:
        return self.layer if isinstance(self.layer, _Head) else None


@pytest.mark.parametrize(
    ("attributes", "declared", "message"),
    [
        ({}, True, "_Head, the class of model_head(), has no attribute kind, evaluated. Add it"),
        (
            {"kind": "own", "evaluated": False},
            False,
            "expected _Head, the class of model_head(), as head= of the METHOD",
        ),
        ({"kind": "own", "evaluated": False}, True, None),
    ],
)
def test_heads_that_checkpoints_cannot_store_are_refused(attributes, declared, message, monkeypatch):
    """Without this check, the first save would fail, or no command could load the run's checkpoints."""
    for name, value in attributes.items():
        monkeypatch.setattr(_Head, name, value, raising=False)
    monkeypatch.setattr(_LossWithHead, "make_head", _Head)
    own = type("Own", (Method,), {"module": _LossWithHead, "head": _Head if declared else None})
    monkeypatch.setitem(registry.METHODS, "own", own("own"))
    expected = nullcontext() if message is None else pytest.raises(UsageError, match=re.escape(message))
    with expected:
        build_loss(LossConfig("own"), "demo-vit", open_clip.create_model("demo-vit"), 8, torch.device("cpu"))


def test_parameters_of_a_loss_that_nothing_trains_are_named(recwarn):
    model = open_clip.create_model("demo-vit")
    loss = _LossWithHead()
    with pytest.warns(UserWarning, match="_LossWithHead: no optimizer updates layer.weight, layer.bias"):
        prepare_for(loss, model)
    recwarn.clear()
    prepare_for(loss.requires_grad_(False), model)
    for name in registry.list_losses():
        if name != "siglip":  # this model has no bias
            prepare_for(registry.create_loss(name, embed_dim=64, num_samples=8), model)
    assert not [warning for warning in recwarn if "no optimizer updates" in str(warning.message)]
