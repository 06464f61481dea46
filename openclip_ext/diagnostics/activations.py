"""Count the memory that a model's forward and backward pass take, beyond parameters and gradients, without computing them.

The real model runs with tensors that have sizes and no values, so that any batch costs the same second.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import open_clip
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from openclip_ext import compat
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.dry_run import PeakMemory

PRECISIONS = ("fp32", "amp", "amp_bf16")


def activation_bytes(
    model_name: str, batches: Sequence[int], precision: str = "fp32", grad_checkpointing: bool = False
) -> list[int]:
    """For each batch the peak of what both towers allocate in a forward and backward pass, with the images.

    Args:
        model_name: one of OpenCLIP's.
        batches: numbers of images, and of texts.
        precision: ``--precision``, one of :data:`PRECISIONS`.
        grad_checkpointing: ``--grad-checkpointing``.
    """
    autocast = compat.autocast_context(precision, torch.device("cpu"))
    with command_line.without_warnings():
        model = open_clip.create_model(model_name, device="meta", output_dict=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        model.set_grad_checkpointing(grad_checkpointing)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return [_peak(model, batch, autocast) for batch in batches]


def _peak(model: Any, batch: int, autocast: Callable[[], AbstractContextManager]) -> int:
    size = model.visual.image_size
    images = torch.empty(batch, 3, *((size, size) if isinstance(size, int) else size))
    texts = torch.empty(batch, model.context_length, dtype=torch.int64)
    memory = PeakMemory()
    with memory:
        with autocast():
            outputs = model(images, texts)
        features = outputs["image_features"], outputs["text_features"]
        torch.autograd.backward(features, [torch.empty_like(value) for value in features])
    return memory.peak + images.nbytes
