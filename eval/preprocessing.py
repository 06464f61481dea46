"""Split OpenCLIP's evaluation transform into the work on PIL images and the arithmetic on whole batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import pil_to_tensor


def split_transform(
    transform: Callable[[Any], Tensor],
) -> tuple[Callable[[Image.Image], Tensor], Callable[[Tensor], Tensor] | None]:
    """Split a transform that ends with ``ToTensor`` and ``Normalize``, as OpenCLIP's do.

    Both parts together do the same operations on the same values. Workers send a quarter of the bytes, and the arithmetic
    runs on the model's device, once per batch instead of once per image.

    Args:
        transform: PIL image -> ``(3, H, W)``.

    Returns:
        PIL image -> ``(3, H, W)`` uint8, and ``(B, 3, H, W)`` uint8 -> float32. For any other transform, the transform
        itself and None.
    """
    steps = transform.transforms if isinstance(transform, Compose) else []
    if len(steps) < 2 or not isinstance(steps[-2], ToTensor) or not isinstance(steps[-1], Normalize):
        return transform, None
    return Compose([*steps[:-2], pil_to_tensor]), partial(_normalize_bytes, steps[-1])


def _normalize_bytes(normalize: Normalize, images: Tensor) -> Tensor:
    """``ToTensor`` and ``Normalize`` of a batch, in their order of operations, so that every bit is the same."""
    return normalize(images.float().div_(255))
