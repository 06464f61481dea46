"""Stored features of a locked image tower, for ``--image-features``: its frozen part runs once before training.

``--lock-image`` locks OpenCLIP's towers as a whole, but leaves the projection behind a timm tower trainable. Then the features
before the projection are stored, and the projection runs in each step.
"""

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

from openclip_ext.cli.errors import UsageError


class FrozenTower(nn.Module):
    """The frozen part of a model's image tower, as a model that can be embedded. Its text features are zeros.

    Args:
        model: An OpenCLIP model with a locked image tower.
        embed_dim: The embedding dimension of the model.

    Raises:
        UsageError: The tower has trainable parameters besides a linear projection without bias. The embedding is normalized
            after such a projection, so the norm of stored features, which is 1, has no effect on it.
    """

    def __init__(self, model: Any, embed_dim: int) -> None:
        super().__init__()
        visual = model.visual
        trained = [name for name, parameter in visual.named_parameters() if parameter.requires_grad]
        if set(trained) - {"head.proj.weight"}:
            raise UsageError(
                f"--image-features: --lock-image leaves {', '.join(trained)} of the image tower trainable. Only a linear "
                "projection without bias can be trained on stored features. Remove --image-features"
            )
        self.projection = visual.head.proj if trained else None
        self.frozen = visual.trunk if trained else visual
        self.width = visual.head.proj.in_features if trained else embed_dim
        self.logit_scale = model.logit_scale

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """Return the unit features ``(B, width)`` of images, in the form of OpenCLIP's outputs."""
        features = normalize(self.frozen(images), dim=-1)
        return {
            "image_features": features,
            "text_features": self.encode_text(texts),
            "logit_scale": self.logit_scale.exp(),
        }

    def encode_text(self, texts: Tensor) -> Tensor:
        return self.logit_scale.new_zeros(len(texts), self.width)


def accept_features(visual: nn.Module) -> None:
    """Let an image tower with a trainable projection also take stored features ``(B, width)``, which it only projects."""
    # A bound method of an instance is copied with the instance, like the method of a class.
    vars(visual).update(forward=MethodType(_forward, visual))


def _forward(visual: Any, images: Tensor) -> Tensor:
    return visual.head(images) if images.ndim == 2 else type(visual).forward(visual, images)
