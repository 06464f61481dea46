"""Check the inputs of a loss."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables the caller's autocast."""
    if not isinstance(tensor, Tensor):  # check_features raises an error later
        return contextlib.nullcontext()
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def check_features(image_features: Tensor, text_features: Tensor, embed_dim: int | None = None) -> None:
    """Raise ValueError if the features are not two floating-point tensors ``(B_local, d)``, or ``d`` is not ``embed_dim``."""
    for name, features in (("image", image_features), ("text", text_features)):
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise ValueError(
                f"{name} features: expected a floating-point tensor (batch, width), found {described(features)}"
            )
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.ndim != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"image and text features: expected two tensors of shape (batch, width), found {shapes[0]} and {shapes[1]}"
        )
    if not shapes[0][0]:
        raise ValueError(
            "image and text features: found an empty batch. Skip it, or set drop_last=True in the DataLoader"
        )
    if embed_dim is not None and shapes[0][1] != embed_dim:
        raise ValueError(
            f"expected features of width embed_dim={embed_dim}, found {shapes[0][1]}: create the loss with "
            f"embed_dim={shapes[0][1]}"
        )


def check_logit_bias(logit_bias: Tensor | float | None) -> None:
    """Raise ValueError if the bias is not one number. The index, given by position, would be taken for the bias."""
    if isinstance(logit_bias, Tensor) and logit_bias.numel() != 1:
        raise ValueError(
            f"logit_bias: expected one number, found {tuple(logit_bias.shape)}. Pass the index by its name: index="
        )


def check_logit_scale(logit_scale: Tensor | float | None, like: Tensor) -> Tensor:
    """Return the logit scale as a 0-d tensor on the device of ``like``. Raise ValueError if it is not one number."""
    if logit_scale is not None and not isinstance(logit_scale, Tensor):
        # torch.full fills the tensor on the device. A copy from the host would synchronize with the device.
        return torch.full((), logit_scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if logit_scale is None or logit_scale.numel() != 1:
        found = None if logit_scale is None else tuple(logit_scale.shape)
        raise ValueError(f"logit_scale: expected one number, found {found}. Pass model.logit_scale.exp()")
    return logit_scale.reshape(()).to(like.device, non_blocking=True)


def check_index(index: Tensor | None, features: Tensor) -> Tensor:
    """Return the index ``(B_local,)`` int64 on the features' device. Raise ValueError for wrong shapes or dtypes."""
    if index is None:
        raise ValueError(
            "index: missing. A loss with per-sample state needs index=, an int64 tensor (batch,) of positions in the data "
            "set, such as openclip_ext.data.with_index adds"
        )
    integral = isinstance(index, Tensor) and not (index.is_floating_point() or index.is_complex())
    if not integral or index.dtype == torch.bool or tuple(index.shape) != (len(features),):
        raise ValueError(f"index: expected int64 of shape ({len(features)},), found {described(index)}")
    return index.to(features.device, torch.int64, non_blocking=True)


def described(value: object) -> str:
    """Return the shape and the dtype of a tensor, or the type of another value, for an error message."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(type(value).__name__)


# Types of tensors that have values. Other subclasses of Tensor, such as fake tensors, may have no values.
_HAVE_VALUES: tuple[type[Tensor], ...] = (Tensor, torch.nn.Parameter)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether Python can read a tensor's values: False for fake tensors, and while a graph is compiled or captured."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in _HAVE_VALUES:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_in_backward() -> bool:
    """Return whether a backward pass is running. A forward pass is then a repetition by ``torch.utils.checkpoint``."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
