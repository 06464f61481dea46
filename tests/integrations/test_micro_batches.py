"""Micro-batches give the gradient of the full batch. The test file of each integration compares full runs."""

import copy

import pytest
import torch
from open_clip import CoCa
from torch import Tensor, nn

from openclip_ext.integrations.micro_batches import in_micro_batches
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.losses.registry import create_loss
from tests.integrations.towers import SAMPLES, stateful_loss
from tests.training.tiny import tiny_batch, tiny_captioner, tiny_model

SIZE = 3  # does not divide the batch of 8


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    loss = create_loss("openclip") if isinstance(model, CoCa) else stateful_loss().double()
    value = ModelLoss(loss, model)(model(batch["image"], batch["text"]), batch["index"] % SAMPLES)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("create", [tiny_model, tiny_captioner])
def test_value_and_gradient_are_the_whole_batchs(create):
    model = create().double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in tiny_batch(0).items()}
    value, gradients = step(copy.deepcopy(model), batch)
    parts, found = step(in_micro_batches(model, SIZE), batch)
    torch.testing.assert_close(parts, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-12)


def test_one_part_has_activations_and_the_second_pass_draws_the_same_numbers():
    """The model has dropout, whose masks must be equal in both passes, and BatchNorm, whose statistics update only once."""
    model = tiny_model()
    drawn: list[Tensor] = []
    layers = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(model.text_projection.shape[1]))
    layers[0].register_forward_hook(lambda module, args, output: drawn.append(output == 0))
    encode = model.encode_text
    model.dropout = layers
    model.encode_text = lambda text, normalize=False: layers(encode(text, normalize=False))
    in_micro_batches(model, SIZE)
    step(model, tiny_batch(0))
    first, second = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    assert [len(part) for part in first] == [3, 3, 2]
    # The backward pass may process the parts in another order.
    assert all(any(torch.equal(part, other) for other in second if len(other) == len(part)) for part in first)
    assert layers[1].num_batches_tracked == len(first)


def test_a_size_of_0_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        in_micro_batches(tiny_model(), 0)


def test_a_copy_computes_with_its_own_weights():
    """An average of the weights and Lightning's WeightAveraging copy the model."""
    model = in_micro_batches(tiny_model(), SIZE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = tiny_batch(0)
    for mode in (True, False):
        assert twin.train(mode)(batch["image"], batch["text"])["image_features"].norm() > 0
    assert twin.train()(batch["image"], batch["text"])["logit_scale"] > 1
    assert "text_features" in twin.eval()(batch["image"])  # in evaluation mode, the outputs are the model's


def test_a_compiled_model_gives_the_same_gradients():
    batch = tiny_batch(0)
    model = in_micro_batches(tiny_model(), SIZE)
    value, gradients = step(model, batch)
    model.zero_grad()
    torch.manual_seed(0)
    outputs = torch.compile(model, backend="eager")(batch["image"], batch["text"])
    found = ModelLoss(stateful_loss().double(), model)(outputs, batch["index"] % SAMPLES)
    found.backward()
    torch.testing.assert_close(found.detach(), value)
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, gradients)
