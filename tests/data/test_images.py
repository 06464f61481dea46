"""The two image backends: the same decisions and random numbers; with Pillow the same bits, with torchvision nearly."""

import io
import random
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor

from openclip_ext.data.build import build_train_loader
from openclip_ext.data.images import IMAGE_BACKENDS, decode_with_torchvision, image_pipeline
from openclip_ext.data.source import BadSampleError, decode_image
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig
from tests.data.loading import indices, tokenize
from tests.data.shards import sample_members, undecodable, write_shards

SIZE = 32
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "simclr": {
        "color_jitter": (0.4, 0.4, 0.4, 0.1),
        "color_jitter_prob": 0.8,
        "gray_scale_prob": 0.5,
        "scale": (0.2, 1.0),
    },
    "timm": {"use_timm": True, "color_jitter": 0.4, "ratio": (0.7, 1.4)},
    "timm with erasing": {"use_timm": True, "re_prob": 0.9},
}
MODES = {"RGB": "JPEG", "L": "JPEG", "CMYK": "JPEG", "P": "PNG", "RGBA": "PNG", "I;16": "PNG"}


def picture(seed: int, width: int = 150, height: int = 90) -> Image.Image:
    """Coarse structure with noise, as photographs have."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray((pixels + generator.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def seeded(transform: Any, image: Any, seed: int) -> tuple[Tensor, tuple[float, float, float]]:
    """What a transform returns, and the next number of each generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return transform(image), (torch.rand(()).item(), random.random(), np.random.rand())


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("backend", IMAGE_BACKENDS)
def test_a_pipeline_is_the_transform(augmentation: str, backend: str):
    transform = open_clip.image_transform(SIZE, is_train=True, aug_cfg=AUGMENTATIONS[augmentation])
    pipeline = image_pipeline(transform, backend)
    assert (pipeline.normalize is None) == (augmentation == "timm with erasing")
    differences = []
    for seed in range(8):
        content = encoded(picture(seed), "JPEG", quality=95)
        expected, after = seeded(transform, decode_image(content), seed)
        found, numbers = seeded(pipeline.transform, pipeline.decode(content), seed)
        assert numbers == after, "the same random numbers, as many"
        if pipeline.normalize is not None:
            assert found.dtype == torch.uint8
            found = pipeline.normalize(found[None])[0]
        differences.append((found - expected).abs())
    in_levels = 255 * 0.27 * torch.stack(differences)
    if backend == "pil":
        assert in_levels.max() == 0
    else:
        # A color jitter, above all of the hue, amplifies a rounding.
        assert in_levels.max() < (2 if augmentation in ("openclip", "timm with erasing") else 40)
        assert in_levels.mean() < 0.1


def test_views_are_normalized_as_single_images():
    pipeline = image_pipeline(open_clip.image_transform(SIZE, is_train=True))
    assert pipeline.normalize is not None
    images = torch.randint(0, 256, (3, 2, 3, 5, 5), dtype=torch.uint8)
    assert torch.equal(pipeline.normalize(images)[:, 1], pipeline.normalize(images[:, 1]))


@pytest.mark.parametrize("mode", MODES)
def test_torchvision_decodes_to_pillows_pixels(mode: str):
    image = Image.fromarray(np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)) if mode == "I;16" else picture(0)
    content = encoded(image if mode == "I;16" else image.convert(mode), MODES[mode])
    for data in (content, io.BytesIO(content)):
        assert np.array_equal(decode_with_torchvision(data).permute(1, 2, 0), np.asarray(decode_image(content)))


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    data = bytearray(content)
    place, length = generator.integers(0, len(data)), generator.integers(1, 40)
    kind = generator.integers(0, 4)
    if kind == 0:
        return bytes(data[:place])
    if kind == 1:
        data[place : place + length] = b""
    elif kind == 2:
        data[place : place + length] = bytes(len(data[place : place + length]))
    else:
        data += generator.bytes(length)
    return bytes(data)


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["baseline", "progressive"])
def test_both_backends_find_the_same_damage(options: dict[str, Any]):
    generator = np.random.default_rng(0)
    content = encoded(picture(1, 64, 48), "JPEG", **options)
    bad = 0
    for _ in range(300):
        data = damaged(content, generator)
        try:
            expected = np.asarray(decode_image(data))
        except BadSampleError:
            bad += 1
            with pytest.raises(BadSampleError):
                decode_with_torchvision(data)
            continue
        assert np.array_equal(decode_with_torchvision(data).permute(1, 2, 0), expected)
    assert 50 < bad < 250


def test_the_loader_gives_the_same_samples(tmp_path):
    write_shards(tmp_path, [12, 12], {3: undecodable(3), 17: sample_members(17, ["txt"])})
    transform = open_clip.image_transform(SIZE, is_train=True)
    batches, bad = {}, {}
    for backend in IMAGE_BACKENDS:
        images = image_pipeline(transform, backend)
        config = TrainLoaderConfig(batch_size=4, seed=3, views=2, caption_aware_flip=True)
        loader = build_train_loader(
            DataSpec(str(tmp_path / "*.tar"), max_bad_fraction=0.2),
            config,
            preprocess=images.transform,
            tokenizer=tokenize,
            decoder=images.decode,
        )
        batches[backend] = list(loader.iterate(0))
        bad[backend] = loader.bad.by_shard()
    assert bad["pil"] == bad["torchvision"] != {}
    assert indices(batches["pil"]) == indices(batches["torchvision"])
    for pil, torchvision in zip(batches["pil"], batches["torchvision"], strict=True):
        assert torch.equal(pil["text"], torchvision["text"])
        assert pil["image"].shape == (4, 2, 3, SIZE, SIZE) and pil["image"].dtype == torch.uint8
        assert (pil["image"].int() - torchvision["image"].int()).abs().float().mean() < 1


@pytest.mark.parametrize("decode", [decode_image, decode_with_torchvision])
def test_a_thread_of_pixels_is_refused(decode):
    """Its resize to a short side of 224 would take 12 GB."""
    file = io.BytesIO()
    Image.new("RGB", (65500, 1)).save(file, "JPEG")
    with pytest.raises(BadSampleError, match="65500 x 1 pixels, expected a ratio of at most 500"):
        decode(file.getvalue())
