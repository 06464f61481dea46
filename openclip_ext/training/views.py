"""Training an image tower alone, on two views of each image, which take the places of image and text."""

from typing import Any

from torch import Tensor, nn


def is_views(images: Tensor) -> bool:
    """Whether a batch of images ``(B, 3, H, W)`` is one of views, ``(B, 2, 3, H, W)``."""
    return images.ndim == 5


def encode_views(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """What a loss takes, from the views ``(B, 2, 3, H, W)`` of each image.

    Args:
        model: OpenCLIP model returning a dictionary, possibly wrapped. It gets all views as one batch, and no text.
        images: the views.

    Returns:
        The model's outputs with the first views' embeddings as ``image_features`` and the second ones' as
        ``text_features``.
    """
    outputs = model(images.flatten(0, 1), None)
    features = outputs["image_features"].unflatten(0, images.shape[:2])
    return {**outputs, "image_features": features[:, 0], "text_features": features[:, 1]}


def train_image_tower_only(model: nn.Module) -> None:
    """Freeze what no image passes through, so that DDP and weight decay leave it alone."""
    inside = {id(parameter) for parameter in model.get_submodule("visual").parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(False)
