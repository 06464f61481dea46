"""Read image files for the evaluations of CLIP-Lite."""

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from openclip_ext.cli.messages import get_logger
from openclip_ext.evaluation.data import IMAGE_EXTENSIONS, SampleFormat, Samples, StoredSample
from openclip_ext.evaluation.features import Encoder

logger = get_logger(__name__)


def list_images(folder: Path) -> list[Path]:
    """Return all image files below a folder, sorted by path; raise ValueError if there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower()[1:] in IMAGE_EXTENSIONS)
    if not paths:
        raise ValueError(f"{folder} has no images ({', '.join(IMAGE_EXTENSIONS)}).")
    return paths


def open_image(path: Path) -> Image.Image:
    """Read an image file as RGB; raise ValueError if it is unreadable."""
    try:
        return Image.open(path).convert("RGB")
    except Exception as error:  # decoders raise many exceptions, even struct.error and SyntaxError
        raise ValueError(f"{path} is not a readable image: {error}") from error


def encode_files(paths: Sequence[Path], encoder: Encoder, compute: Callable[[Samples], dict[str, Tensor]]) -> Samples:
    """Apply a function to image files with `Encoder.collect`; the keys are paths. Files that do not decode are logged."""
    batches = encoder.batches([StoredSample(path, str(path), {}) for path in paths], SampleFormat())
    found = encoder.collect(batches, compute, "images", len(paths))
    for message in found.skipped.values():
        logger.warning(f"Image skipped: {message}")
    return found
