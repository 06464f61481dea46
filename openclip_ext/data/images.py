"""Image pipelines: Pillow gives exactly the pixels of OpenCLIP, and torchvision takes a third of the time.

In both pipelines, workers send uint8 images, and each batch is converted to floats on the model's device.
"""

import contextlib
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import Compose, Normalize, RandomResizedCrop, ToTensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.transforms.v2.functional import resized_crop

from openclip_ext import compat
from openclip_ext.data.sources.source import MAX_ASPECT, DecodedImage, decode_image


@dataclass(frozen=True)
class ImagePipeline:
    """The three steps from an image file to the model's input.

    Attributes:
        decode: Decodes the content of a file to an RGB image, in a worker.
        transform: Turns the image into ``(3, H, W)``, in a worker. The dtype is uint8 unless ``normalize`` is None.
        normalize: Turns a batch into float32 on the model's device. None means that ``transform`` returns float32.
    """

    decode: Callable[[bytes | BinaryIO], DecodedImage]
    transform: Callable[[Any], Tensor]
    normalize: Callable[[Tensor], Tensor] | None


def image_pipeline(transform: Callable[[Any], Tensor], backend: str = "pil") -> ImagePipeline:
    """Return a pipeline with the same operations as a transform of ``open_clip.create_model_and_transforms``.

    Args:
        backend: ``pil`` gives exactly the pixels of ``transform``. ``torchvision`` decodes JPEG files, crops and resizes,
            and rounds pixels differently. Even then, Pillow decodes other formats and applies all other operations.
    """
    if backend not in ("pil", "torchvision"):
        raise ValueError(f"unknown image backend {backend!r}: expected pil or torchvision")
    in_worker, normalize = split_transform(transform)
    if backend == "pil":
        return ImagePipeline(decode_image, in_worker, normalize)
    steps = list(in_worker.transforms) if isinstance(in_worker, Compose) else [in_worker]
    return ImagePipeline(decode_with_torchvision, Compose(_for_tensors(steps)), normalize)


def split_transform(
    transform: Callable[[Any], Tensor],
) -> tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor] | None]:
    """Split a transform that ends with ``ToTensor`` and ``Normalize`` into two parts with the same result.

    Returns:
        PIL image -> ``(3, H, W)`` uint8, and ``(B, 3, H, W)`` uint8 -> float32. A transform that ends differently is
        returned unchanged, with None as the second part.
    """
    steps = transform.transforms if isinstance(transform, Compose) else []
    if len(steps) < 2 or not isinstance(steps[-2], ToTensor) or not isinstance(steps[-1], Normalize):
        return transform, None
    return Compose([*steps[:-2], _to_bytes]), _BatchNormalize(steps[-1])


class _BatchNormalize:
    """``ToTensor`` and ``Normalize`` for a batch, with bitwise equal results."""

    def __init__(self, normalize: Normalize) -> None:
        mean, std = (torch.as_tensor(values, dtype=torch.float32) for values in (normalize.mean, normalize.std))
        # 255 is a tensor, because a GPU would not divide by a Python number but multiply by its rounded inverse.
        self._constants = [torch.tensor(255.0), mean.view(-1, 1, 1), std.view(-1, 1, 1)]

    def __call__(self, images: Tensor) -> Tensor:
        if self._constants[0].device != images.device:
            self._constants = [value.to(images.device) for value in self._constants]
        largest, mean, std = self._constants
        return images.float().div_(largest).sub_(mean).div_(std)


def decode_with_torchvision(data: bytes | BinaryIO) -> Tensor:
    """Decode an image to the same pixels as :func:`decode_image`, but as a ``(3, H, W)`` uint8 tensor."""
    content = data if isinstance(data, bytes) else data.read()
    if _is_plain_jpeg(content):
        with contextlib.suppress(RuntimeError):
            return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
    return torch.from_numpy(np.array(decode_image(content))).permute(2, 0, 1)


def _is_plain_jpeg(content: bytes) -> bool:
    """Return whether a file is safe for torchvision, which accepts truncated JPEGs and crashes on some corrupt PNGs."""
    try:
        head = Image.open(io.BytesIO(content))
    except Exception:  # decode_image reports the reason
        return False
    is_regular = head.mode in ("RGB", "L") and max(head.size) <= MAX_ASPECT * min(head.size)
    return is_regular and head.format == "JPEG" and content.endswith(b"\xff\xd9")


def _for_tensors(steps: list[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
    """Adapt the steps of a transform to tensors. A crop as the first step gets tensors; other steps get Pillow images."""
    from timm.data.transforms import RandomResizedCropAndInterpolation

    last = [steps.pop()] if steps[-1] is _to_bytes else []
    is_crop = bool(steps) and isinstance(steps[0], RandomResizedCrop | RandomResizedCropAndInterpolation)
    first = [_TensorCrop(steps.pop(0))] if is_crop else []
    others = [step for step in steps if not compat.converts_to_rgb(step)]
    return [*first, *([_to_pil, *others] if others else []), *last]


class _TensorCrop:
    """A random crop that uses the same random numbers for tensors and for Pillow images."""

    def __init__(self, crop: Any) -> None:
        self.crop = crop
        self.size = crop.size

    def __call__(self, image: DecodedImage) -> DecodedImage:
        if not isinstance(image, Tensor):
            return self.crop(image)
        box = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        interpolation = self.crop.interpolation
        if isinstance(interpolation, tuple):  # timm's interpolation "random"
            interpolation = random.choice(interpolation)
        return resized_crop(image, *box, size=list(self.size), interpolation=interpolation, antialias=True)


def _to_pil(image: DecodedImage) -> Image.Image:
    return to_pil_image(image) if isinstance(image, Tensor) else image


def _to_bytes(image: DecodedImage) -> Tensor:
    return image if isinstance(image, Tensor) else pil_to_tensor(image)
