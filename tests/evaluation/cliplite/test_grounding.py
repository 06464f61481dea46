"""Grad-CAM: the command, and gradients compared with finite differences for every kind of tower."""

import copy
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models import SwinTransformer, build_model_with_cfg, register_model
from torch import Tensor, nn

from eval.cliplite.grounding import SpatialLayer, find_spatial_layer, grad_cam, main
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.encoder import Encoder
from tests.evaluation.datasets import tiny_model_config

# Vision tower, the layer for Grad-CAM, the layer's channel axis, and how many of its last positions are patches (0: all).
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "image_size": 64}
TOWERS = {
    "modified-resnet": (RESNET, ("layer4", 1, 0)),
    "vit-class-token": ({"image_size": [32, 48]}, ("transformer.resblocks.1.ln_1", -1, 24)),
    "vit-mean": ({"image_size": 32, "pool_type": "avg"}, ("transformer.resblocks.1.ln_1", -1, 16)),
    "timm-convnet": ({"timm_model_name": "test_convnext", "image_size": 64}, ("trunk.stages.3", 1, 0)),
    "timm-vit": ({"timm_model_name": "vit_tiny_patch16_224", "image_size": 224}, ("trunk.blocks.11.norm1", -1, 196)),
    "timm-channels-last": ({"timm_model_name": "tiny_swin", "image_size": 64}, ("trunk.layers.1", -1, 0)),
}


@register_model
def tiny_swin(pretrained=False, **options):
    """A tower of Swin's architecture for timm, whose feature maps have the channels last."""
    sizes = {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    return build_model_with_cfg(SwinTransformer, "tiny_swin", pretrained, **sizes | options)


def build_encoder(folder: Path, name: str, vision: dict) -> Encoder:
    open_clip.add_model_config(tiny_model_config(folder, name, **vision))
    torch.manual_seed(1)
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    with torch.no_grad():  # otherwise, the residual branches of ModifiedResNet return zero
        for parameter in model.visual.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return Encoder(model.eval(), preprocess, open_clip.get_tokenizer(name), torch.device("cpu"))


def finite_differences(
    encoder: Encoder, name: str, axis: int, positions: int, image: Tensor, text: Tensor, channels: int
) -> tuple[list[int], Tensor, Tensor]:
    """Return some channel indices, their Grad-CAM weights in float64 (computed without autograd), and the layer's features.

    A weight is the derivative of the alignment by a shift of the channel at all positions, which is the sum of its gradients.
    """
    model = copy.deepcopy(encoder.model).double()
    module = model.visual.get_submodule(name)

    @torch.no_grad()
    def alignment(features: Tensor | None = None) -> tuple[float, Tensor]:
        seen = []

        def exchange(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            seen.append(output if features is None else features)
            return seen[0]

        hook = module.register_forward_hook(exchange)
        embedding = F.normalize(model.encode_image(image[None].double()), dim=-1)[0]
        hook.remove()
        return float(embedding @ text.double()), seen[0]

    base = alignment()[1]
    chosen = list(range(0, base.shape[axis], max(1, base.shape[axis] // channels)))
    weights = []
    for channel in chosen:
        shift = torch.zeros_like(base)
        shift.select(axis, channel)[..., -positions:] = 1e-5
        weights.append((alignment(base + shift)[0] - alignment(base - shift)[0]) / 2e-5)
    return chosen, torch.tensor(weights, dtype=torch.float64), base


@pytest.mark.parametrize("name", TOWERS)
def test_equals_finite_differences(tmp_path: Path, name: str) -> None:
    vision, place = TOWERS[name]
    small = not name.startswith("timm")
    encoder = build_encoder(tmp_path, f"cam-{name}", vision if small else {**vision, "timm_proj": "linear"})
    layer = find_spatial_layer(encoder.model.visual)
    assert layer.name == place[0]
    size = vision["image_size"]
    height, width = size if isinstance(size, list) else (size, size)
    image = torch.randn(3, height, width)
    phrases = ["a red circle", "snow"]
    seen: list[Tensor] = []  # the feature maps, then their gradients

    def recorded(features: Tensor) -> Tensor:
        seen.append(layer.to_map(features))
        return seen[-1]

    maps = grad_cam(encoder, image, phrases, SpatialLayer(layer.name, recorded))
    assert maps.shape == (2, height, width) and maps.dtype == torch.float32
    assert all(parameter.grad is None for parameter in encoder.model.parameters())
    assert float(maps.min()) >= 0 and set(maps.amax(dim=(1, 2)).tolist()) <= {0.0, 1.0}

    text = encoder.encode_texts(phrases[:1])[0]
    channels, weights, features = finite_differences(encoder, *place, image, text, 10**6 if small else 6)
    gradients = seen[1].sum(dim=(0, 2, 3))[channels].double()
    torch.testing.assert_close(gradients, weights, rtol=0, atol=2e-3 * float(weights.abs().max()))
    if small:  # finite differences cover all channels, so the full map can be compared
        weighted = (weights.view(1, -1, 1, 1) * layer.to_map(features)).sum(dim=1, keepdim=True).clamp_min(0)
        expected = F.interpolate(weighted, size=(height, width), mode="bilinear")[0, 0]
        torch.testing.assert_close(maps[0].double(), expected / expected.max(), rtol=0, atol=1e-2)


def test_towers_without_places_are_refused() -> None:
    with pytest.raises(UsageError, match="convolutional network, or a vision transformer"):
        find_spatial_layer(nn.Linear(3, 3))


def test_command(tmp_path: Path) -> None:
    encoder = build_encoder(tmp_path, "cam-command", RESNET)
    torch.save({"state_dict": encoder.model.state_dict()}, tmp_path / "epoch_1.pt")
    Image.new("RGB", (80, 60), "red").save(tmp_path / "a photo.jpg")
    Image.new("RGB", (60, 80), "blue").save(tmp_path / "b.png")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8")

    def run(*arguments: str) -> None:
        model = ["--model", "cam-command", "--checkpoint", str(tmp_path / "epoch_1.pt"), "--device", "cpu"]
        main([*model, "--output-dir", str(tmp_path / "out"), *arguments])

    images = [str(tmp_path / "a photo.jpg"), str(tmp_path / "b.png")]
    run("--images", *images, "--phrases", "red", "a blue square")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["000_a_photo.png", "001_b.png"]
    with Image.open(tmp_path / "out" / written[0]) as picture:
        assert picture.size == (3 * 3 * 150, 480)
    small = build_encoder(tmp_path, "cam-small", {**RESNET, "image_size": 32})
    torch.save({"state_dict": small.model.state_dict()}, tmp_path / "small.pt")
    smaller = ["--model", "cam-small", "--checkpoint", str(tmp_path / "small.pt")]
    run("--images", images[0], "--phrases", "red", *smaller, "--layer", "layer2")
    with pytest.raises(ValueError, match="Choose an earlier --layer"):
        run("--images", images[0], "--phrases", "red", *smaller)
    with pytest.raises(ValueError, match=r"broken\.jpg is not a readable image"):
        run("--images", str(tmp_path / "broken.jpg"), "--phrases", "red")
