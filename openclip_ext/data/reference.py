"""The embeddings of a frozen reference model by sample index: a folder that ``openclip-ext embed`` writes.

``images.npy`` and ``texts.npy`` are ``(n, d)`` float16, unit rows; those of samples that could not be read are zero.
``embeddings.json`` is written last, and says of which model and data they are.
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
# The batch's keys.
REFERENCE_KEYS = ("reference_image", "reference_text")


@dataclass(frozen=True)
class EmbeddingStore:
    """Embeddings of a data set by index, mapped from their files.

    Attributes:
        folder: where they are.
        images, texts: ``(n, d)`` float16.
        positions: rows of the samples that are asked for by their place in this list; None: all, by their index.
        about: ``embeddings.json``: ``model``, ``pretrained``, ``weights`` (SHA-256), ``preprocess``, ``caption_key``,
            ``samples``, ``width``, ``data`` (the source's ``index_digest``; null if unknown) and ``logit_scale``, the
            model's ``1/τ``.
    """

    folder: Path
    images: np.ndarray
    texts: np.ndarray
    about: dict[str, Any]
    positions: np.ndarray | None = None

    @classmethod
    def open(
        cls, folder: str | os.PathLike, num_samples: int | None = None, data: str | None = None
    ) -> "EmbeddingStore":
        """Map the files of a folder.

        Args:
            folder: that ``openclip-ext embed`` wrote.
            num_samples, data: number of samples and ``index_digest`` of the data that they must be of; None: of any.

        Raises:
            UsageError: there is no such folder, it is not finished, a file is damaged, or they are of other data.
        """
        path = Path(folder)
        try:
            about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
            shape = (about["samples"], about["width"])
        except FileNotFoundError:
            there = "it is not finished; start the same command again" if path.is_dir() else "there is no such folder"
            raise UsageError(f"--reference {path}: {there} (openclip-ext embed writes it)") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--reference {path}: {ABOUT} is unreadable ({error!r}); write the folder again") from None
        for wanted, found, what in ((num_samples, about["samples"], "samples"), (data, about.get("data"), "data")):
            if wanted is not None and found is not None and wanted != found:
                raise UsageError(
                    f"--reference {path}: embeddings of {about['samples']:,} samples of other data than --train-data, or in "
                    f"another order ({what}: {found}, here {wanted}); make them for this data set with openclip-ext embed"
                )
        images, texts = (_mapped(path / name, shape) for name in (IMAGES, TEXTS))
        return cls(path, images, texts, about)

    def __reduce__(self) -> tuple[Any, ...]:
        # The files are mapped again. Pickle would copy them.
        return _reopened, (self.folder, self.positions)

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        return self.about["width"]

    @property
    def temperature(self) -> float:
        """The reference model's own temperature."""
        return 1 / self.about["logit_scale"]

    def part(self, positions: Sequence[int]) -> "EmbeddingStore":
        """Return the embeddings of some samples, by their place in ``positions``."""
        return replace(self, positions=np.asarray(positions))

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings ``(B, d)`` float16 of images and texts at positions ``(B,)``."""
        positions = index.numpy() if self.positions is None else self.positions[index.numpy()]
        return torch.from_numpy(self.images[positions]), torch.from_numpy(self.texts[positions])


def _reopened(folder: Path, positions: np.ndarray | None) -> EmbeddingStore:
    return replace(EmbeddingStore.open(folder), positions=positions)


def _mapped(path: Path, shape: tuple[int, int]) -> np.ndarray:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--reference {path}: missing or truncated ({error}); write the folder again") from None
    if values.shape != shape or values.dtype != np.float16:
        raise UsageError(
            f"--reference {path}: {values.shape} {values.dtype}, expected {shape} float16; write the folder again"
        )
    return values
