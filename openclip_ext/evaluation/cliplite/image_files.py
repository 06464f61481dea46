"""Read images from plain files, for the evaluations of CLIP-Lite."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from openclip_ext.evaluation.data import IMAGE_EXTENSIONS, Batch, Skipped, collate
from openclip_ext.evaluation.features import Collected, Encoder


def list_images(folder: Path) -> list[Path]:
    """Return all image files below a folder, sorted by path."""
    suffixes = {f".{extension}" for extension in IMAGE_EXTENSIONS}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(suffixes))}).")
    return paths


def open_image(path: Path) -> Image.Image:
    """Open an image in RGB."""
    try:
        return Image.open(path).convert("RGB")
    except Exception as error:  # decoders raise anything, even struct.error and SyntaxError
        raise ValueError(f"{path} is not a readable image: {error}") from error


class _ImageFiles(Dataset):
    """Reads image files as samples for `collate`, or as `Skipped` if they do not decode."""

    def __init__(self, paths: Sequence[Path], encoder: Encoder):
        self.paths = paths
        self.preprocess = encoder.preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> dict[str, Any] | Skipped:
        path = self.paths[position]
        try:
            return {"key": path.name, "order": position, "image": self.preprocess(open_image(path))}
        except ValueError as error:
            return Skipped(str(path.parent), path.name, str(error))


def encode_files(paths: Sequence[Path], encoder: Encoder, compute: Callable[[Batch], dict[str, Tensor]]) -> Collected:
    """Apply a function to image files, as `Encoder.collect` does, and log those that do not decode.

    ``Batch.order`` is the position in ``paths``.
    """
    workers = min(encoder.workers, len(paths))
    generator = torch.Generator()  # workers draw a seed, which must not come from the global generator
    files = _ImageFiles(paths, encoder)
    batches = DataLoader(files, encoder.batch_size, num_workers=workers, collate_fn=collate, generator=generator)
    found = encoder.collect(iter(batches), compute, "images", len(paths))
    for entry in found.skipped:
        logging.warning(f"left out: {entry}")
    return found
