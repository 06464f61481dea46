"""A smaller text tower is the same function of the texts that it was made for, and learns the same."""

import copy

import open_clip
import pytest
import torch

from openclip_ext.evaluation.text_tower import find_causal_tower, shrink
from openclip_ext.model_configs import add_model_configs

TEXTS = ["red over blue", "a long caption of a black square", "red"]


@pytest.mark.parametrize("custom_text", [False, True])
def test_the_small_tower_is_the_same_function(custom_text):
    add_model_configs()
    torch.manual_seed(0)
    model = open_clip.create_model("demo-vit", force_custom_text=custom_text).double()
    tokens = open_clip.get_tokenizer("demo-vit")(TEXTS)
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


def test_a_tower_of_another_kind_is_not_found():
    assert find_causal_tower(torch.nn.Linear(1, 1)) is None
