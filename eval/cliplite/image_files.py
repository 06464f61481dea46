"""Images as plain files; shared by the evaluations of CLIP-Lite."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import IMAGE_EXTENSIONS
from ..features import Encoder


def list_images(folder: Path) -> list[Path]:
    """Return all image files below a folder, sorted by path.

    Raises:
        ValueError: if there are none.
    """
    suffixes = {f".{extension}" for extension in IMAGE_EXTENSIONS}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(suffixes))}).")
    return paths


def open_image(path: Path) -> Image.Image:
    """Open an image in RGB.

    Raises:
        ValueError: if the file is missing or does not decode.
    """
    try:
        return Image.open(path).convert("RGB")
    except Exception as error:  # decoders raise anything, struct.error and SyntaxError among it
        raise ValueError(f"{path} is not a readable image: {error}") from error


class _ImageFiles(Dataset):
    """``(position, (3, H, W))`` of every file; None where it does not decode."""

    def __init__(self, paths: Sequence[Path], encoder: Encoder):
        self.paths = paths
        self.preprocess = encoder.preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> tuple[int, Tensor] | None:
        try:
            return position, self.preprocess(open_image(self.paths[position]))
        except ValueError as error:
            logging.warning(f"left out: {error}")
            return None


def read_images(paths: Sequence[Path], encoder: Encoder) -> Iterator[tuple[Tensor, Tensor]]:
    """Decode files in batches; one that does not decode is named in the log and left out.

    Yields:
        Positions in ``paths``, ``(B,)`` int64, and images, ``(B, 3, H, W)``.
    """
    workers = min(encoder.workers, len(paths))
    generator = torch.Generator()  # starting workers draws a seed: not from the global generator
    files = _ImageFiles(paths, encoder)
    for samples in DataLoader(files, encoder.batch_size, num_workers=workers, collate_fn=list, generator=generator):
        decoded = [sample for sample in samples if sample is not None]
        if decoded:
            positions, images = zip(*decoded, strict=True)
            yield torch.tensor(positions), torch.stack(images)
