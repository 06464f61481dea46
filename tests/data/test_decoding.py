"""From bytes to an RGB image and a caption: what OpenCLIP does, except where that loses the picture."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openclip_ext.data.source import BadSampleError, RawSample, SampleKeys, decode_image

RAMP = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)


def encode(image: Image.Image, image_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_16_bit_gray_images_are_scaled(image_format: str):
    """Pillow's conversion to RGB clips at 255, which makes nearly every pixel white."""
    decoded = decode_image(encode(Image.fromarray(RAMP), image_format))
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), np.repeat((RAMP >> 8)[..., None], 3, axis=2))


def test_the_exif_orientation_is_not_applied():
    """As in OpenCLIP: webdataset's "pilrgb" and its CSV data set take the pixels as they are stored."""
    import webdataset

    stored = Image.new("RGB", (16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show it
    data = encode(stored, "JPEG", exif=exif)
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == 6
    theirs = webdataset.imagehandler("pilrgb")("0.jpg", data)
    assert decode_image(data).size == theirs.size == (16, 8)


def caption(data: bytes) -> str:
    raw = RawSample(0, {"png": encode(Image.new("RGB", (4, 4)), "PNG"), "json": data})
    return SampleKeys("png", "json:caption").decode(raw, decode_image)[1]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 2000,
        b"[" * 100_000,
        b'{"caption": ' * 2000,
        b'{"caption": 1',
        b'{"caption": "a\\ud800"}',
        b"9" * 5000,
        b"\xff",
    ],
    ids=["deep", "deeper", "deep dictionary", "cut", "half a surrogate pair", "huge number", "no UTF-8"],
)
def test_captions_that_do_not_decode_are_bad_samples(data: bytes):
    with pytest.raises(BadSampleError, match="caption"):
        caption(data)
    assert caption('{"caption": "\\ud83d\\ude00 grüße"}'.encode()) == "😀 grüße"


def test_a_named_pipe_in_a_csv_file_is_a_bad_row(tmp_path: Path):
    from openclip_ext.data.csv import CsvSource

    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "data.csv").write_text(f"filepath\ttitle\n{tmp_path}/pipe.jpg\ta caption\n")
    source = CsvSource(str(tmp_path / "data.csv"), "filepath", "title")
    with pytest.raises(BadSampleError, match="is no regular file"):
        source.decode(source.reader()(0), decode_image)
