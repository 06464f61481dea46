"""The planned memory of activations equals what a real forward and backward pass allocates."""

import open_clip
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from openclip_ext import compat
from openclip_ext.diagnostics.dry_run import activation_bytes
from openclip_ext.model_configs import add_model_configs

BATCH = 24
CASES = [
    ("demo-vit", "fp32", False),
    ("demo-vit", "fp32", True),
    ("demo-vit", "amp_bf16", False),
    ("demo-resnet", "fp32", False),
]


def allocated(name: str, precision: str, grad_checkpointing: bool) -> int:
    """Return the peak bytes of a forward and backward pass in PyTorch's profiler, plus the bytes of the images."""
    model = open_clip.create_model(name, output_dict=True).train()
    model.set_grad_checkpointing(grad_checkpointing)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images, texts = torch.rand(BATCH, 3, 32, 32), torch.randint(1, 1000, (BATCH, model.context_length))

    def run() -> None:
        with compat.autocast_context(precision, torch.device("cpu"))():
            outputs = model(images, texts)
        features = outputs["image_features"], outputs["text_features"]
        torch.autograd.backward(features, [torch.ones_like(value) for value in features])

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + images.nbytes


@pytest.mark.parametrize(("name", "precision", "grad_checkpointing"), CASES)
def test_activations_are_what_a_pass_allocates(name: str, precision: str, grad_checkpointing: bool):
    add_model_configs()
    model = open_clip.create_model(name, device="meta", output_dict=True)
    (planned,) = activation_bytes(model, [BATCH], precision, grad_checkpointing)
    assert planned == pytest.approx(allocated(name, precision, grad_checkpointing), rel=0.02)
