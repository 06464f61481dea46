"""Images of all Pillow modes are converted to RGB as in clip-benchmark and OpenCLIP."""

import io
import json

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_dataset
from PIL import Image

from openclip_ext.evaluation.open_tasks import datacomp_task
from openclip_ext.evaluation.samples import SampleFormat, shard_samples
from openclip_ext.evaluation.tasks import FLICKR, TASKS, WINOGAVIL
from tests.evaluation import datasets


def stored_image(mode: str) -> bytes:
    """Return a PNG of colored noise in a Pillow mode, larger than the model's input."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 61, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA")
    image = image if mode in ("RGBA", "LA") else image.convert("RGB")
    return datasets.image_bytes(image.quantize(16) if mode == "P" else image.convert(mode))


@pytest.mark.parametrize("mode", ["P", "1", "L", "LA", "RGBA", "RGB"])
def test_images_of_other_modes_become_rgb_as_upstream(mode, tmp_path, tiny, make_encoder):
    """In classification, webdataset converts before the resize. In retrieval and WinoGAViL, OpenCLIP converts after it."""
    content = stored_image(mode)
    folder = datasets.write_dataset(
        tmp_path,
        [("s0", {"png": content, "cls": b"0"})],
        1,
        classnames=("a",),
        zeroshot_classification_templates=("{c}",),
    )
    encoder = make_encoder()
    converted_first = build_dataset("wds/one", root=str(folder), transform=tiny.transform)
    resized_first = tiny.transform(Image.open(io.BytesIO(content)))
    ((expected, _),) = converted_first
    (batch,) = encoder.batches(shard_samples(folder, SampleFormat(num_classes=1)))
    assert torch.equal(encoder.model_input(batch.values["image"])[0], expected)
    assert torch.equal(expected, resized_first) == (mode in ("L", "RGB")), "only modes L and RGB may be equal"

    for key, captions, texts in ((FLICKR, b"a", {"dataset_type": ["retrieval"]}), (WINOGAVIL, b"", {})):
        fields = {"png": content, **({"txt": captions} if captions else {})}
        folder = datasets.write_dataset(tmp_path / TASKS[key].folder, [("s0", fields)], 1, **texts)
        instance = {"cue": "a", "candidates": ["s0"], "associations": ["s0"]}
        (folder / "instances.jsonl").write_text(json.dumps(instance))
        encoder, seen = make_encoder(), []
        encoder.encode_images = lambda images, autocast, encoder=encoder, seen=seen: (
            seen.append((encoder.model_input(images), autocast)) or torch.ones(1, 16)
        )
        datacomp_task(TASKS[key], tmp_path, any_size=True).score(encoder)
        ((images, autocast),) = seen
        assert torch.equal(images[0], resized_first) and autocast, key
