"""Exported models give the checkpoint's embeddings in OpenCLIP and transformers. The model card describes the run."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import VisionTransformer, build_model_with_cfg, register_model

from openclip_ext.checkpoint import format as ckpt
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.command_line import load_encoder
from openclip_ext.evaluation.datacomp import parse_args
from openclip_ext.evaluation.models import open_model
from openclip_ext.evaluation.tasks import TASKS
from openclip_ext.export import __main__ as program
from openclip_ext.export.__main__ import export, main
from openclip_ext.export.clip_model import TOLERANCE
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.checkpoint.finding import find_start
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.model import write_model_config
from openclip_ext.training.runtime.run_folder import Settings, write_settings
from tests.training.commands import plan_of

CAPTIONS = ["a red circle left of a blue square", "The  Cat's toys, 2 of them!", "naïve café"]


@pytest.fixture(autouse=True)
def known_models(monkeypatch):
    """After a test, restore OpenCLIP's list of models, because tests register other models under the demo names."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))


def make_run(folder: Path, model: str, *flags: str) -> Path:
    """Write a run folder for a model with random weights; return the path of its checkpoint."""
    add_model_configs()
    config = plan_of("--model", model, "--logs", str(folder), "--name", "run", *flags)
    torch.manual_seed(0)
    # Checkpoints of --model-ema-decay have float32 weights, whatever the precision of the training.
    built, *_ = replace(config.model, precision="fp32").create(torch.device("cpu"))
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    write_settings(run, Settings([], config.stored_flags, config.loss.name, config.loss.options, steps=10))
    write_model_config(config.model, run)
    checkpoint = run / "checkpoints" / "epoch_2.pt"
    torch.save({"epoch": 2, "name": "run", "state_dict": built.state_dict()}, checkpoint)
    return checkpoint


def embeddings(model, images, texts):
    model.eval()
    with torch.no_grad():
        return torch.cat([model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)])


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))


def timm_tower(name: str) -> dict:
    return {"timm_model_name": name, "timm_model_pretrained": False, "timm_pool": "avg", "timm_proj": "linear"}


@pytest.mark.parametrize(
    ("vision", "flags"),
    [
        (
            {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
            "--force-image-size 64 --force-quick-gelu --force-context-length 8 --force-custom-text",
        ),
        (timm_tower("test_resnet"), "--force-image-size 64"),
        (timm_tower("test_vit"), "--force-patch-dropout 0.5"),
        (timm_tower("test_vit"), "--force-image-size 64"),
    ],
    ids=["flags", "timm", "timm's patch dropout", "timm's positions"],
)
def test_a_run_of_a_model_folder_is_exported_with_its_flags(vision, flags, tmp_path):
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {"model_cfg": {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "open_clip_config.json").write_text(json.dumps(config))
    checkpoint = make_run(tmp_path, f"local-dir:{tmp_path / 'hub'}", *flags.split())
    if vision == timm_tower("test_vit") and "size" in flags:
        with pytest.raises(UsageError, match="stock OpenCLIP cannot load a timm tower with another image size"):
            export(checkpoint, "safetensors", tmp_path / "exported")
        return
    export(checkpoint, "safetensors", tmp_path / "exported")
    source = f"local-dir:{tmp_path / 'exported'}"
    model, _, preprocess = open_clip.create_model_and_transforms(source)
    original, *_ = plan_of("--model", f"local-dir:{tmp_path / 'hub'}", *flags.split()).model.create(torch.device("cpu"))
    original.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    images, texts = preprocess(picture())[None], open_clip.get_tokenizer(source)(CAPTIONS)
    assert torch.equal(embeddings(model, images, texts), embeddings(original, images, texts))
    assert images.shape[-1] == 64 or "size" not in flags
    assert str(tmp_path) not in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.parametrize(("flags", "weight"), [("", 0.0), ("", 0.3), ("--precision pure_bf16", 1.0)])
def test_weights_are_interpolated_with_the_initial_weights(flags, weight, tmp_path):
    add_model_configs()
    torch.manual_seed(1)
    start = open_clip.create_model("demo-resnet").state_dict()
    torch.save(start, tmp_path / "start.pt")
    checkpoint = make_run(tmp_path, "demo-resnet", *flags.split(), "--pretrained", str(tmp_path / "start.pt"))
    trained = torch.load(checkpoint, weights_only=True)
    for value in trained["state_dict"].values():
        value += torch.ones_like(value)
    torch.save(trained, checkpoint)
    main([str(checkpoint), "--interpolate", str(weight), "--output", str(tmp_path / "exported")])
    exported = load_file(tmp_path / "exported" / "open_clip_model.safetensors")
    for name, value in trained["state_dict"].items():
        expected = (1 - weight) * start[name] + weight * value if value.is_floating_point() else value
        torch.testing.assert_close(exported[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def test_a_run_from_random_weights_has_nothing_to_interpolate_with(tmp_path):
    with pytest.raises(UsageError, match="--interpolate"):
        export(make_run(tmp_path, "demo-vit"), "safetensors", tmp_path / "exported", 0.5)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("demo-vit", "--image-mean 0.4 0.5 0.6 --image-interpolation bilinear --force-image-size 40"),
        ("demo-vit", "--force-custom-text --force-quick-gelu"),
        ("demo-vit", "--precision pure_bf16 --model-ema-decay 0.9"),
        ("ViT-S-32-alt", "--loss fastclip"),
    ],
    ids=["demo", "custom text", "average", "stock"],
)
def test_embeddings_are_the_checkpoints(name, flags, tmp_path):
    changed = {"image_mean": (0.4, 0.5, 0.6), "image_interpolation": "bilinear"}
    preprocessing = changed if "--image-mean" in flags else {}
    checkpoint = make_run(tmp_path, name, *flags.split())
    open_clip.add_model_config(checkpoint.parents[1] / "model_config")
    original, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=str(checkpoint), **preprocessing)
    images = preprocess(picture())[None]
    texts = open_clip.get_tokenizer(name)(CAPTIONS)
    expected = embeddings(original, images, texts)
    for to in ("safetensors", "hf"):
        export(checkpoint, to, tmp_path / to)
        assert len({file.stat().st_mode for file in (tmp_path / to).iterdir()}) == 1
        source = f"local-dir:{tmp_path / to}"
        model, _, preprocess = open_clip.create_model_and_transforms(source)
        found = embeddings(model, preprocess(picture())[None], open_clip.get_tokenizer(source)(CAPTIONS))
        assert torch.equal(found, expected)

    transformers = pytest.importorskip("transformers")
    clip = transformers.CLIPModel.from_pretrained(tmp_path / "hf").eval()
    processor = transformers.CLIPProcessor.from_pretrained(tmp_path / "hf")
    inputs = processor(text=CAPTIONS, images=picture(), return_tensors="pt", padding=True)
    for tokens, mask, own in zip(inputs["input_ids"], inputs["attention_mask"], texts, strict=True):
        assert tokens[mask.bool()].tolist() == own[own > 0].tolist()
    with torch.no_grad():
        theirs = clip(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], pixel_values=images)
    assert (torch.cat([theirs.image_embeds, theirs.text_embeds]) - expected).abs().max() < TOLERANCE
    image_tower = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "hf").eval()
    text_tower = transformers.CLIPTextModelWithProjection.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        image, text = (
            image_tower(images).image_embeds,
            text_tower(inputs["input_ids"], inputs["attention_mask"]).text_embeds,
        )
    towers = torch.nn.functional.normalize(torch.cat([image, text]), dim=-1)
    assert (towers - expected).abs().max() < TOLERANCE
    # The processor of transformers resizes with another library, which rounds differently.
    assert (inputs["pixel_values"] - images).abs().max() < 0.05


@register_model
def tiny_siglip_vit(pretrained=False, **options):
    """A tower of SigLIP's architecture for timm."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    options = sizes | {"class_token": False, "mlp_ratio": 2.0} | options
    return build_model_with_cfg(VisionTransformer, "tiny_siglip_vit", pretrained, **options)


@register_model
def tiny_registers_vit(pretrained=False, **options):
    return tiny_siglip_vit(reg_tokens=1, **options)


def siglip_config(folder: Path, clean: str = "canonicalize", vision: str = "tiny_siglip_vit", **text) -> dict:
    """Return a small SigLIP architecture; write its tokenizer into ``folder``, with padding token 1 and final token 2."""
    transformers = pytest.importorskip("transformers")
    words = ["a", "red", "circle", "left", "of", "blue", "square", "the", "cats", "toys", "2", "them", "Cat's"]
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "[EOS]", *words])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]"
    ).save_pretrained(folder)
    tokenizer = {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"clean": clean}}
    sizes = {"context_length": 16, "vocab_size": 32, "width": 32, "heads": 2, "layers": 2, "proj_bias": True}
    siglip = {"no_causal_mask": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    tower = {"timm_model_name": vision, "timm_model_pretrained": False, "timm_pool": "map", "timm_proj": "none"}
    return {
        "embed_dim": 32,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {"image_size": 32, **tower},
        "text_cfg": {**tokenizer, **sizes, **siglip, **text},
    }


def add_siglip(folder: Path, **options) -> str:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tiny-siglip.json").write_text(json.dumps(siglip_config(folder / "tokenizer", **options)))
    open_clip.add_model_config(folder / "tiny-siglip.json")
    return "tiny-siglip"


@pytest.mark.parametrize("activation", [{}, {"act_kwargs": {"approximate": "tanh"}}], ids=["SigLIP", "SigLIP 2"])
def test_a_siglip_model_has_the_same_embeddings_in_transformers(activation, tmp_path):
    name = add_siglip(tmp_path, **activation)
    checkpoint = make_run(tmp_path, name, "--image-resize-mode", "squash", "--loss", "siglip")
    export(checkpoint, "hf", tmp_path / "hf")
    source = f"local-dir:{tmp_path / 'hf'}"
    model, _, preprocess = open_clip.create_model_and_transforms(source)
    images, texts = preprocess(picture())[None], open_clip.get_tokenizer(source)(CAPTIONS)
    expected = embeddings(model, images, texts)
    assert torch.equal(texts, open_clip.get_tokenizer(name)(CAPTIONS))

    transformers = pytest.importorskip("transformers")
    siglip = transformers.SiglipModel.from_pretrained(tmp_path / "hf").eval()
    processor = transformers.SiglipProcessor.from_pretrained(tmp_path / "hf")
    inputs = processor(text=CAPTIONS, images=picture(), padding="max_length", return_tensors="pt")
    assert torch.equal(inputs["input_ids"], texts)
    assert (inputs["pixel_values"] - images).abs().max() < 0.05
    with torch.no_grad():
        theirs = siglip(**inputs | {"pixel_values": images})
        logits = model.logit_scale.exp() * expected[:1] @ expected[1:].T + model.logit_bias
    assert (torch.cat([theirs.image_embeds, theirs.text_embeds]) - expected).abs().max() < TOLERANCE
    torch.testing.assert_close(theirs.logits_per_image, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        ({"vision": "tiny_registers_vit"}, "--image-resize-mode squash", "reg_token"),
        ({"no_causal_mask": False}, "--image-resize-mode squash", "embeddings would differ"),
        ({"clean": "lower"}, "--image-resize-mode squash", "tokenizer cleans"),
        ({}, "--image-resize-mode longest", "resizes images by longest"),
    ],
)
def test_a_siglip_model_without_a_counterpart_is_refused(options, flags, message, tmp_path):
    checkpoint = make_run(tmp_path, add_siglip(tmp_path, **options), *flags.split())
    with pytest.raises(UsageError, match=rf"SiglipModel.*{message}"):
        export(checkpoint, "hf", tmp_path / "hf")


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_card_tells_of_the_checkpoint_and_not_of_the_rest_of_its_run(tmp_path, monkeypatch):
    """best.pt stores only its epoch. A mid-epoch checkpoint was never evaluated, so its card must not show results."""
    checkpoint = make_run(tmp_path, "demo-vit", "--loss", "neuclip", "--prototypes", "96")
    checkpoint = checkpoint.rename(checkpoint.with_name("best.pt"))
    run = checkpoint.parents[1]
    steps = [
        {"step": step, "samples": 16 * (step + 1), "epoch": step // 2, "loss": 1.0, "infonce": 9.0 - step}
        for step in range(6)
    ]
    write_lines(run / "metrics.jsonl", steps)
    recalls = [{"epoch": 1, "image_to_text_R@1": 0.1}, {"epoch": 2, "image_to_text_R@1": 0.25}]
    recalls[1] |= {"image_to_text_median_rank": 3, "num_samples": 84}
    write_lines(run / "checkpoints" / "results.jsonl", recalls)
    weights = open_model(checkpoint, "demo-vit").weights_sha256
    lines = [
        {"key": key, "dataset": TASKS[key].name, "metrics": {"main_metric": 0.5}, "run": identity, "found": found}
        for key, identity, found in (
            ("cifar10", {"weights": weights}, 10000),
            ("mnist", {"weights": weights}, 120),
            ("stl10", {"weights": "earlier"}, 8000),
            ("gtsrb", {"weights": weights, "options": "image_mean=[0, 0, 0]"}, 12630),
        )
    ]
    write_lines(run / "datacomp" / "epoch_2" / "eval_results.jsonl", lines)
    config = json.loads((run / "config.json").read_text())
    config["resolved"]["flags"]["pretrained"] = str(checkpoint)
    (run / "config.json").write_text(json.dumps(config))
    read = ckpt.read

    def card(position: ckpt.Position | None) -> str:
        shared = (
            {"identity": {"global_batch": 8, "num_samples": 84}, "position": asdict(position)} if position else None
        )
        monkeypatch.setattr("openclip_ext.export.__main__.read", lambda path, **_: replace(read(path), shared=shared))
        output = tmp_path / f"exported-{position and position.step}"
        export(checkpoint, "safetensors", output)
        assert (output / "curves.png").exists()
        return (output / "README.md").read_text()

    rows = [
        "pretrained | best.pt",
        "architecture | demo-vit",
        "loss | neuclip",
        "loss: prototypes | 96",
        "CIFAR-10 | 0.5",
    ]
    rows += ["MNIST (not DataComp's size) | 0.5", "infonce | 6", "completed epochs | 2", "image_to_text_R@1 | 0.25"]
    rows += ["image_to_text_median_rank | 3"]
    for at_end in (card(None), card(ckpt.Position(epoch=2, step=4))):
        assert [row for row in rows if f"| {row} |" not in at_end] == [] and "At optimizer step 4:" in at_end
        assert str(tmp_path) not in at_end and "STL-10" not in at_end and "GTSRB" not in at_end
    within = card(ckpt.Position(epoch=2, step=5, step_in_epoch=1))
    assert "At optimizer step 5:" in within and "R@1" not in within
    assert "| samples in the data set | 84 |" in within and "| global batch | 8 |" in within


def test_weights_need_no_state_folder(tmp_path, capsys):
    """Users delete ``epoch_K.state/`` of a finished run to save space. Only a resume needs it."""
    checkpoint = make_run(tmp_path, "demo-vit")
    torch.save(torch.load(checkpoint, weights_only=True) | {"step": 10}, checkpoint)
    run = checkpoint.parents[1]
    for number, given in enumerate((checkpoint, run)):
        main([str(given), "--output", str(tmp_path / f"{number}")])
    args = parse_args([str(run), "--data-dir", "d", "--workers", "1", "--device", "cpu"])
    assert load_encoder(args, show_progress=False)[0].checkpoint == str(checkpoint)
    with pytest.raises(UsageError, match=r"the state of .* is incomplete"):
        find_start(str(checkpoint), RunFolderConfig(tmp_path, "run"))


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path, capsys):
    checkpoint = make_run(tmp_path, "demo-vit")
    main([str(checkpoint.parents[1]), "--output", str(tmp_path / "exported")])
    told = capsys.readouterr().out
    assert f"hf upload YOU/NAME {tmp_path / 'exported'}" in told
    args = parse_args([str(checkpoint.parents[1]), "--data-dir", "d", "--workers", "1", "--device", "cpu"])
    loaded, _ = load_encoder(args, show_progress=False)
    assert (loaded.name, loaded.checkpoint) == ("demo-vit", str(checkpoint))
    with pytest.raises(ValueError, match="remove --model and --checkpoint"):
        load_encoder(parse_args([str(checkpoint.parents[1]), "--model", "RN50", "--data-dir", "d"]))
    with pytest.raises(ValueError, match="no model given: expected a run folder"):
        load_encoder(parse_args(["--data-dir", "d"]))


def test_models_without_a_counterpart_are_refused(tmp_path):
    """The second model has the right weight names, but pools image features differently from transformers."""
    add_model_configs()
    for name, tower, change in (
        ("demo-avg", "vision_cfg", {"pool_type": "avg"}),
        ("demo-cased", "text_cfg", {"tokenizer_kwargs": {"clean": "whitespace"}}),
        ("demo-plain", "text_cfg", {"tokenizer_kwargs": {"clean": "canonicalize"}}),
        ("demo-cut", "text_cfg", {"tokenizer_kwargs": {"reduction_mask": "simple"}}),
    ):
        content = open_clip.get_model_config("demo-vit")
        content[tower] |= change
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        open_clip.add_model_config(tmp_path / f"{name}.json")
    for name, message in (
        ("demo-cased", "tokenizer_kwargs"),
        ("demo-plain", "tokenizer_kwargs"),
        ("demo-cut", "tokenizer_kwargs"),
        ("demo-resnet", r"does not support this model .*visual\.bn1.*--to safetensors"),
        ("demo-avg", r"its embeddings would differ by 0\."),
    ):
        with pytest.raises(UsageError, match=message):
            export(make_run(tmp_path / name, name), "hf", tmp_path / "exported")


def test_wrong_places_are_refused(tmp_path):
    torch.save({}, tmp_path / "alone.pt")
    for checkpoint, output, message in (
        ("epoch_9.pt", "exported", "epoch_9.pt not found: expected a file, or a run folder"),
        ("alone.pt", "exported", "alone.pt is not in a run folder"),
        ("alone.pt", ".", "is not empty"),
    ):
        with pytest.raises(UsageError, match=message):
            export(tmp_path / checkpoint, "hf", tmp_path / output)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "export", lambda *_: save_file({"a": torch.zeros(1)}, tmp_path / "none" / "x"))
    with pytest.raises(OSError, match=r"exported could not be written: .*No such file"):
        main(["epoch_1.pt", "--output", str(tmp_path / "exported")])


@pytest.mark.parametrize("last", ["merges.txt", "README.md"])
def test_a_folder_without_a_complete_text_file_has_no_weights(last, tmp_path, monkeypatch):
    """On a full disk, or if the process is killed. ``CLIPTokenizer`` would accept incomplete merges."""
    replace = os.replace

    def fail_last(source, target):
        if target.name == last:
            raise OSError("No space left on device")
        replace(source, target)

    checkpoint = make_run(tmp_path, "demo-vit")
    monkeypatch.setattr(os, "replace", fail_last)
    with pytest.raises(OSError, match="No space left"):
        export(checkpoint, "hf", tmp_path / "exported")
    name = "model.safetensors" if last == "merges.txt" else "open_clip_model.safetensors"
    written = {path.name for path in (tmp_path / "exported").iterdir()}
    assert "vocab.json" in written and not {last, name} & written
