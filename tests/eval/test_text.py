"""Texts without their padding have the embeddings of texts with it."""

import logging

import open_clip
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from eval.text import TextEncoder
from tests.eval.datasets import tiny_model_config

TEXTS = ["a photo of a cat", "owl", "a photo of the very large and rather unusual number seven on a wall"]


def encode(model: nn.Module, tokenizer, seen: list[int], monkeypatch) -> torch.Tensor:
    """The texts twice through the encoder (the first time is the check); ``seen``: lengths that reached the model."""
    encoder = TextEncoder(model)
    original = model.encode_text
    monkeypatch.setattr(model, "encode_text", lambda tokens: seen.append(tokens.shape[1]) or original(tokens))
    with torch.no_grad():
        encoder(tokenizer(TEXTS[:1]))
        seen.clear()
        return torch.cat([encoder(tokenizer([text])) for text in TEXTS])


@pytest.mark.parametrize("custom_text", [False, True])
def test_embeddings_are_those_of_the_padded_texts(custom_text, tmp_path, monkeypatch):
    open_clip.add_model_config(tiny_model_config(tmp_path, "tiny-text"))
    torch.manual_seed(0)
    model = open_clip.create_model("tiny-text", force_custom_text=custom_text).eval()
    tokenizer = open_clip.get_tokenizer("tiny-text")
    with torch.no_grad():
        expected = model.encode_text(tokenizer(TEXTS))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lengths: list[int] = []
    found = encode(model, tokenizer, lengths, monkeypatch)
    assert lengths == [8, 8, 16]
    torch.testing.assert_close(normalize(found), normalize(expected), atol=1e-6, rtol=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tower_that_sees_its_padding_is_not_cut(tmp_path, monkeypatch):
    path = tiny_model_config(tmp_path, "tiny-bidirectional")
    path.write_text(path.read_text().replace('"text_cfg": {', '"text_cfg": {"no_causal_mask": true, '))
    open_clip.add_model_config(path)
    torch.manual_seed(0)
    model = open_clip.create_model("tiny-bidirectional", force_custom_text=True).eval()
    tokenizer = open_clip.get_tokenizer("tiny-bidirectional")
    with torch.no_grad():
        expected = model.encode_text(tokenizer(TEXTS))
    lengths: list[int] = []
    found = encode(model, tokenizer, lengths, monkeypatch)
    assert set(lengths) == {24}
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_tower_that_only_looks_causal_is_found_out(tmp_path, monkeypatch, caplog):
    """A tower whose answer depends on the padding is noticed at the first batch, and encoded whole from then on."""
    open_clip.add_model_config(tiny_model_config(tmp_path, "tiny-odd"))
    torch.manual_seed(0)
    model = open_clip.create_model("tiny-odd").eval()
    original = model.encode_text
    monkeypatch.setattr(model, "encode_text", lambda tokens: original(tokens) * torch.linspace(-1, tokens.shape[1], 16))
    tokenizer = open_clip.get_tokenizer("tiny-odd")
    lengths: list[int] = []
    with caplog.at_level(logging.WARNING):
        found = encode(model, tokenizer, lengths, monkeypatch)
    assert set(lengths) == {24}
    assert "other embeddings without padding" in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(found, model.encode_text(tokenizer(TEXTS)), atol=1e-5, rtol=1e-5)
