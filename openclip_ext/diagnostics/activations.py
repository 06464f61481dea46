"""Count the memory that a model's forward and backward pass take, beyond parameters and gradients, without computing them.

The real model runs with tensors that have sizes and no values, so that any batch costs the same second.
"""

import open_clip
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from openclip_ext import compat
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.dry_run import PeakMemory

PRECISIONS = ("fp32", "amp", "amp_bf16")


def activation_bytes(model_name: str, batch: int, precision: str = "fp32", grad_checkpointing: bool = False) -> int:
    """Peak of what both towers allocate in a forward and backward pass, with the images.

    Args:
        model_name: one of OpenCLIP's.
        batch: images, and texts.
        precision: ``--precision``, one of :data:`PRECISIONS`.
        grad_checkpointing: ``--grad-checkpointing``.
    """
    cpu = torch.device("cpu")
    with command_line.without_warnings():
        model = open_clip.create_model(model_name, device="meta", output_dict=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device=cpu).train()
        model.set_grad_checkpointing(grad_checkpointing)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        height, width = (
            (model.visual.image_size,) * 2 if isinstance(model.visual.image_size, int) else model.visual.image_size
        )
        images = torch.empty(batch, 3, height, width)
        texts = torch.empty(batch, model.context_length, dtype=torch.int64)
        memory = PeakMemory()
        with memory:
            with compat.autocast_context(precision, cpu)():
                outputs = model(images, texts)
            features = outputs["image_features"], outputs["text_features"]
            torch.autograd.backward(features, [torch.empty_like(value) for value in features])
    return memory.peak + images.nbytes
