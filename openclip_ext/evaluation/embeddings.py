"""Compute a model's embeddings of a data set, in memory or in files."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext import compat
from openclip_ext.files.writing import naming


@dataclass(frozen=True)
class Embeddings:
    """Unit embeddings ``(n, d)`` float32 of a training set, in host memory or memory-mapped files."""

    image: Tensor
    text: Tensor
    index: Tensor  # ``(n,)`` positions in the data set; bad and excluded samples are missing
    logit_scale: float  # the model's ``1/τ``


@torch.no_grad()
def outputs_of(
    model: Callable, batches: Iterable[Mapping[str, Tensor]], precision: str, device: torch.device
) -> Iterator[tuple[Mapping[str, Tensor], Any]]:
    """Yield each batch with the output of ``model(image, text)`` for it. The model must be in evaluation mode."""
    autocast = compat.autocast_context(precision, device)
    input_dtype = open_clip.get_input_dtype(precision)
    for batch in batches:
        image, text = batch["image"].to(device, input_dtype, non_blocking=True), batch["text"]
        with autocast():
            output = model(image, text.to(device, non_blocking=True))
        yield batch, output


def embed(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    precision: str,
    device: torch.device,
    rows: int,
    folder: Path | None = None,
) -> Embeddings:
    """Embed batches of ``image``, ``text`` and ``index``, up to ``rows`` samples. The model must be in evaluation mode.

    The embeddings are stored in memory-mapped files in ``folder``, or in host memory if ``folder`` is None (default).
    """
    kept: tuple[Tensor, ...] = ()
    count = 0
    for batch, output in outputs_of(model, batches, precision, device):
        # Embeddings are copied to the host, because a GPU has no room for the model and a large training set's embeddings.
        features = [output[name] for name in ("image_features", "text_features")]
        # The norms of embeddings in half precision differ from 1 by up to 0.3 %.
        if features[0].dtype != torch.float32:
            features = [F.normalize(side.float(), dim=1) for side in features]
        kept = kept or tables(folder, rows, features[0].shape[1])
        here = slice(count, count + len(batch["index"]))
        for table, values in zip(kept, (*features, batch["index"]), strict=True):
            table[here] = values
        count = here.stop
    image, text, index = (table[:count] for table in kept)
    return Embeddings(image, text, index, output["logit_scale"].item())


TABLES = ("image", "text", "index")  # the files of :func:`tables`


def tables(folder: Path | None, rows: int, width: int) -> tuple[Tensor, ...]:
    """Return unfilled tables for image embeddings, text embeddings and indices: files in ``folder``, or in memory if None."""

    def table(name: str, size: int, dtype: torch.dtype) -> Tensor:
        if folder is None:
            return torch.empty(size, dtype=dtype)
        path = folder / name
        path.touch()
        if hasattr(os, "posix_fallocate"):  # not on macOS. Without it, a full disk would later be a bus error
            with naming(path), path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype)

    image, text = (table(side, rows * width, torch.float32).view(rows, width) for side in TABLES[:2])
    return image, text, table(TABLES[2], rows, torch.int64)
