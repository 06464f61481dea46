"""``openclip-ext embed --model transformers:FOLDER`` writes the embeddings of Hugging Face's own model and processor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.data.sources.source import decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation import datacomp, embed
from openclip_ext.evaluation.models import open_model
from openclip_ext.evaluation.results import read_log
from tests.data.shards import write_shards

transformers = pytest.importorskip("transformers")

_LENGTH, _SIZE, _END = 12, 32, 2
_TOWERS = {
    "text_config": {
        "vocab_size": 400, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": _LENGTH, "eos_token_id": _END, "pad_token_id": 0, "bos_token_id": 1,
    },
    "vision_config": {
        "image_size": _SIZE, "patch_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}  # fmt: skip


def tokenizer(names: list[str]) -> Any:
    """Return a tokenizer of single bytes, whose texts end with the end-of-text token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<start>", "<end>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", _END)])
    kept = {"pad_token": "<pad>", "eos_token": "<end>", "model_max_length": _LENGTH, "model_input_names": names}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **kept)


@pytest.fixture(params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with a model. SigLIP's tokenizer returns no mask, so padding is a part of its texts."""
    torch.manual_seed(0)
    if request.param == "clip":
        config = transformers.CLIPConfig(**_TOWERS, projection_dim=8)
        model, names = transformers.CLIPModel(config), ["input_ids", "attention_mask"]
        processor = transformers.CLIPImageProcessor(
            size={"shortest_edge": _SIZE}, crop_size={"height": _SIZE, "width": _SIZE}
        )
    else:
        model, names = transformers.SiglipModel(transformers.SiglipConfig(**_TOWERS)), ["input_ids"]
        processor = transformers.SiglipImageProcessor(size={"height": _SIZE, "width": _SIZE})
    for part in (model, processor, tokenizer(names)):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def own_embeddings(folder: Path, image: Image.Image, caption: str) -> torch.Tensor:
    """Return the two unit embeddings ``(2, d)`` by ``transformers`` alone."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    text = words([caption], padding="max_length", max_length=_LENGTH, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**text, pixel_values=processor(images=image, return_tensors="pt")["pixel_values"])
    both = torch.cat([found.image_embeds, found.text_embeds])
    return torch.nn.functional.normalize(both, dim=1)


def test_rows_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    write_shards(data := tmp_path / "data", [3, 2])
    flags = ["--device", "cpu", "--precision", "fp32", "--batch-size", "2", "--workers", "0"]
    embed.main([f"{data}/*.tar", "--model", f"transformers:{folder}", "--output", str(tmp_path / "out"), *flags])
    source = build_source(DataSpec(f"{data}/*.tar"))
    store, read = EmbeddingStore.open(tmp_path / "out", source.num_samples, source.index_digest), source.read_one
    for index in range(source.num_samples):
        image, caption = source.decode(read(index), decode_image)
        rows = torch.cat(store.rows(torch.tensor([index]))).float()
        torch.testing.assert_close(rows, own_embeddings(folder, image, caption), atol=1e-3, rtol=0)
    scale = transformers.AutoModel.from_pretrained(folder).logit_scale.exp().item()
    assert json.loads((tmp_path / "out/embeddings.json").read_text())["logit_scale"] == pytest.approx(scale)


def test_evaluate_takes_the_folder(folder: Path, tmp_path: Path) -> None:
    names = ["zero", "one"]
    for number in range(6):
        path = tmp_path / "photos" / names[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (_SIZE, _SIZE), (40 * number, 90, 255 - 40 * number)).save(path)
    arguments = ["--tasks", str(tmp_path / "photos"), "--device", "cpu", "--workers", "0", "--template", "{}"]
    assert datacomp.main([str(folder), *arguments, "--output-dir", str(tmp_path / "out")]) == 0
    right = []
    for label, name in enumerate(sorted(names)):
        for path in (tmp_path / "photos" / name).iterdir():
            rows = [own_embeddings(folder, Image.open(path), text) for text in sorted(names)]
            right.append(max(range(2), key=lambda number: float(rows[number][0] @ rows[number][1])) == label)
    (line,) = read_log(tmp_path / "out")
    assert line["metrics"]["acc1"] == sum(right) / 6


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="includes its weights"):
        open_model("openai", f"transformers:{folder}")
    with pytest.raises(UsageError, match="cannot be loaded"):
        open_model(f"transformers:{tmp_path}/none")
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_TOWERS["vision_config"])).save_pretrained(folder)
    with pytest.raises(UsageError, match="CLIPVisionModel without get_image_features"):
        open_model(f"transformers:{folder}")
