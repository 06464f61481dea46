"""Draw Grad-CAM heat maps of phrases over images: ``python -m eval.cliplite.grounding``.

Source: CLIP-Lite, section 4.7, which uses Grad-CAM (Selvaraju et al., 2017). The alignment of image and phrase is
differentiated with respect to the last spatial features of the visual tower. The gradient, averaged over positions, gives a
weight for each channel. The heat map is the weighted sum of the channels, clipped at zero. In vision transformers, the last
spatial features are the patch tokens before the last block's attention, because later layers use only the class token.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.data.images import split_transform
from openclip_ext.evaluation.command_line import add_model_arguments, load_encoder
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.files.writing import output_path


@dataclass(frozen=True)
class SpatialLayer:
    """A module of a visual tower. ``to_map`` reshapes its output to feature maps ``(N, C, H, W)``."""

    name: str
    to_map: Callable[[Tensor], Tensor] = torch.positive  # the identity


def find_spatial_layer(visual: Any) -> SpatialLayer:
    """Find the last layer of a visual tower (of OpenCLIP or timm) whose features still have positions in the image."""

    def tokens(blocks: str, count: int, norm: str, grid: Sequence[int]) -> SpatialLayer:
        def to_map(features: Tensor) -> Tensor:  # the patch tokens are the last tokens
            return features[:, -grid[0] * grid[1] :].movedim(-1, 1).unflatten(-1, tuple(grid))

        return SpatialLayer(f"{blocks}.{count - 1}.{norm}", to_map)

    trunk: Any = getattr(visual, "trunk", None)
    if hasattr(visual, "layer4"):
        return SpatialLayer("layer4")
    if hasattr(visual, "transformer") and hasattr(visual, "grid_size"):
        return tokens("transformer.resblocks", len(visual.transformer.resblocks), "ln_1", visual.grid_size)
    if hasattr(trunk, "blocks") and hasattr(trunk, "num_prefix_tokens"):
        return tokens("trunk.blocks", len(trunk.blocks), "norm1", trunk.patch_embed.grid_size)
    if getattr(trunk, "feature_info", None):
        name = f"trunk.{trunk.feature_info[-1]['module']}"
        if str(getattr(trunk, "output_fmt", "")).endswith("NHWC"):
            return SpatialLayer(name, partial(torch.movedim, source=-1, destination=1))
        return SpatialLayer(name)
    raise UsageError(
        f"Grad-CAM does not support a {type(visual).__name__}: expected a ModifiedResNet, a timm convolutional network, "
        "or a vision transformer with patch tokens."
    )


def grad_cam(encoder: Encoder, image: Tensor, phrases: Sequence[str], layer: SpatialLayer | None = None) -> Tensor:
    """Compute a Grad-CAM heat map of a preprocessed image ``(3, H, W)`` for each of ``P`` phrases.

    The model's weights and gradients do not change. The result is ``(P, H, W)``, float32 on the CPU. Each map is scaled to a
    maximum of 1. A map is all zeros if no position supports its phrase.
    """
    visual = encoder.model.visual
    layer = layer or find_spatial_layer(visual)
    caught: list[Tensor] = []

    def catch(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        # Features detached from earlier layers get a gradient even in a frozen tower, and earlier layers compute no
        # gradients. The clone protects the features from in-place operations in later layers.
        caught.append(output.detach().requires_grad_())
        return caught[-1].clone()

    texts = encoder.encode_texts(phrases)
    try:
        hook = visual.get_submodule(layer.name).register_forward_hook(catch)
    except AttributeError:
        known = ", ".join(child for child, _ in visual.named_children())
        raise UsageError(
            f"--layer {layer.name} not found in the visual tower: expected a module inside {known}"
        ) from None
    try:
        with torch.enable_grad():
            images = image.to(encoder.device).unsqueeze(0)
            alignment = texts @ F.normalize(encoder.model.encode_image(images).float(), dim=-1)[0]
            if len(caught) != 1:
                raise UsageError(f"Grad-CAM: expected {layer.name} to run once per image, found {len(caught)} times.")
            (features,) = caught
            gradients = [torch.autograd.grad(value, features, retain_graph=True)[0] for value in alignment]
    finally:
        hook.remove()
    activations = layer.to_map(features.detach())
    if activations.dim() != 4 or activations.shape[-2:].numel() < 2:
        raise UsageError(
            f"Grad-CAM: expected features at several positions, found the shape {tuple(features.shape)} in {layer.name} for "
            f"images of {tuple(image.shape[-2:])} pixels. Choose an earlier --layer."
        )
    # Equations 1 and 2 of Grad-CAM: relu(sum_c mean_hw(gradients)_c activations_c)
    weights = torch.cat([layer.to_map(gradient) for gradient in gradients]).float().mean(dim=(2, 3), keepdim=True)
    maps = (weights * activations.float()).sum(dim=1, keepdim=True).clamp_min(0)
    maps = F.interpolate(maps, size=image.shape[-2:], mode="bilinear", align_corners=False).squeeze(1)
    return (maps / maps.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)).cpu()


def grounding_picture(image: np.ndarray, maps: np.ndarray, phrases: Sequence[str]) -> Figure:
    """Draw the model's input image ``(H, W, 3)``, then the image under the heat map ``(H, W)`` of each phrase."""
    figure = Figure(figsize=(3 * (1 + len(maps)), 3.2), layout="constrained")
    panels = figure.subplots(1, 1 + len(maps))
    for panel, title in zip(panels, ["image", *phrases], strict=True):
        panel.imshow(image)
        panel.set_axis_off()
        panel.set_title(textwrap.shorten(title, 40, placeholder="…"), fontsize=9)
    for panel, heat in zip(panels[1:], maps, strict=True):
        # Where the map is 0, it is drawn with opacity 0.2, so that a map of zeros looks different from the plain image.
        panel.imshow(heat, cmap="turbo", vmin=0, vmax=1, alpha=0.2 + 0.4 * heat)
    return figure


def open_image(path: Path) -> Image.Image:
    """Read an image file as RGB; raise ValueError if it is unreadable."""
    try:
        return Image.open(path).convert("RGB")
    except Exception as error:  # decoders raise many exceptions, even struct.error and SyntaxError
        raise ValueError(f"{path} is not a readable image: {error}") from error


def build_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog=f"python -m {__package__}.grounding",
        description="Draw Grad-CAM heat maps of phrases over images, as PNG files (CLIP-Lite, section 4.7).",
    )
    add_model_arguments(parser)
    parser.add_argument("--images", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--phrases", nargs="+", required=True, metavar="PHRASE")
    parser.add_argument("--output-dir", type=output_path, default=Path("grounding"), help="default: %(default)s")
    parser.add_argument("--layer", help="module of the visual tower whose output is (N, C, H, W)")
    return parser


def main(argv: list[str]) -> None:
    """Write a figure for each image, and print its path."""
    args = build_parser().parse_args(argv)
    _, encoder = load_encoder(args)
    layer = SpatialLayer(args.layer) if args.layer else None
    to_pixels, _ = split_transform(encoder.transform)
    images = [(path, open_image(path)) for path in args.images]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for number, (path, image) in enumerate(images):
        maps = grad_cam(encoder, encoder.transform(image), args.phrases, layer)
        target = args.output_dir / f"{number:03d}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', path.stem)}.png"
        pixels = to_pixels(image).movedim(0, -1).numpy()
        grounding_picture(pixels, maps.numpy(), args.phrases).savefig(target, dpi=150)
        print(target)


if __name__ == "__main__":
    command_line.run(main)
