"""Embeddings that a frozen reference model computed for each sample, in a folder that ``openclip-ext embed`` writes.

``images.npy`` and ``texts.npy`` are ``(n, d)`` float16 with unit-norm rows; the rows of unreadable samples are zero.
``embeddings.json`` describes the model and the data. It is written last, so a folder that contains it is complete.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclip_ext.cli.errors import UsageError

IMAGES, TEXTS, ABOUT = "images.npy", "texts.npy", "embeddings.json"
# A value of --reference: the training run embeds the data with its model before the first step.
START = "start"
# Keys of the embeddings in a batch.
REFERENCE_KEYS = ("reference_image", "reference_text")


@dataclass(frozen=True)
class EmbeddingStore:
    """Embeddings of the samples of a data set, memory-mapped from their files.

    Attributes:
        images, texts: Embeddings ``(n, d)`` float16, from files in ``folder``.
        positions: For a subset of the data set, the row of each sample. None (default) means that row i belongs to sample i.
        about: Content of ``embeddings.json``: ``model``, ``pretrained``, ``weights`` (SHA-256), ``preprocess``,
            ``image_key``, ``caption_key``, ``samples`` (number of samples), ``unreadable`` (number of
            samples with rows of zeros), ``width``, ``data`` (``index_digest`` of the source; null if unknown) and
            ``logit_scale`` (``1/τ`` of the model).
    """

    folder: Path
    images: np.ndarray
    texts: np.ndarray
    about: dict[str, Any]
    positions: np.ndarray | None = None

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], num_samples: int | None = None, data: str | None = None, **keys: str
    ) -> "EmbeddingStore":
        """Memory-map the files of a folder that ``openclip-ext embed`` wrote.

        Raises:
            UsageError: The folder does not exist, is incomplete or corrupt, or does not match ``num_samples``, ``data``
                (an ``index_digest``) or ``keys`` (``image_key`` and ``caption_key``).
        """
        path, name, arrays = Path(folder), ABOUT, []
        try:
            about = dict(json.loads((path / ABOUT).read_text(encoding="utf-8")))
            shape = int(about["samples"]), int(about["width"])
            float(about["logit_scale"])
            for name in (IMAGES, TEXTS):
                arrays.append(np.load(path / name, mmap_mode="r", allow_pickle=False))
                if arrays[-1].shape != shape or arrays[-1].dtype != np.float16:
                    raise ValueError(f"expected {shape} float16, found {arrays[-1].shape} {arrays[-1].dtype}")
        except (OSError, ValueError, TypeError, KeyError) as error:
            # If embeddings.json exists, openclip-ext embed treats the folder as complete and would not repair its other files.
            fix = "Remove the folder, and start" if (path / ABOUT).exists() else "Start"
            raise UsageError(
                f"--reference {path / name}: missing or truncated, or the folder is not finished ({error!r}). {fix} "
                "openclip-ext embed again"
            ) from None
        for what, wanted in {"samples": num_samples, "data": data, **keys}.items():
            found = about.get(what)
            if wanted is not None and found is not None and wanted != found:
                raise UsageError(
                    f"--reference {path} does not belong to --train-data: expected {what} {wanted}, found {found}. Write the "
                    "embeddings of this data set with openclip-ext embed"
                )
        return cls(path, arrays[0], arrays[1], about)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would copy the arrays, so the receiving process maps the files again.
        return _reopen, (self.folder, self.positions)

    @property
    def width(self) -> int:
        """Embedding dimension ``d``."""
        return self.about["width"]

    @property
    def temperature(self) -> float:
        """Temperature τ of the reference model."""
        return 1 / self.about["logit_scale"]

    @property
    def warning(self) -> str | None:
        """A warning about samples without embeddings; None if all samples have embeddings."""
        if not (unread := self.about.get("unreadable")):
            return None
        return (
            f"--reference {self.folder}: {unread:,} of {self.about['samples']:,} samples were unreadable, so steering and "
            "distillation mask them. If they are repaired, run openclip-ext embed with another --output"
        )

    def part(self, positions: Sequence[int]) -> "EmbeddingStore":
        """Return the embeddings of a subset: row i of the result belongs to the sample ``positions[i]``."""
        return replace(self, positions=np.asarray(positions))

    def has_image(self, index: int) -> bool:
        """Return whether a sample has an image embedding, because its image was readable."""
        return bool(self.images[index if self.positions is None else self.positions[index]].any())

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image and text embeddings, each ``(B, d)`` float16, of the samples ``index`` ``(B,)``."""
        positions = index.numpy() if self.positions is None else self.positions[index.numpy()]
        return torch.from_numpy(self.images[positions]), torch.from_numpy(self.texts[positions])


def _reopen(folder: Path, positions: np.ndarray | None) -> EmbeddingStore:
    return replace(EmbeddingStore.open(folder), positions=positions)
