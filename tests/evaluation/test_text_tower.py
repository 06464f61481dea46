"""The text encoder removes padding from texts. Their embeddings must equal those of padded texts."""

import copy
from pathlib import Path

import open_clip
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from openclip_ext.data.text_groups import group_texts
from openclip_ext.evaluation.text_tower import TextEncoder, accept_groups, find_causal_tower, shrink
from openclip_ext.model_configs import add_model_configs
from tests.evaluation.datasets import tiny_model_config

TEXTS = ["a photo of a cat", "owl", "a photo of the very large and rather unusual number seven on a wall"]


def build(folder: Path, name: str, custom_text: bool = False, **text: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Create a tiny model with options ``text`` of its text tower; return the model, tokens, and their padded embeddings."""
    open_clip.add_model_config(tiny_model_config(folder, name, text=text))
    torch.manual_seed(0)
    model = open_clip.create_model(name, force_custom_text=custom_text).eval()
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    return model, tokens, model.encode_text(tokens)


def encode(model: nn.Module, tokens: Tensor, monkeypatch) -> tuple[Tensor, list[int]]:
    """Encode texts one by one; return embeddings and the token lengths in the model."""
    encoder, seen, original = TextEncoder(model), [], model.encode_text
    monkeypatch.setattr(model, "encode_text", lambda tokens: seen.append(tokens.shape[1]) or original(tokens))
    return torch.cat([encoder.encode(text[None]) for text in tokens]), seen


@torch.no_grad()
@pytest.mark.parametrize(
    ("custom_text", "options", "expected_lengths"),
    [
        (False, {}, [8, 8, 16]),
        (True, {}, [8, 8, 16]),
        (True, {"no_causal_mask": True}, [24, 24, 24]),  # without the mask, padding affects the embeddings
    ],
)
def test_embeddings_are_those_of_the_padded_texts(custom_text, options, expected_lengths, tmp_path, monkeypatch):
    model, tokens, expected = build(tmp_path, "tiny-text", custom_text, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, lengths = encode(model, tokens, monkeypatch)
    assert lengths == expected_lengths
    torch.testing.assert_close(normalize(found), normalize(expected), atol=1e-6, rtol=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("custom_text", [False, True])
def test_the_small_tower_is_the_same_function(custom_text):
    add_model_configs()
    torch.manual_seed(0)
    model = open_clip.create_model("demo-vit", force_custom_text=custom_text).double()
    tokens = open_clip.get_tokenizer("demo-vit")(["red over blue", "a long caption of a black square", "red"])
    small = copy.deepcopy(model)
    vocabulary, numbers = tokens.unique(return_inverse=True)
    length = int(tokens.argmax(dim=1).max()) + 1
    shrink(find_causal_tower(small)[1], vocabulary, length)

    whole, short = model.encode_text(tokens), small.encode_text(numbers[:, :length].contiguous())
    torch.testing.assert_close(short, whole)
    weights = torch.randn_like(whole)
    (whole * weights).sum().backward()
    (short * weights).sum().backward()
    gradients = [find_causal_tower(one)[1].token_embedding.weight.grad for one in (small, model)]
    assert len(gradients[0]) < 20
    torch.testing.assert_close(gradients[0], gradients[1][vocabulary])


def features_and_gradients(model: nn.Module, texts) -> dict[str, Tensor]:
    """Return the text features, and the gradients of their weighted sum in all parameters."""
    model.zero_grad()
    features = model(text=texts)["text_features"]
    (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"features": features.detach(), **gradients}


@pytest.mark.parametrize("of_equal_size", [False, True])
@pytest.mark.parametrize("custom_text", [False, True])
@pytest.mark.parametrize("context", [20, 77])
def test_groups_have_the_features_and_gradients_of_padded_texts(context, custom_text, of_equal_size):
    add_model_configs()
    torch.manual_seed(0)
    options = {"force_custom_text": custom_text, "force_context_length": context}
    model = open_clip.create_model("demo-vit", output_dict=True, **options).double()
    tokenizer = open_clip.get_tokenizer("demo-vit", context_length=context)
    texts = tokenizer([" ".join(["red"] * (1 + 5 * number % 12)) for number in range(8)])
    expected = features_and_gradients(model, texts)
    assert accept_groups(model)
    groups = group_texts(texts, 3, of_equal_size)
    assert len(groups.tokens) > 1
    for copied in (model, copy.deepcopy(model)):
        found = features_and_gradients(copied, groups)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12 * float(value.abs().max()), msg=key)
    assert torch.equal(features_and_gradients(model, texts)["features"], expected["features"])


@pytest.mark.parametrize(
    ("custom_text", "options"),
    [
        (True, {"no_causal_mask": True, "pool_type": "last"}),  # SigLIP
        (True, {"embed_cls": True, "pad_id": 0}),  # CoCa
        (True, {"pool_type": "eos", "eos_id": 2}),
        (False, {"pool_type": "last"}),
        (True, {"pool_type": "first"}),
    ],
)
def test_other_towers_do_not_take_groups(custom_text, options, tmp_path):
    model, _, _ = build(tmp_path, "tiny-other", custom_text, **options)
    assert not accept_groups(model)
    assert model.encode_text.__func__ is type(model).encode_text


def test_a_tower_with_dropout_does_not_take_groups(tmp_path):
    model, _, _ = build(tmp_path, "tiny-dropout")
    model.transformer.resblocks[0].attn.dropout = 0.1
    assert not accept_groups(model)
