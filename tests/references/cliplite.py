"""Naive reference of CLIP-Lite, with torch's layers and a loop over the pairs."""

import torch
from torch import Tensor, nn

from openclip_ext.losses.cliplite import Projection


class NaiveProjection(nn.Module):
    """The projection ``LayerNorm(Linear(ReLU(BatchNorm(Linear x))) + shortcut x)``, with the state of ``ours``."""

    def __init__(self, ours: Projection) -> None:
        super().__init__()
        projection_dim, embed_dim = ours.hidden.weight.shape
        self.block = nn.Sequential(
            nn.Linear(embed_dim, projection_dim, bias=False),
            nn.BatchNorm1d(projection_dim),
            nn.ReLU(),
            nn.Linear(projection_dim, projection_dim),
        )
        self.shortcut = nn.Linear(embed_dim, projection_dim, bias=False)
        self.layer_norm = nn.LayerNorm(projection_dim)
        self.double()
        self.same_as_ours = [
            (self.block[0].weight, ours.hidden.weight),
            (self.block[1].weight, ours.scale),
            (self.block[1].bias, ours.shift),
            (self.block[3].weight, ours.output.weight),
            (self.block[3].bias, ours.output.bias),
            (self.shortcut.weight, ours.shortcut.weight),
            (self.layer_norm.weight, ours.layer_norm.weight),
            (self.layer_norm.bias, ours.layer_norm.bias),
        ]
        with torch.no_grad():
            for own, value in self.same_as_ours:
                own.copy_(value)
            self.block[1].running_mean.copy_(ours.running_mean)
            self.block[1].running_var.copy_(ours.running_var)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer_norm(self.block(features) + self.shortcut(features))


def loss(
    image_projection: nn.Module, text_projection: nn.Module, images: Tensor, texts: Tensor, scale: Tensor
) -> Tensor:
    """Return mean ``log(1 + exp(−T))`` over pairs plus mean ``log(1 + exp(T))`` over images with the next pair's text (3)."""
    image, text = image_projection(images), text_projection(texts)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(images)):
        following = (i + 1) % len(images)
        positive = scale * torch.cosine_similarity(image[i], text[i], dim=0)
        negative = scale * torch.cosine_similarity(image[i], text[following], dim=0)
        total = total + torch.log(1 + torch.exp(-positive)) + torch.log(1 + torch.exp(negative))
    return total / len(images)
