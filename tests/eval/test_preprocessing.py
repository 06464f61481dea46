"""The two parts of a transform are, bit for bit, the transform."""

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image
from torchvision.transforms import Compose, ToTensor

from eval.data import SampleFormat, find_shards
from eval.preprocessing import split_transform
from tests.eval import datasets


def pictures() -> list[Image.Image]:
    generator = np.random.default_rng(0)
    shapes = [(40, 61, 3), (64, 32, 3), (17, 23, 3)]
    return [Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


@pytest.mark.parametrize("resize_mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mean", [None, (0.5, 0.5, 0.5)])
def test_the_parts_together_are_openclips_transform(resize_mode, interpolation, mean):
    options = {"resize_mode": resize_mode, "interpolation": interpolation}
    transform = image_transform(32, is_train=False, mean=mean, **options)
    on_images, on_batches = split_transform(transform)
    batch = torch.stack([on_images(image) for image in pictures()])
    assert batch.dtype == torch.uint8
    assert torch.equal(on_batches(batch), torch.stack([transform(image) for image in pictures()]))


@pytest.mark.parametrize("transform", [ToTensor(), Compose([ToTensor()]), lambda image: torch.zeros(3)])
def test_another_transform_stays_whole(transform):
    assert split_transform(transform) == (transform, None)


def test_embeddings_are_those_of_preprocessed_images(tmp_path, tiny, make_encoder):
    folder = datasets.make_task(tmp_path, "cifar10", shards=1)
    encoder = make_encoder(batch_size=24)
    (batch,) = encoder.batches(find_shards(folder), SampleFormat())
    encoder_of_floats = make_encoder(batch_size=24)
    encoder_of_floats._transform, encoder_of_floats._normalize = tiny.preprocess, None
    (floats,) = encoder_of_floats.batches(find_shards(folder), SampleFormat())
    assert (batch.images.dtype, floats.images.dtype) == (torch.uint8, torch.float32)
    expected = encoder.encode_images(floats.images)
    assert torch.equal(encoder.encode_images(batch.images), expected)
