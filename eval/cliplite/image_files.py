"""Images as plain files; shared by the evaluations beyond DataComp's tasks."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import IMAGE_EXTENSIONS
from ..features import Encoder


def list_images(folder: Path) -> list[Path]:
    """All image files below a folder, sorted by path.

    Raises:
        ValueError: if there are none.
    """
    suffixes = {f".{extension}" for extension in IMAGE_EXTENSIONS}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(suffixes))}).")
    return paths


def open_image(path: Path) -> Image.Image:
    """An image in RGB.

    Raises:
        ValueError: if the file is missing or does not decode.
    """
    try:
        return Image.open(path).convert("RGB")
    except Exception as error:  # decoders raise anything, struct.error and SyntaxError among it
        raise ValueError(f"{path} is not a readable image: {error}") from error


class ImageFiles(Dataset):
    """``(position, (3, H, W))`` of every file; the image is None where it does not decode."""

    def __init__(self, paths: Sequence[Path], preprocess: Callable[[Any], Tensor]):
        self.paths = paths
        self.preprocess = preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> tuple[int, Tensor | None]:
        try:
            return position, self.preprocess(open_image(self.paths[position]))
        except ValueError as error:
            logging.warning(f"left out: {error}")
            return position, None


def read_images(paths: Sequence[Path], encoder: Encoder) -> Iterator[tuple[Tensor, Tensor]]:
    """Decode files in batches; one that does not decode is named in the log and left out.

    Yields:
        Positions in ``paths``, ``(B,)`` int64, and images, ``(B, 3, H, W)``.
    """
    loader = DataLoader(
        ImageFiles(paths, encoder.preprocess),
        batch_size=encoder.batch_size,
        num_workers=min(encoder.workers, len(paths)),
        collate_fn=_collate,
        # Starting workers draws a seed: not from the global generator.
        generator=torch.Generator(),
    )
    for positions, images in loader:
        if len(positions):
            yield positions, images


def _collate(samples: Sequence[tuple[int, Tensor | None]]) -> tuple[Tensor, Tensor]:
    decoded = [(position, image) for position, image in samples if image is not None]
    positions = torch.tensor([position for position, _ in decoded], dtype=torch.int64)
    return positions, torch.stack([image for _, image in decoded]) if decoded else torch.empty(0)
