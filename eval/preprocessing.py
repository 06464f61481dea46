"""OpenCLIP's evaluation transform in two parts: what needs the PIL image, and the arithmetic, for whole batches."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import pil_to_tensor


def split_transform(
    transform: Callable[[Any], Tensor],
) -> tuple[Callable[[Image.Image], Tensor], Callable[[Tensor], Tensor] | None]:
    """Split a transform that ends with ``ToTensor`` and ``Normalize``, as OpenCLIP's do.

    Together the parts do the same operations on the same values. But workers send a quarter of the bytes, and the
    arithmetic is done where the model is, one operation a batch instead of one an image.

    Args:
        transform: PIL image -> ``(3, H, W)``.

    Returns:
        PIL image -> ``(3, H, W)`` uint8, and ``(B, 3, H, W)`` uint8 -> float32. For any other transform, the transform
        itself and None.
    """
    steps = transform.transforms if isinstance(transform, Compose) else []
    if len(steps) < 2 or not isinstance(steps[-2], ToTensor) or not isinstance(steps[-1], Normalize):
        return transform, None
    return Compose([*steps[:-2], pil_to_tensor]), BatchNormalize(steps[-1])


class BatchNormalize:
    """``ToTensor`` and ``Normalize`` for a batch, in their order of operations, so that every bit is the same."""

    def __init__(self, normalize: Normalize):
        self.mean = torch.tensor(normalize.mean).view(-1, 1, 1)
        self.std = torch.tensor(normalize.std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W)`` uint8 -> float32, on the images' device."""
        mean, std = self.mean.to(images.device), self.std.to(images.device)
        return images.float().div_(255).sub_(mean).div_(std)
