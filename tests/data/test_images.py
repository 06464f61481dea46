"""Both image backends draw OpenCLIP's random numbers. Pillow gives exactly OpenCLIP's pixels, torchvision similar pixels."""

import io
import random
from typing import Any

import numpy as np
import open_clip
import PIL
import pytest
import torch
import webdataset
from PIL import Image
from torch import Tensor

from openclip_ext.data.images import _is_plain_jpeg, decode_with_torchvision, image_pipeline
from openclip_ext.data.loader.build import build_train_loader
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.sources.source import BadSampleError, decode_image
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import indices, tokenize
from tests.data.shards import sample_members, undecodable, write_shards

SIZE = 32
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "openclip": {},
    "simclr": {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.5},
    "timm": {"use_timm": True, "color_jitter": 0.4, "ratio": (0.7, 1.4)},
    "timm with erasing": {"use_timm": True, "re_prob": 0.9},
}
RAMP = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
IS_OLD_PILLOW = int(PIL.__version__.split(".")[0]) < 11
MODES = {"RGB": "JPEG", "L": "JPEG", "CMYK": "JPEG", "P": "PNG", "RGBA": "PNG"}


def picture(seed: int, width: int = 150, height: int = 90) -> Image.Image:
    """Return an image with coarse structures and noise, similar to a photograph."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray((pixels + generator.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def seeded(transform: Any, image: Any, seed: int) -> tuple[Tensor, tuple[float, float, float]]:
    """Seed all random generators and apply a transform; return the result and each generator's next number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return transform(image), (torch.rand(()).item(), random.random(), np.random.rand())


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_a_pipeline_is_the_transform(augmentation: str, backend: str):
    transform = open_clip.image_transform(SIZE, is_train=True, aug_cfg=AUGMENTATIONS[augmentation])
    pipeline = image_pipeline(transform, backend)
    assert (pipeline.normalize is None) == (augmentation == "timm with erasing")
    differences = []
    for seed in range(8):
        content = encoded(picture(seed), "JPEG", quality=95)
        expected, after = seeded(transform, decode_image(content), seed)
        found, numbers = seeded(pipeline.transform, pipeline.decode(content), seed)
        assert numbers == after, "the pipeline and the transform drew different random numbers"
        if pipeline.normalize is not None:
            assert found.dtype == torch.uint8
            found = pipeline.normalize(found[None])[0]
        differences.append((found - expected).abs())
    in_levels = 255 * 0.27 * torch.stack(differences)
    if backend == "pil":
        assert in_levels.max() == 0
    else:
        # Color jitter, especially of the hue, amplifies rounding errors. Unit: levels of 0 to 255.
        assert in_levels.max() < (2 if augmentation in ("openclip", "timm with erasing") else 40)
        assert in_levels.mean() < 0.1


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_gray_images_keep_the_bits_that_they_use(bits: int, image_format: str):
    """16-bit files may use only 10 or 12 bits. Their upper bytes are almost black; Pillow's conversion is almost white."""
    ramp = np.linspace(0, 2**bits - 1, 4096).astype(np.uint16).reshape(64, 64)
    expected = (ramp >> (bits - 8)).astype(np.uint8)
    images = [Image.fromarray(ramp)]
    if image_format == "TIFF":  # also as 32-bit integers, and as floats up to 255 or up to 1
        images += [Image.fromarray(ramp.astype(np.int32)), Image.fromarray(expected.astype(np.float32))]
        images += [Image.fromarray((expected / np.float32(255)).astype(np.float32))]
    if image_format == "PPM" and IS_OLD_PILLOW:
        pytest.skip("Pillow 10 cannot write 16-bit PPM files")
    for image in images:
        decoded = np.asarray(decode_image(encoded(image, image_format)))
        assert decoded.shape == (64, 64, 3)
        assert np.abs(decoded.astype(int) - expected[..., None]).max() <= (image.mode == "F"), image.mode
    assert np.array_equal(np.asarray(decode_with_torchvision(encoded(images[0], image_format)))[0], expected)


def test_gray_values_that_no_depth_explains_are_bad():
    for values in (np.full((8, 8), -5, np.int32), np.full((8, 8), np.nan, np.float32)):
        with pytest.raises(BadSampleError, match="gray values"):
            decode_image(encoded(Image.fromarray(values), "TIFF"))


def test_torchvision_decodes_to_pillows_pixels_and_neither_applies_the_orientation():
    """Both decoders keep the pixels as stored, like OpenCLIP's loaders (webdataset's "pilrgb", and the CSV data set)."""
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation 6: viewers rotate the image by 90 degrees
    contents = [encoded(picture(0).convert(mode), MODES[mode]) for mode in MODES]
    contents += [encoded(Image.fromarray(RAMP), "PNG"), encoded(picture(0), "JPEG", exif=exif)]
    # torchvision decodes these; Pillow decodes the others, to the same pixels but slower.
    assert [_is_plain_jpeg(content) for content in contents] == [True, True, False, False, False, False, True]
    for content in contents:
        theirs = webdataset.imagehandler("pilrgb")("0.jpg", content)
        for data in (content, io.BytesIO(content)):
            decoded = np.asarray(decode_image(content))
            assert decoded.shape == np.asarray(theirs).shape
            assert np.array_equal(decode_with_torchvision(data).permute(1, 2, 0), decoded)


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """Damage an image file at random: truncate it, or remove, zero or repeat some bytes."""
    place, length, kind = (int(generator.integers(0, most)) for most in (len(content), 40, 4))
    rest = content[place + length :]
    return content[:place] + (b"", rest, bytes(length) + rest, content[place:] + rest)[kind]


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["baseline", "progressive"])
def test_both_backends_find_the_same_damage(options: dict[str, Any]):
    if options and IS_OLD_PILLOW:
        pytest.skip("Pillow 10 and torchvision have versions of libjpeg that repair damage differently")
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
    spec = DataSpec(str(tmp_path / "*.tar"), max_bad_fraction=0.2)
    config = TrainLoaderConfig(batch_size=4, seed=3, views=2, caption_aware_flip=True)
    batches, bad = {}, {}
    for backend in ("pil", "torchvision"):
        images = image_pipeline(transform, backend)
        functions = {"preprocess": images.transform, "tokenizer": tokenize, "decoder": images.decode}
        loader = build_train_loader(spec, config, **functions)
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
    """If the short side of such an image were resized to 224, the image would need 12 GB."""
    with pytest.raises(BadSampleError, match="65500 x 1 pixels, expected an aspect ratio of at most 500"):
        decode(encoded(Image.new("RGB", (65500, 1)), "JPEG"))
