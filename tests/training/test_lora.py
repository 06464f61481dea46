"""LoRA: trained parameters, checkpoints for stock OpenCLIP, folders for peft, bitwise resumes, and two ranks."""

import json
import re

import open_clip
import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training import lora
from openclip_ext.training.config import LoraConfig
from openclip_ext.training.model import build_model
from tests.training import runs
from tests.training.commands import plan_of
from tests.training.runs import EXIT_AFTER_SIGTERM, SMALL_MODEL, run, small_command, stock_model

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'openclip_ext[lora]'")

VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 20, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2}
TIMM = {"timm_model_pretrained": False, "timm_pool": "token", "timm_proj": "linear", "image_size": 224}
VIT, EVA = ({**TIMM, "timm_model_name": name} for name in ("vit_tiny_patch16_224", "eva02_tiny_patch14_224"))
BERT = {"hf_model_name": "BERT", "hf_tokenizer_name": "BERT", "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"}
OPENCLIPS = "attn mlp.c_fc mlp.c_proj"
BERTS = "query key value attention.output.dense intermediate.dense output.dense"
# Configurations of the image and text towers, then the layers that get adapters in the image tower and in the text tower.
TOWERS = {
    "openclip": (VISION, TEXT, OPENCLIPS, OPENCLIPS),
    "timm": (VIT, TEXT, "attn.qkv attn.proj mlp.fc1 mlp.fc2", OPENCLIPS),
    "eva": (EVA, TEXT, "attn.proj mlp.fc1 mlp.fc2", OPENCLIPS),
    "huggingface": (VISION, BERT, OPENCLIPS, BERTS),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the flags of a LoRA run on a pretrained model, and the path of the model's weights."""
    path = tmp_path_factory.mktemp("base") / "base.pt"
    torch.manual_seed(1)
    torch.save({"state_dict": open_clip.create_model(SMALL_MODEL).state_dict()}, path)
    return ("--lora-rank", "4", "--lr", "1e-2", "--pretrained", str(path), "--no-before-after"), path


@pytest.fixture(scope="module")
def whole(base, shards, tmp_path_factory):
    return runs.train(shards, tmp_path_factory.mktemp("whole"), "run", "fastclip", *base[0], "--val-data", shards)


@pytest.mark.parametrize(
    ("towers", "grad_checkpointing"),
    [("openclip", False), ("openclip", True), ("timm", True), ("eva", True), ("huggingface", True)],
)
def test_the_adapters_of_each_kind_of_tower(towers, grad_checkpointing, tmp_path):
    vision, text, of_image, of_text = TOWERS[towers]
    if text is BERT:
        bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        pytest.importorskip("transformers").BertConfig(vocab_size=100, **bert).save_pretrained(tmp_path / "bert")
        text = {name: value.replace("BERT", str(tmp_path / "bert")) for name, value in text.items()}
    config = {"embed_dim": 32, "custom_text": True, "vision_cfg": vision, "text_cfg": text}
    (tmp_path / f"tiny-{towers}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    torch.manual_seed(0)
    model, plain = (open_clip.create_model(f"tiny-{towers}", pretrained_text=False, output_dict=True) for _ in range(2))
    lora.add_adapters(model, LoraConfig(rank=4), None)
    model.set_grad_checkpointing(grad_checkpointing)
    images, texts = torch.rand(2, 3, vision["image_size"], vision["image_size"]), torch.randint(1, 99, (2, 20))
    outputs = model.train()(images, texts)
    (outputs["logit_scale"] * (outputs["image_features"] @ outputs["text_features"].T)).sum().backward()
    trained = [name for name, value in model.named_parameters() if value.grad is not None]
    assert trained == [name for name, value in model.named_parameters() if value.requires_grad]
    found = {re.sub(r"^(visual|text)\..*\.\d+\.(attention\.self\.)?(.*)\.lora_.*", r"\1 \3", name) for name in trained}
    of_towers = {f"visual {layer}" for layer in of_image.split()} | {f"text {layer}" for layer in of_text.split()}
    assert found == of_towers | {"logit_scale"}
    for name in trained:
        torch.nn.init.normal_(model.get_parameter(name).detach(), std=0.1)
    plain.load_state_dict(lora.merged(model.state_dict(), model))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images, texts), plain.eval()(images, texts), atol=1e-5, rtol=0)


def test_only_the_tower_that_is_asked_for():
    add_model_configs()
    for tower, more in (("image", ()), ("text", ("--lock-image",))):
        config = plan_of("--model", "demo-vit", "--lora-rank", "2", "--lora-targets", tower, *more).model
        model = build_model(config, torch.device("cpu"), 0).model
        trained = [name for name, value in model.named_parameters() if value.requires_grad and name != "logit_scale"]
        assert trained and all(name.startswith("visual.") == (tower == "image") for name in trained)
        # The default of --lora-alpha is twice the rank.
        assert {layer.scaling["default"] for layer in model.modules() if hasattr(layer, "scaling")} == {2.0}
        assert model.visual.transformer.get_cast_dtype() == torch.float32 and model.visual.image_size
    in_16_bits = plan_of("--model", "demo-vit", "--lora-rank", "2", "--precision", "pure_bf16").model
    model = build_model(in_16_bits, torch.device("cpu"), 0).model
    assert {value.dtype for name, value in model.named_parameters() if ".lora_" in name} == {torch.float32}
    name = "transformer.resblocks.0.mlp.c_fc"
    torch.nn.init.constant_(model.get_parameter(f"{name}.lora_B.default.weight").detach(), 1e-6)
    merged = lora.merged(model.state_dict(), model)[f"{name}.weight"]
    change = merged.double() - model.get_parameter(f"{name}.base_layer.weight").double()
    expected = 2e-6 * model.get_parameter(f"{name}.lora_A.default.weight").double().sum(dim=0).expand_as(change)
    torch.testing.assert_close(change, expected, atol=3e-8, rtol=0)  # in 16 bits, such a change is rounded to 0
    with pytest.raises(UsageError, match=r"the image tower has no attention or linear layers.*--lora-targets text"):
        build_model(plan_of("--model", "demo-resnet", "--lora-rank", "2").model, torch.device("cpu"), 0)


def test_stock_openclip_and_peft_load_what_a_run_saves(base, shards, whole, tmp_path):
    path = whole / "checkpoints" / "epoch_2.pt"
    model, start = stock_model(path, SMALL_MODEL).eval(), stock_model(base[1], SMALL_MODEL).eval()
    images, texts = torch.rand(4, 3, 32, 32), torch.randint(1, 400, (4, 20))
    with torch.no_grad():
        expected, before = model(images, texts)[:2], start(images, texts)[:2]
        adapted = peft.PeftModel.from_pretrained(start, str(path.with_suffix(".lora"))).eval()
        torch.testing.assert_close(adapted(images, texts)[:2], expected, atol=1e-5, rtol=0)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(before, expected, strict=True))
    adapter = json.loads((path.with_suffix(".lora") / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base[1])
    # The run's own evaluations used the adapters.
    measured = runs.evaluation(
        tmp_path, "measured", "--model", SMALL_MODEL, "--pretrained", str(path), "--val-data", shards
    )
    assert run(measured) == 0
    alone, in_run = runs.results_of(tmp_path / "measured")[-1], runs.results_of(whole)[-1]
    assert alone["clip_val_loss"] == pytest.approx(in_run["clip_val_loss"], abs=1e-4)
    # Training left the base weights bitwise unchanged.
    unmerged = torch.load(path, weights_only=True)[lora.UNMERGED]["state_dict"]
    kept = {name.replace(".base_layer", ""): value for name, value in unmerged.items() if ".lora_" not in name}
    first = torch.load(base[1], weights_only=True)["state_dict"]
    assert [name for name in first if not torch.equal(first[name], kept[name])] == ["logit_scale"]


def test_a_resume_is_exact(base, shards, whole, tmp_path):
    argv = small_command(shards, tmp_path, "run", "fastclip", *base[0], "--val-data", shards, "--resume", "latest")
    assert run(argv, stop_after=3) == EXIT_AFTER_SIGTERM
    with pytest.raises(UsageError, match="was trained with --lora-rank: resume with the same flags"):
        run(small_command(shards, tmp_path, "run", "fastclip", "--resume", "latest"))
    with pytest.raises(UsageError, match=r"lora: checkpoint rank 4, alpha 8, targets both, run rank 8, alpha 16,"):
        run([*argv, "--lora-rank", "8"])
    with pytest.raises(UsageError, match=r"lora: checkpoint rank 4, alpha 8, .* run rank 4, alpha 64,"):
        run([*argv, "--lora-alpha", "64"])
    assert run(argv) == 0
    runs.assert_same_run(tmp_path / "run", whole)
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved >= {"epoch_1.lora", "epoch_2.lora"} and not [name for name in saved if "step" in name]


def test_two_ranks_accumulate_average_and_resume(base, shards, tmp_path):
    more = (*base[0], "--batch-size", "4", "--accum-freq", "2", "--model-ema-decay", "0.9")
    whole = runs.train_on_two_ranks(
        shards, tmp_path, "fastclip", *more, "--val-data", shards, "--keep-best", "clip_val_loss"
    )
    assert runs.final_state(whole)["model"][lora.UNMERGED].keys() == {"state_dict", "trained_state_dict"}
    folder = whole / "checkpoints"
    first = stock_model(base[1], SMALL_MODEL).state_dict()
    for name in ("best", "epoch_2"):
        saved = stock_model(folder / f"{name}.pt", SMALL_MODEL).state_dict()
        adapted = peft.PeftModel.from_pretrained(stock_model(base[1], SMALL_MODEL), str(folder / f"{name}.lora"))
        merged = adapted.merge_and_unload().state_dict()
        changed = [name for name in first if not torch.equal(saved[name], first[name])]
        assert len([name for name in changed if "resblocks" in name]) == 6
        for name in changed:
            if name != "logit_scale":
                torch.testing.assert_close(saved[name], merged[name])


def test_random_weights_that_are_frozen_are_said(shards, tmp_path, caplog):
    runs.train(shards, tmp_path, "run", "openclip", "--lora-rank", "2", "--epochs", "1")
    assert "--lora-rank freezes random weights here: add --pretrained" in caplog.text
