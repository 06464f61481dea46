"""Check the inputs of a loss; wrong ones raise a ValueError."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context that computes in the precision of the tensors, whatever the caller's autocast says."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def check_features(image_features: Tensor, text_features: Tensor, embed_dim: int | None = None) -> None:
    """Raise ValueError unless the features are two floating-point ``(B_local, d)`` of the same shape; ``d`` may be given."""
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.ndim != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"image and text features: expected two of shape (batch, width), found {shapes[0]} and {shapes[1]}"
        )
    if not shapes[0][0]:
        raise ValueError(
            "image and text features: found an empty batch; skip it, or drop it: drop_last=True of the DataLoader"
        )
    if embed_dim is not None and shapes[0][1] != embed_dim:
        raise ValueError(
            f"the features have width {shapes[0][1]}, the loss was created with embed_dim={embed_dim}: pass the model's"
        )
    for name, features in (("image", image_features), ("text", text_features)):
        if not features.is_floating_point():
            raise ValueError(f"{name} features: expected a floating-point type, found {features.dtype}")


def check_logit_scale(logit_scale: Tensor | float | None, like: Tensor) -> Tensor:
    """Return the logit scale as a 0-d tensor on the features' device; raise ValueError unless it is one number."""
    if logit_scale is not None and not isinstance(logit_scale, Tensor):
        # Filled by a kernel: a copy from the host would wait.
        return torch.full((), logit_scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if logit_scale is None or logit_scale.numel() != 1:
        found = None if logit_scale is None else tuple(logit_scale.shape)
        raise ValueError(f"logit_scale: expected one number (the model's, exp applied), found {found}")
    return logit_scale.reshape(()).to(like.device, non_blocking=True)


def check_index(index: Tensor | None, features: Tensor) -> Tensor:
    """Return the index as int64 on the features' device; raise ValueError unless it has one position for each sample."""
    if index is None:
        raise ValueError(
            "this loss keeps state for each sample and needs index=, a (batch,) int64 tensor of positions in the data set"
        )
    integral = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
    if not integral or index.dtype == torch.bool or tuple(index.shape) != (len(features),):
        found = f"{tuple(index.shape)} {index.dtype}" if isinstance(index, Tensor) else repr(type(index).__name__)
        raise ValueError(f"index: expected int64 of shape ({len(features)},), found {found}")
    return index.to(features.device, torch.int64, non_blocking=True)


# Other types of tensors may have no values.
_HAVE_VALUES: tuple[type[Tensor], ...] = (Tensor, torch.nn.Parameter)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether Python may look at a tensor's values: not while compiling or capturing, nor of a fake tensor."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in _HAVE_VALUES:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_in_backward() -> bool:
    """Return whether a backward pass calls this, which recomputes what ``torch.utils.checkpoint`` has not kept."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
